"""``phalanx release``: let held jobs into the queue."""

from __future__ import annotations

import typer

from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.queue.job_orders import Numbers, WholeArray, order_jobs

app = typer.Typer()


@app.command()
def release(
    jobs: Numbers,
    array: WholeArray = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Let held jobs into the queue; what an operator holds only an operator releases."""
    order_jobs("release", jobs, array=array, server=server, state=state, json=json)
