"""``phalanx hold``: keep jobs that wait out of the queue."""

from __future__ import annotations

import typer

from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.queue.job_orders import Numbers, WholeArray, order_jobs

app = typer.Typer()


@app.command()
def hold(
    jobs: Numbers,
    array: WholeArray = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Keep jobs that wait out of the queue until they are released."""
    order_jobs("hold", jobs, array=array, server=server, state=state, json=json)
