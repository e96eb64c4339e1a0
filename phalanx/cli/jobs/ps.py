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
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """List jobs: those that wait or run, or all."""
    jobs: list[JobOut] = []
    with connected(server, json, state) as client:
        after = -1
        while after:
            wanted = "all" if everything else "live"
            page = client.get("/v1/jobs", JobList, state=wanted, after=max(after, 0), limit=1000)
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
        steps = f"{job.step}/{job.steps}" if job.steps else job.step
        ran = span(job.ran_seconds)
        add_row(made, job.id, job.name, job.team, job.state, job.gpus, steps, ran, job.why.text)
    print_table(made)
