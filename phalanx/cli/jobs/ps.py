"""``phalanx ps``: jobs in a table."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import add_row, print_table, span, table
from phalanx.control.wire.api_types import JobList, JobOut

app = typer.Typer()


@app.command()
def ps(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that ended.")] = False,
    members: Annotated[
        bool, typer.Option("--members", help="A line for each of an array.")
    ] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """List jobs: those that wait or run, or all; an array is one line."""
    jobs: list[JobOut] = []
    with connected(server, json, state) as client:
        after = -1
        while after:
            wanted = "all" if everything else "live"
            page = client.get(
                "/v1/jobs",
                JobList,
                state=wanted,
                after=max(after, 0),
                limit=1000,
                fold=not (members or json),
            )
            jobs += page.jobs
            after = page.next_after
    if json:
        print_json({"jobs": jobs})
        return
    if not jobs:
        print("no jobs" if everything else "no jobs wait or run (--all: also those that ended)")
        return
    made = table("JOB", "NAME", "TEAM", "STATE", "GPUS", "STEP", "RAN", "WHY")
    for job in jobs:
        ran = span(job.ran_seconds)
        number, name, states = _identity(job)
        add_row(made, number, name, job.team, states, job.gpus, steps_of(job), ran, job.why.text)
    print_table(made)


def steps_of(job: JobOut) -> str:
    """How far a job is; "-" of one that has told of no step, as a program may never do."""
    if job.steps:
        return f"{job.step}/{job.steps}"
    return str(job.step) if job.step else "-"


def _identity(job: JobOut) -> tuple[str, str, str]:
    """Numbers, name and state of a job, or of an array."""
    array = job.array
    if array is None:
        return str(job.id), job.name, str(job.state)
    if not array.states:
        return str(job.id), f"{job.name}[{array.index}]", str(job.state)
    last, indices = array.job + array.count - 1, f"{array.first_index}-{array.last_index}"
    states = ", ".join(f"{count} {state}" for state, count in array.states.items())
    return f"{array.job}-{last}", f"{job.name}[{indices}]", states
