"""``phalanx resume``: give a node back, or let a held job go on."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from phalanx.cli.connection import connected, print_done
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.control.wire.api_types import Done, Readmit

app = typer.Typer()


@app.command()
def resume(
    what: Annotated[str, typer.Argument(metavar="NODE|JOB", help="Name or number.")],
    tested: Annotated[bool, typer.Option(help="A node: without a test before.")] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Give a node back to the fleet, or let a held job into the queue."""
    with connected(server, json, state) as client:
        if what.isdigit():
            done = client.post(f"/v1/jobs/{what}/release", None, Done)
        else:
            body = Readmit(tested=tested)
            done = client.post(f"/v1/nodes/{quote(what, safe='')}/readmit", body, Done)
    print_done(what, done, json)
