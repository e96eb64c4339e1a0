"""Where runs are looked up, and what is written of them: shared by ``runs`` and ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.completion import job_numbers
from phalanx.cli.connection import connected
from phalanx.observe.tracker.runs import Run, load_folder

Which = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Number of a job, or folder of `phalanx train`.",
        autocompletion=job_numbers,
    ),
]
RUNS = Path("runs")  # where `phalanx train` puts them


class RunSource:
    """Where a run is looked up: a number is a server's, anything else a folder."""

    def __init__(self, server: str, state: Path | None, json: bool) -> None:
        self.server, self.state, self.json = server, state, json

    def get(self, which: str) -> Run:
        """One run."""
        if which.isdigit():
            with connected(self.server, self.json, self.state) as client:
                return client.get(f"/v1/runs/{which}", Run)
        try:
            return _of_folder(which)
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error), param_hint="RUN") from None


def _of_folder(which: str) -> Run:
    """A run by its folder; how an engine's job ended is known to the log of its controller."""
    from phalanx.control.backends.stored_run import find_run, read_run
    from phalanx.control.server.store.interface import StoreError

    led = find_run(which, RUNS)
    if led is None:
        return load_folder(find_run_folder(which))
    try:
        stored = read_run(led)
    except StoreError as error:
        raise ValueError(str(error)) from None
    job = stored.detail.job
    program = Run(
        id=f"{led.absolute().parent.name}/{led.name}", name=job.name, folder=str(led.absolute())
    )
    run = load_folder(led) if (led / "config" / "job.json").exists() else program
    run.user, run.team, run.state = job.user, job.team, job.state
    run.created, run.ended = job.submitted_ns / 1e9, job.ended_ns / 1e9
    run.exit = {"reason": job.why.code, "message": job.why.text}
    if stored.nodes:
        placed = {"time": job.started_ns / 1e9, "generation": job.generation}
        run.placements = [{**placed, "nodes": list(stored.nodes), "replicas": job.replicas}]
    return run


def find_run_folder(which: str) -> Path:
    """The folder of a run by its path, or by its name and id below ``runs/``."""
    for path in (Path(which), RUNS / which):
        if path.is_dir():
            return path
    raise ValueError(
        f"{which}: no such folder, and no number of a job: `phalanx runs ls` lists runs"
    )
