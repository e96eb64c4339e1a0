"""``phalanx quota``: what teams own and use."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import add_row, print_table, table
from phalanx.control.wire.api_types import Done, QuotaIn, QuotaList

app = typer.Typer()


@app.command()
def quota(
    team: Annotated[str, typer.Argument(help="Team whose quota is set.")] = "",
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs in its quota.")] = None,
    ceiling: Annotated[
        int, typer.Option(min=0, help="Limit including borrowed GPUs; 0: no limit.")
    ] = 0,
    weight: Annotated[int, typer.Option(min=1, help="Weight in fair-share scheduling.")] = 1,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show teams' GPU quotas and use, or set a quota (TEAM --gpus N)."""
    if bool(team) != (gpus is not None):
        raise typer.BadParameter("give a team and --gpus to set a quota, or neither to list them")
    with connected(server, json, state) as client:
        if team and gpus is not None:
            body = QuotaIn(gpus=gpus, ceiling=ceiling, weight=weight)
            client.put(f"/v1/quotas/{quote(team, safe='')}", body, Done)
        listed = client.get("/v1/quotas", QuotaList)
    if json:
        print_json(listed)
        return
    made = table("TEAM", "OWNS", "CEILING", "WEIGHT", "USES")
    for each in listed.quotas:
        add_row(made, each.team, each.gpus, each.ceiling or "-", each.weight, each.used_gpus)
    print_table(made)
