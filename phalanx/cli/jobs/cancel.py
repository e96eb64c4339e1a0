"""``phalanx cancel``: end jobs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from phalanx.cli.connection import REFUSED, connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import plain
from phalanx.control.client.client import ClientError
from phalanx.control.wire.api_types import Done

app = typer.Typer()


def _own_number(text: str) -> int:
    """The number of a job of ours; what ends a job of Slurm is Slurm's."""
    engine, found, number = text.partition(":")
    if found and engine == "slurm" and number.isdecimal():
        raise typer.BadParameter(f"{text} is a job of Slurm: `scancel {number}` ends it")
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is no number of a job")
    return int(text)


@app.command()
def cancel(
    jobs: Annotated[list[int], typer.Argument(metavar="JOB…", parser=_own_number, help="Numbers.")],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """End jobs: a program gets SIGTERM and a grace, or ends at once when cancelled again."""
    done, refused = [], []
    with connected(server, json, state) as client:
        for job in jobs:
            try:
                done.append(client.post(f"/v1/jobs/{job}/cancel", None, Done))
            except ClientError as error:
                if not error.status or len(jobs) == 1:
                    raise
                refused.append(str(error))  # the others are ended all the same
                if not json:
                    print(f"error: {plain(error)}", file=sys.stderr)
            else:
                if not json:
                    print(plain(f"job {job}: {done[-1].message}"))
    if json:
        print_json({"cancelled": done, "refused": refused})
    if refused:
        raise typer.Exit(REFUSED)
