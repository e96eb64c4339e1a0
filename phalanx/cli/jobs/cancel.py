"""``phalanx cancel``: end jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.completion import job_numbers
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.queue.job_orders import WholeArray, Why, order_jobs

app = typer.Typer()


def _own_number(text: str) -> int:
    """The number of a job of ours; what ends a job of Slurm is Slurm's."""
    engine, found, number = text.partition(":")
    if found and engine == "slurm" and number.isdecimal():
        raise typer.BadParameter(f"{text} is a job of Slurm: `scancel {number}` ends it")
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is no number of a job: `phalanx ps --all` lists them")
    return int(text)


@app.command()
def cancel(
    jobs: Annotated[
        list[int],
        typer.Argument(
            metavar="JOB…", parser=_own_number, help="Numbers.", autocompletion=job_numbers
        ),
    ],
    array: WholeArray = False,
    why: Why = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Cancel jobs: a program gets SIGTERM and a grace period; a second cancel kills it at once."""
    order_jobs(
        "cancel",
        jobs,
        array=array,
        why=why,
        server=server,
        state=state,
        json=json,
        listed_as="cancelled",
    )
