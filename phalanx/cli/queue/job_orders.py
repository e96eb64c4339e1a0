"""What commands share that give the same order about several jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.connection import REFUSED, connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import plain
from phalanx.control.client.client import ClientError
from phalanx.control.wire.api_types import Done

Numbers = Annotated[list[int], typer.Argument(metavar="JOB…", min=1, help="Numbers.")]
WholeArray = Annotated[bool, typer.Option("--array", help="All jobs of the array of each.")]


def order_command(order: str, summary: str) -> typer.Typer:
    """A command that gives an order about jobs, or about the whole arrays of them."""
    app = typer.Typer()

    @app.command(order, help=summary)
    def give_order(
        jobs: Numbers,
        array: WholeArray = False,
        server: ServerUrl = "",
        state: State = None,
        json: Json = False,
    ) -> None:
        order_jobs(order, jobs, array=array, server=server, state=state, json=json)

    return app


def order_jobs(
    order: str,
    jobs: Sequence[int],
    *,
    array: bool,
    server: str,
    state: Path | None,
    json: bool,
    listed_as: str = "done",
) -> None:
    """Have a server do the same about several jobs; one that is refused keeps no other from it."""
    done, refused = [], []
    resource = "arrays" if array else "jobs"
    with connected(server, json, state) as client:
        for job in jobs:
            try:
                answer = client.post(f"/v1/{resource}/{job}/{order}", None, Done)
            except ClientError as error:
                if not error.status or len(jobs) == 1:
                    raise
                refused.append(str(error))
                if not json:
                    print(f"error: {plain(error)}", file=sys.stderr)
            else:
                done.append(answer)
                if not json:
                    print(plain(f"job {job}: {answer.message}"))
    if json:
        print_json({listed_as: done, "refused": refused})
    if refused:
        raise typer.Exit(REFUSED)
