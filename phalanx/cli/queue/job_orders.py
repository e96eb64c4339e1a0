"""What commands share that give the same order about several jobs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.completion import job_numbers
from phalanx.cli.connection import REFUSED, connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import exit_on, print_json
from phalanx.cli.tables import plain
from phalanx.control.client.client import ClientError
from phalanx.control.wire.api_types import Done, OrderWhy

Numbers = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB…", help="Numbers, or slurm:NUMBER of Slurm's.", autocompletion=job_numbers
    ),
]
SUSPEND = {"hold": "true", "release": "false"}  # what Kubernetes calls it
Why = Annotated[str, typer.Option(help="Reason shown to others, as a note of the run.")]
WholeArray = Annotated[bool, typer.Option("--array", help="All jobs of the array of each.")]


def order_command(order: str, summary: str) -> typer.Typer:
    """A command that gives an order about jobs, or about the whole arrays of them."""
    app = typer.Typer()

    @app.command(order, help=summary)
    def give_order(
        jobs: Numbers,
        array: WholeArray = False,
        why: Why = "",
        server: ServerUrl = "",
        state: State = None,
        json: Json = False,
    ) -> None:
        give(order, jobs, array=array, why=why, server=server, state=state, json=json)

    return app


def give(
    order: str,
    jobs: Sequence[str],
    *,
    array: bool,
    why: str,
    server: str,
    state: Path | None,
    json: bool,
) -> None:
    """Give an order about jobs of a server, or of Slurm."""
    numbers = [_number(order, text) for text in jobs]
    if not any(text.startswith("slurm:") for text in jobs):
        order_jobs(order, numbers, array=array, why=why, server=server, state=state, json=json)
    elif all(text.startswith("slurm:") for text in jobs):
        _order_in_slurm(order, numbers, json)
    else:
        raise typer.BadParameter("give jobs of a server and those of Slurm apart")


def _number(order: str, text: str) -> int:
    """The number of a job; what has none is refused with what does it there."""
    engine, found, number = text.rpartition(":")
    if found and engine == "kubernetes":
        patch = f'{{"spec":{{"suspend":{SUSPEND.get(order)}}}}}'
        helps = (
            f"`kubectl patch jobset {number} --type merge -p '{patch}'` does it"
            if order in SUSPEND
            else "Kubernetes takes no job back into a queue"
        )
        raise typer.BadParameter(f"{text} is a job of Kubernetes: {helps}")
    if engine not in ("", "slurm") or not number.isdecimal() or int(number) < 1:
        raise typer.BadParameter(f"{text!r} is no number of a job: `phalanx ps --all` lists them")
    return int(number)


def _order_in_slurm(order: str, numbers: Sequence[int], json: bool) -> None:
    from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError

    with exit_on(SlurmError):
        for number in numbers:
            SlurmCommands().run("scontrol", order, str(number))
            if not json:
                print(f"slurm:{number}: scontrol {order} is done")
    if json:
        print_json({"done": [f"slurm:{number}" for number in numbers], "refused": []})


def order_jobs(
    order: str,
    jobs: Sequence[int],
    *,
    array: bool,
    why: str,
    server: str,
    state: Path | None,
    json: bool,
    listed_as: str = "done",
) -> None:
    """Have a server do the same about several jobs; one that is refused keeps no other from it."""
    done, refused = [], []
    resource = "arrays" if array else "jobs"
    body = OrderWhy(why=why) if why else None
    with connected(server, json, state) as client:
        for job in jobs:
            try:
                answer = client.post(f"/v1/{resource}/{job}/{order}", body, Done)
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
