"""``phalanx train``: check a job, then start its ranks, or say what they would need."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from phalanx.cli.job_file import load
from phalanx.cli.options import JobFile, Json, Set, WorldSize
from phalanx.cli.output import exit_on_config_error, print_json, print_stopped_early
from phalanx.cli.process import collection_paused
from phalanx.config import check, resolve
from phalanx.train.rank.stop import left_on_signal
from phalanx.train.rank.threads import keep_single_threaded

app = typer.Typer()


@app.command()
def train(
    path: JobFile,
    overrides: Set = None,
    world_size: WorldSize = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report bytes per rank; start nothing.")
    ] = False,
    json: Json = False,
) -> None:
    """Run a training job, or show what it would need."""
    with exit_on_config_error(json):
        job, ranks = load(path, overrides, world_size)
        check(job, ranks)
    job = resolve(job, ranks)
    keep_single_threaded()
    # Only now torch: a wrong configuration is refused without waiting for its import.
    if dry_run:
        from phalanx.cli.train.dry_run_table import print_report
        from phalanx.parallel.dryrun import dry_run as measure

        report = measure(job, ranks)
        if json:
            print_json(report)
        else:
            print_report(report)
        return
    with left_on_signal(partial(print_stopped_early, json)):
        with collection_paused():
            from phalanx.train.rank.launch import launch
            from phalanx.train.report.progress import process_age_seconds

        code = launch(job, ranks, json=json, waited_seconds=process_age_seconds())
    raise typer.Exit(code)
