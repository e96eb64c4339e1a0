"""``phalanx drain``: empty a node, or stop a job with a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.connection import connected, order_job_or_node, print_done
from phalanx.cli.options import Json, NodeOrJob, ServerUrl, State
from phalanx.control.wire.api_types import DrainIn

app = typer.Typer()


@app.command()
def drain(
    what: NodeOrJob,
    within: Annotated[
        int, typer.Option(min=0, help="For a node: seconds until it must be empty.")
    ] = 0,
    why: Annotated[str, typer.Option(help="Reason shown to others.")] = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Drain a node: move its work away, place none on it; or checkpoint and hold a job."""
    with connected(server, json, state) as client:
        order = DrainIn(deadline_seconds=within, why=why)
        done = order_job_or_node(client, what, "drain", "drain", order)
    print_done(what, done, json)
