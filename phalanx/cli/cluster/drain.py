"""``phalanx drain``: empty a node, or stop a job with a checkpoint."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from phalanx.cli.connection import connected, print_done
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.control.wire.api_types import Done, Drain

app = typer.Typer()


@app.command()
def drain(
    what: Annotated[str, typer.Argument(metavar="NODE|JOB", help="Name or number.")],
    within: Annotated[int, typer.Option(min=0, help="A node: empty it in so many seconds.")] = 0,
    why: Annotated[str, typer.Option(help="A node: what others read about it.")] = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Empty a node and give it no new work; a job makes a checkpoint and waits for ``resume``."""
    with connected(server, json, state) as client:
        if what.isdigit():
            done = client.post(f"/v1/jobs/{what}/drain", None, Done)
        else:
            body = Drain(deadline_seconds=within, why=why)
            done = client.post(f"/v1/nodes/{quote(what, safe='')}/drain", body, Done)
    print_done(what, done, json)
