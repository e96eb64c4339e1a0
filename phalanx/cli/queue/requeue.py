"""``phalanx requeue``: stop jobs with a checkpoint and queue them again."""

from __future__ import annotations

import typer

from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.queue.job_orders import Numbers, order_jobs

app = typer.Typer()


@app.command()
def requeue(jobs: Numbers, server: ServerUrl = "", state: State = None, json: Json = False) -> None:
    """Stop jobs with a checkpoint and queue them again; `phalanx drain` keeps them out."""
    order_jobs("requeue", jobs, array=False, server=server, state=state, json=json)
