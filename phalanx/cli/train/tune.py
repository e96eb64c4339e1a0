"""``phalanx tune``: find a job's fastest settings on this machine by measured steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.job_file import load
from phalanx.cli.options import JobFile, Json, Set, WorldSize
from phalanx.cli.output import (
    exit_on_config_error,
    fail,
    print_json,
    print_stopped_early,
    refuse_unwritable,
)
from phalanx.cli.process import collection_paused
from phalanx.train.rank.stop import left_on_signal
from phalanx.train.rank.threads import keep_single_threaded

app = typer.Typer()

LEAST_TRIALS = 8  # the first, one other, and three pairs of both


@app.command()
def tune(
    path: JobFile,
    overrides: Set = None,
    world_size: WorldSize = None,
    minutes: Annotated[
        float, typer.Option("--minutes", min=0.1, help="Total time for all trials.")
    ] = 10.0,
    trials: Annotated[
        int,
        typer.Option(
            "--trials", min=LEAST_TRIALS, help="Maximum number of trials, repeats included."
        ),
    ] = 40,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Folder for the search's journal (default: RUNS/tune-NAME)."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Discard the trials already in the folder.")
    ] = False,
    write: Annotated[
        Path | None, typer.Option("--write", help="Write the job file with the new settings.")
    ] = None,
    json: Json = False,
) -> None:
    """Search for a job's fastest settings on this machine by measuring real steps."""
    with exit_on_config_error(json):
        job, ranks = load(path, overrides, world_size)
    refuse_unwritable(write, "--write")
    search_folder = folder or Path(job.runs) / f"tune-{job.name}"
    keep_single_threaded()
    # Only now numpy and torch: ranks are forked from a process that has one thread.
    with left_on_signal(partial(print_stopped_early, json)), collection_paused():
        from phalanx.plan.tune.trials import TuningBudget
        from phalanx.train.tune.session import TuneRequest
        from phalanx.train.tune.session import tune as search
        from phalanx.train.tune.trial import Interrupted

    from phalanx.cli.train.tune_tables import print_report, print_trial, write_job

    budget = TuningBudget(trials=trials, seconds=60 * minutes)
    request = TuneRequest(job=job, ranks=ranks, folder=search_folder, budget=budget, fresh=fresh)
    try:
        with exit_on_config_error(json):
            report = search(request, (lambda trial: None) if json else print_trial)
            if write is not None:
                write_job(path, write, job, report)
    except (Interrupted, KeyboardInterrupt):
        fail(f"stopped; the same command goes on with the trials in {search_folder}", 130)
    if json:
        print_json(report)
        return
    print_report(report)
    if write is not None:
        print(f"wrote {write}")
