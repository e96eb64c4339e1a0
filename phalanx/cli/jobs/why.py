"""``phalanx why``: why a job is where it is, and what it waits for."""

from __future__ import annotations

from typing import Annotated

import typer

from phalanx.cli.completion import job_numbers
from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import plain
from phalanx.control.wire.api_types import Waits

app = typer.Typer()


@app.command()
def why(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB", help="Its number, or slurm:NUMBER.", autocompletion=job_numbers
        ),
    ],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Explain a job's state: why it was placed where it is or, while queued, what it waits for."""
    if ":" in job:
        from phalanx.cli.jobs.engines import why_elsewhere

        why_elsewhere(job, json)
        return
    if not job.isdigit():
        raise typer.BadParameter(f"{job!r} is no number of a job: `phalanx ps --all` lists them")
    with connected(server, json, state) as client:
        waits = client.get(f"/v1/jobs/{job}/why", Waits)
    if json:
        print_json(waits)
        return
    print(plain(f"job {job} is {waits.state}: {waits.why.text}"))
    if waits.waits_for is not None:
        told = waits.waits_for.text
        verb = "it" if told.startswith(("waits ", "can never ")) else "it waits:"
        print(plain(f"{verb} {told}"))
        print(plain(f"estimated start: {waits.start}"))
        parts = ", ".join(f"{name} {value}" for name, value in waits.priority.items())
        print(f"priority {sum(waits.priority.values())}: {parts}")
    for each in waits.history:
        print(plain(f"  {each.text}"))
