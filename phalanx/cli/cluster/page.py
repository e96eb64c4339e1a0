"""``phalanx page``: a link to the page that signs its reader in, once."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.control.server.api.page import LoginLink
from phalanx.control.server.api.saved_views import SavedViewIn
from phalanx.observe.page import view_names

app = typer.Typer()


@app.command()
def page(
    view: Annotated[str, typer.Argument(help="View to open, e.g. job/7, goodput.")] = "",
    save: Annotated[
        str, typer.Option(metavar="NAME", help="Save the view under a name for your team instead.")
    ] = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Print a one-time link that opens the page with your rights; it expires after 30 minutes."""
    known, name = view_names(), view.strip("/#").partition("/")[0].partition("?")[0]
    if (view or save) and name not in known:
        raise typer.BadParameter(f"one of {', '.join(known)}, not {name!r}", param_hint="VIEW")
    with connected(server, json, state) as client:
        if save:
            kept = SavedViewIn(address=f"#/{view.strip('/#')}")
            client.put(f"/v1/views/{quote(save, safe='')}", kept, dict)
            print_json({"view": save}) if json else print(f"{save}: kept, for your team too")
            return
        made = client.post("/v1/login-links", None, LoginLink)
    address = made.url + (f"/{view.strip('/#')}" if view else "")
    if json:
        print_json({"url": address, "expires_ns": made.expires_ns})
    else:
        print(address)
