"""``phalanx resume``: give a node back, or let a held job go on."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from phalanx.cli.connection import connected, print_done
from phalanx.cli.options import Json, NodeOrJob, ServerUrl, State
from phalanx.control.wire.api_types import Done, OrderWhy, Readmit

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
        if what.isdigit():
            reason = OrderWhy(why=why) if why else None
            done = client.post(f"/v1/jobs/{what}/release", reason, Done)
        else:
            body = Readmit(tested=tested, why=why)
            done = client.post(f"/v1/nodes/{quote(what, safe='')}/readmit", body, Done)
    print_done(what, done, json)
