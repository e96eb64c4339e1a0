"""``phalanx requeue``: stop jobs with a checkpoint and queue them again."""

from __future__ import annotations

import typer

from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.queue.job_orders import Numbers, Why, give

app = typer.Typer()


@app.command()
def requeue(
    jobs: Numbers, why: Why = "", server: ServerUrl = "", state: State = None, json: Json = False
) -> None:
    """Checkpoint and stop jobs, then queue them again (`phalanx drain` holds them instead)."""
    give("requeue", jobs, array=False, why=why, server=server, state=state, json=json)
