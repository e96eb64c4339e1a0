"""``phalanx drain``: empty a node, or stop a job with a checkpoint."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from phalanx.cli.connection import connected, print_done
from phalanx.cli.options import Json, NodeOrJob, ServerUrl, State
from phalanx.control.wire.api_types import Done, DrainIn, OrderWhy

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
        if what.isdigit():
            reason = OrderWhy(why=why) if why else None
            done = client.post(f"/v1/jobs/{what}/drain", reason, Done)
        else:
            body = DrainIn(deadline_seconds=within, why=why)
            done = client.post(f"/v1/nodes/{quote(what, safe='')}/drain", body, Done)
    print_done(what, done, json)
