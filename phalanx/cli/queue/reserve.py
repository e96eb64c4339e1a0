"""``phalanx reserve``: nodes kept for teams, or empty for maintenance, for a time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated
from urllib.parse import quote

import typer

from phalanx.cli.connection import connected
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import exit_on_config_error, print_json
from phalanx.cli.queue.times import SPAN_HINT, span_seconds, time_ns
from phalanx.cli.tables import add_row, print_table, table, when
from phalanx.config import ConfigError
from phalanx.control.wire.api_types import Done, ReservationIn, ReservationList

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class ReserveOptions:
    """What ``phalanx reserve`` is asked for."""

    name: Annotated[str, typer.Argument(help="Name of the reservation; none: list all.")] = ""
    begin: Annotated[
        str, typer.Option(metavar="TIME", help="08:00, 2026-11-19T08:00, +2h; none: now.")
    ] = ""
    until: Annotated[str, typer.Option(metavar="TIME", help="When it ends.")] = ""
    length: Annotated[
        str, typer.Option("--for", metavar="SPAN", help="Length instead of an end: 90m, 4h, 2d.")
    ] = ""
    gpus: Annotated[
        int, typer.Option(min=0, help="Reserve any nodes with so many GPUs in total.")
    ] = 0
    node: Annotated[
        list[str] | None, typer.Option(help="Reserve these nodes instead (repeatable).")
    ] = None
    team: Annotated[
        list[str] | None,
        typer.Option(help="Team that may use them (repeatable); none: kept empty."),
    ] = None
    remove: Annotated[bool, typer.Option("--remove", help="End the reservation.")] = False

    def asked(self, now: datetime) -> ReservationIn:
        """The reservation; ConfigError where it makes no sense."""
        if self.remove:
            return ReservationIn(start_ns=0, end_ns=0)
        if bool(self.until) == bool(self.length):
            rule = "needs an end"
            raise ConfigError("--for", '""', rule, f"give --for ({SPAN_HINT}) or --until: one")
        if bool(self.gpus) == bool(self.node):
            raise ConfigError("--gpus", str(self.gpus), "needs nodes", "give --gpus or --node: one")
        start_ns = time_ns("--begin", self.begin or "+1s", now)
        if self.length:
            end_ns = start_ns + round(span_seconds("--for", self.length) * 10**9)
        else:
            end_ns = time_ns("--until", self.until, now)
        if end_ns <= start_ns:
            rule = "is not after its beginning"
            raise ConfigError("--until", f'"{self.until}"', rule, "give a later time")
        return ReservationIn(
            start_ns=start_ns,
            end_ns=end_ns,
            nodes=tuple(self.node or ()),
            gpus=self.gpus,
            teams=tuple(self.team or ()),
        )


@app.command()
@takes_options
def reserve(
    options: ReserveOptions, server: ServerUrl = "", state: State = None, json: Json = False
) -> None:
    """Reserve nodes for teams, or keep them empty for maintenance; list reservations."""
    with connected(server, json, state) as client:
        if options.name:
            with exit_on_config_error(json):
                body = options.asked(datetime.now().astimezone())
            client.put(f"/v1/reservations/{quote(options.name, safe='')}", body, Done)
        elif options != ReserveOptions():
            raise typer.BadParameter("a reservation has a name: `phalanx reserve NAME --for 4h …`")
        listed = client.get("/v1/reservations", ReservationList)
    if json:
        print_json(listed)
        return
    made = table("NAME", "FROM", "UNTIL", "WHAT", "FOR")
    for each in listed.reservations:
        what = f"{each.gpus} GPUs" if each.gpus else ", ".join(each.nodes)
        teams = ", ".join(each.teams) or "nobody: maintenance"
        add_row(made, each.name, when(each.start_ns), when(each.end_ns), what, teams)
    if listed.reservations:
        print_table(made)
    else:
        print("nothing is reserved")
