"""``phalanx demo``: text to checkpoint on four CPU ranks, then the same with kills."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

import phalanx
from phalanx.cli.options import Json, Set
from phalanx.cli.output import exit_on_config_error, print_stopped_early
from phalanx.cli.process import collection_paused
from phalanx.config import Job, check, default_world_size, load_job, resolve
from phalanx.train.rank.stop import left_on_signal
from phalanx.train.rank.threads import keep_single_threaded

if TYPE_CHECKING:
    from phalanx.train.report.run_folder import RunFolder

app = typer.Typer()

EXAMPLES = Path(phalanx.__file__).parents[1] / "examples"  # of a clone
JOB = next(
    path
    for path in (EXAMPLES / "demo.toml", Path(__file__).with_name("demo.toml"))
    if path.exists()
)
MORE_STEPS = 40
FEWEST_STEPS = 12  # of a run that is worth disturbing


@app.command()
def demo(
    overrides: Set = None,
    kills: Annotated[
        bool,
        typer.Option(
            "--kills/--no-kills", help="Repeat it on a local cluster, killing a worker and a node."
        ),
    ] = True,
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--no-keep",
            help="Keep the dashboard running afterwards (default: on a terminal).",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train a small model on Python's own sources: two pipeline stages on two replicas each.

    Then the same on four nodes and a spare, of which a worker and a whole node are killed.
    """
    say: Callable[[str], None] = _silent if json else _print
    with exit_on_config_error(json):
        job = load_job(JOB, overrides or [])
        ranks = default_world_size(job, devices=0)
        check(job, ranks)
    job = resolve(job, ranks)
    keep_single_threaded()
    _tokenize(job, say)
    began = time.monotonic()
    say(_what_comes(job, ranks))
    with left_on_signal(partial(print_stopped_early, json)):
        with collection_paused():
            from phalanx.train.rank.launch import launch
            from phalanx.train.report import run_folder

        with exit_on_config_error(json):
            folder = run_folder.create(job)
        code = launch(job, ranks, folder, json=json, waited_seconds=time.monotonic() - began)
    if code == 0:
        say(_what_happened(job, folder, time.monotonic() - began))
        if kills and job.train.steps < FEWEST_STEPS:
            say(f"with fewer than {FEWEST_STEPS} steps nothing is killed")
        elif kills:
            stays = sys.stdout.isatty() if keep is None else keep
            code = _kill_things(job, folder, json, say, stays and not json)
        say(_what_next(job, folder))
    raise typer.Exit(code)


def _kill_things(
    job: Job, folder: RunFolder, json: bool, say: Callable[[str], None], keep: bool
) -> int:
    from phalanx.cli.train.demo_kills import kill_things, table

    outcome = kill_things(job, folder.path, say, keep)
    if json:
        print(msgspec.json.encode(outcome).decode(), flush=True)
    elif not keep:
        say(table(outcome))
    return 0 if outcome.identical and outcome.state == "done" else 1


def _print(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    """With ``--json`` stdout holds the records of the run, one a line, and nothing else."""


def _tokenize(job: Job, say: Callable[[str], None]) -> None:
    from phalanx.data import DataError, read_manifest

    corpus = Path(job.data.path)
    with suppress(DataError):  # none there, or one of an older format
        read_manifest(corpus)
        say(f"== The corpus is there already: {corpus}")
        return
    say("== Tokenising the sources of Python's standard library")
    # In a process of its own: the tokenizer's threads would otherwise be alive when ranks fork.
    command = [sys.executable, "-m", "phalanx", "data", "tokenize", "--stdlib", "--force"]
    command += ["--vocab-size", str(job.model.vocab), "--out", str(corpus)]
    began = time.monotonic()
    output = subprocess.DEVNULL if say is _silent else None
    code = subprocess.run(command, check=False, stdout=output).returncode
    if code:
        raise typer.Exit(code)
    say(f"tokenised in {time.monotonic() - began:.0f} s")


def _what_comes(job: Job, ranks: int) -> str:
    from phalanx.plan.memory.model_counts import parameters

    sizes = {
        name: getattr(job.parallel, name) for name in ("pipeline", "data", "context", "tensor")
    }
    axes = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    size = parameters(job.model).total
    batch = f"{job.train.global_batch} x {job.data.sequence} tokens"
    return f"""
== Training on {ranks} ranks: {axes}
{size / 1e6:.1f} M parameters, {job.train.steps} steps of {batch}; Ctrl-C stops and saves"""


def _what_happened(job: Job, folder: RunFolder, seconds: float) -> str:
    from phalanx.train.report.records import ValidationRecord, read_records

    text = f"trained in {seconds:.0f} s, the start of the ranks included"
    with suppress(FileNotFoundError):  # a run of a few steps validates nothing
        *_, last = read_records(folder.validation, ValidationRecord)
        text += f"\nloss on text it has not seen: {last.loss:.2f}"
        text += f" (blind guessing: {math.log(job.model.vocab):.2f})"
    return text


def _what_next(job: Job, folder: RunFolder) -> str:
    from phalanx.train.report.progress import from_here

    program = "phalanx" if shutil.which("phalanx") else str(from_here(Path(sys.argv[0])))
    again = f"{program} train {from_here(JOB)}"
    large = EXAMPLES / "llama3-405b.toml"
    much = (
        f"""
  # bytes per rank of a 405B model on 16,384 GPUs, without a GPU
  {program} train {from_here(large)} --dry-run"""
        if large.exists()
        else ""
    )
    return f"""
== Where everything is
  corpus        {job.data.path}
  checkpoints   {from_here(folder.checkpoints)}
  metrics       {from_here(folder.steps)}
  settings      {from_here(folder.config)}
  logs          {from_here(folder.logs)}

== What to try next
  # from the last checkpoint, {MORE_STEPS} steps further
  {again} \\
    --set checkpoint.resume=auto --set train.steps={job.train.steps + MORE_STEPS}
  # the same model as four data replicas
  {again} \\
    --set parallel.pipeline=1 --set parallel.data=4{much}
  # what the corpus holds
  {program} data inspect {job.data.path}
  # what each setting means
  {program} config explain parallel"""
