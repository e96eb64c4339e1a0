"""``phalanx data prepare`` and what belongs to it: the rules that it knows, the way back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.data.corpus_tables import bars
from phalanx.cli.data.maintain import cores, in_words
from phalanx.cli.options import Json, Set
from phalanx.cli.output import exit_on, print_json
from phalanx.data.errors import DataError

if TYPE_CHECKING:
    from rich.progress import TaskID

    from phalanx.data.prepare.engine import UnitEngine
    from phalanx.data.prepare.output.summary import PrepareReport
    from phalanx.data.prepare.output.trace import TracedDocument
    from phalanx.data.prepare.recipe import PrepareRecipe


class PrepareEngine(StrEnum):
    """Who does the units of a recipe."""

    LOCAL = "local"
    RAY = "ray"
    SLURM = "slurm"


def prepare(
    recipe: Annotated[
        Path | None,
        typer.Argument(metavar="RECIPE.toml", help="File that describes the corpus."),
    ] = None,
    engine: Annotated[
        PrepareEngine,
        typer.Option(
            help="Where to run: local processes, tasks of a Ray cluster, or a Slurm array."
        ),
    ] = PrepareEngine.LOCAL,
    workers: Annotated[
        int,
        typer.Option(min=0, help="Processes, Ray tasks or array tasks at once; 0: one a core."),
    ] = 0,
    unit: Annotated[
        str,
        typer.Option(
            metavar="PHASE.json:TASK/TASKS",
            help="Run only one task of a phase; engines start this on other machines.",
        ),
    ] = "",
    force: Annotated[bool, typer.Option(help="Replace another corpus in the folder.")] = False,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Make a corpus of raw files: filter, deduplicate, decontaminate, mask, tokenise."""
    with in_words(json), _engine_errors():
        if unit:
            _run_share(unit)
            return
        from phalanx.data.prepare.recipe import load_recipe
        from phalanx.data.prepare.run import prepare as make  # the tokenizers library loads here

        if recipe is None:
            raise DataError("recipe", "", "is missing", "phalanx data prepare RECIPE.toml")
        wanted = load_recipe(recipe, overrides or [])
        chosen = _engine(engine, workers, wanted)
        with _shown(quiet=json) as progress:
            done = make(wanted, recipe.parent, chosen, progress, force)
    if json:
        print_json(done)
    else:
        _print_report(done.report, done.unchanged)


def rules(json: Json = False) -> None:
    """List the filter rules that recipes may name, with their thresholds and sources."""
    from phalanx.data.prepare.rules import RULES

    if json:
        listed = [
            {"name": rule.name, "thresholds": rule.thresholds, "source": rule.source}
            | {"says": rule.says}
            for rule in RULES.values()
        ]
        print_json(listed)
        return
    for rule in RULES.values():
        shown = ", ".join(f"{name} = {value}" for name, value in rule.thresholds.items())
        print(f"{rule.name}" + (f" ({shown})" if shown else ""))
        print(f"  {rule.says}\n  {rule.source}")


def trace(
    path: Annotated[
        str,
        typer.Argument(metavar="CORPUS|JOB.toml", help="Prepared corpus, or a job that reads one."),
    ],
    token: Annotated[
        int | None, typer.Option(min=0, help="Token of the corpus, or of the shard.")
    ] = None,
    shard: Annotated[str, typer.Option(help="Shard in which the token is counted.")] = "",
    document: Annotated[int | None, typer.Option(min=0, help="Document of the corpus.")] = None,
    sample: Annotated[
        int | None, typer.Option(min=0, help="Sample of the job's run, as `order` shows it.")
    ] = None,
    overrides: Set = None,
    json: Json = False,
) -> None:
    """Trace a token, document or sample to its source: file, record, byte offset, id."""
    from phalanx.data.prepare.output.trace import CorpusTrace

    with in_words(json):
        if path.endswith(".toml"):
            documents = _of_sample(Path(path), sample, overrides or [])
        elif sample is not None or (token is None) == (document is None):
            rule = "a corpus is asked for --token or for --document"
            raise DataError("path", path, rule, "give a JOB.toml for --sample")
        elif document is not None:
            documents = [CorpusTrace(Path(path)).document(document)]
        elif shard:
            documents = [CorpusTrace(Path(path)).of_shard(shard, token or 0)]
        else:
            documents = CorpusTrace(Path(path)).of_tokens(token or 0)
    if json:
        print_json(documents)
        return
    for each in documents:
        name = f", id {each.id}" if each.id else ""
        print(
            f"document {each.document} (from token {each.token}): {each.file}, record"
            f" {each.record}, offset {each.offset}{name}"
        )


def _of_sample(job_file: Path, sample: int | None, overrides: list[str]) -> list[TracedDocument]:
    from phalanx.config import load_job, resolve
    from phalanx.data.prepare.output.trace import trace_sample

    if sample is None:
        raise DataError("sample", "", "is missing", "say which with --sample")
    job = resolve(load_job(job_file, overrides), 1)
    return trace_sample(job.data, job.model.vocab, sample)


def _run_share(unit: str) -> None:
    from phalanx.data.prepare.units import run_task

    phase, _, share = unit.rpartition(":")
    task, _, tasks = share.partition("/")
    if not phase or not task.isdigit() or not tasks.isdigit() or int(task) >= int(tasks):
        rule = "must be PHASE.json:TASK/TASKS with TASK below TASKS"
        raise DataError("unit", unit, rule, "e.g. work/phases/filter.json:0/16")
    run_task(Path(phase), int(task), int(tasks))


def _engine(engine: PrepareEngine, workers: int, recipe: PrepareRecipe) -> UnitEngine:
    if engine is PrepareEngine.RAY:
        from phalanx.control.backends.ray.tasks import RayTasks

        return RayTasks(recipe.ray_address, workers)
    if engine is PrepareEngine.SLURM:
        from phalanx.control.backends.slurm.array import SlurmArray

        return SlurmArray(recipe.slurm, workers)
    from phalanx.data.prepare.engine import LocalEngine

    return LocalEngine(workers or cores())


@contextmanager
def _engine_errors() -> Iterator[None]:
    """What Ray, Slurm or the file system refuse is no mistake of the recipe: exit code 1."""
    from phalanx.control.backends.ray.submit import RayError
    from phalanx.control.backends.slurm.programs import SlurmError

    with exit_on(RayError, SlurmError, OSError):
        yield


@contextmanager
def _shown(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar a phase on a terminal, elsewhere a line when it is over."""
    tasks: dict[str, TaskID] = {}
    with bars(quiet) as view:

        def report(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = view.add_task(phase)
            view.update(tasks[phase], completed=done, total=total)
            if view.disable and not quiet and done == total:
                print(f"{phase}: {done:,} of {total:,} units", file=sys.stderr, flush=True)

        yield report


def _print_report(report: PrepareReport, unchanged: bool) -> None:
    for step in report.steps:
        if step.dropped or step.edited:
            edited = f", {step.edited:,} shortened" if step.edited else ""
            print(f"{step.name}: {step.dropped:,} dropped, {step.left:,} left{edited}")
    if report.masked:
        print("masked: " + ", ".join(f"{n:,} {name}" for name, n in sorted(report.masked.items())))
    print(
        f"{report.out}: {report.tokens:,} tokens, {report.documents:,} documents of"
        f" {report.records:,} records, vocabulary {report.vocab:,}"
        + ("; nothing had changed" if unchanged else "")
    )
    print(f"report: {Path(report.out) / 'report.html'}")
