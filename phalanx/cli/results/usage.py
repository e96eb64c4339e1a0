"""``phalanx usage``: who used GPUs over time."""

from __future__ import annotations

import csv
import sys
from datetime import datetime
from typing import Annotated, Literal

import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import exit_on_config_error, print_json
from phalanx.cli.queue.times import span_seconds
from phalanx.cli.tables import add_row, plain, print_table, table
from phalanx.control.wire.api_types import UsageList, UsageOut

app = typer.Typer()


@app.command()
def usage(
    by: Annotated[
        Literal["team", "user", "project"], typer.Option(help="Group usage by this.")
    ] = "team",
    every: Annotated[
        Literal["day", "week", "month", "all"],
        typer.Option(help="Print a row for each period (UTC)."),
    ] = "all",
    last: Annotated[
        str, typer.Option(metavar="SPAN", help="Only the last 7d, 4w; none: all.")
    ] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print as comma-separated values.")] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show the GPU-hours and dollars that teams, users or projects used, in total or by period."""
    with exit_on_config_error(json):
        since = datetime.now().timestamp() - span_seconds("--last", last) if last else 0.0
    with connected(server, json, state) as client:
        query = {"by": by, "every": every, "from": max(0.0, since)}
        answer = client.get("/v1/usage", UsageList, **query)
    if json:
        print_json(answer)
    elif as_csv:
        _write_csv(answer.usage, by, every)
    elif not answer.usage:
        print("no job has held GPUs" + (f" in the last {last}" if last else ""))
    else:
        made = table(
            *([] if every == "all" else [every.upper()]), by.upper(), "GPU-HOURS", "DOLLARS"
        )
        for row in answer.usage:
            cells = [] if every == "all" else [row.start]
            cells += [row.owner or "-", f"{row.gpu_hours:,.2f}", f"{row.dollars:,.2f}"]
            add_row(made, *cells)
        print_table(made)


def _write_csv(rows: list[UsageOut], by: str, every: str) -> None:
    write = csv.writer(sys.stdout).writerow
    write([every, by, "gpu_hours", "dollars", "gpu_ns"])
    for row in rows:
        # A sheet takes what begins like this for a formula.
        owner = f"'{row.owner}" if row.owner[:1] in tuple("=+-@") else row.owner
        write([row.start, plain(owner), f"{row.gpu_hours:.4f}", f"{row.dollars:.2f}", row.gpu_ns])
