"""``phalanx page``: a link to the page that signs its reader in, once."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.control.server.api.page import LoginLink

app = typer.Typer()

VIEWS = (
    "fleet",
    "jobs",
    "job",
    "goodput",
    "events",
    "queue",
    "compare",
    "plan",
    "simulate",
    "node",
)


@app.command()
def page(
    view: Annotated[str, typer.Argument(help="Where it leads, e.g. job/7, goodput.")] = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Print a link that opens the page with your rights; it is good once, for half an hour."""
    name = view.strip("/#").partition("/")[0].partition("?")[0]
    if view and name not in VIEWS:
        raise typer.BadParameter(f"one of {', '.join(VIEWS)}, not {name!r}", param_hint="VIEW")
    with connected(server, json, state) as client:
        made = client.post("/v1/login-links", None, LoginLink)
    address = made.url + (f"/{view.strip('/#')}" if view else "")
    if json:
        print_json({"url": address, "expires_ns": made.expires_ns})
    else:
        print(address)
