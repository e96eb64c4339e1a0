"""``phalanx resume``: give a node back, or let a held job go on."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.connection import connected, order_job_or_node, print_done
from phalanx.cli.options import Json, NodeOrJob, ServerUrl, State
from phalanx.control.wire.api_types import Readmit

app = typer.Typer()


@app.command()
def resume(
    what: NodeOrJob,
    tested: Annotated[bool, typer.Option(help="For a node: skip the test.")] = False,
    why: Annotated[str, typer.Option(help="Reason shown to others.")] = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Return a drained node to service, or release a held job into the queue."""
    with connected(server, json, state) as client:
        order = Readmit(tested=tested, why=why)
        done = order_job_or_node(client, what, "release", "readmit", order)
    print_done(what, done, json)
