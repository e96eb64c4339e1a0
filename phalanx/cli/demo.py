"""``phalanx demo``: text to checkpoint in about a minute, on four CPU ranks."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import phalanx
from phalanx.cli.options import Set, collection_paused, refused_in_words
from phalanx.config import Job, check, default_world_size, load_job, resolve
from phalanx.train.threads import keep_single_threaded

if TYPE_CHECKING:
    from phalanx.train.run_folder import RunFolder

app = typer.Typer()

JOB = Path(phalanx.__file__).parents[1] / "examples" / "demo.toml"


@app.command()
def demo(overrides: Set = None) -> None:
    """Train a small model on Python's own sources: two pipeline stages on two replicas each."""
    with refused_in_words():
        job = load_job(JOB, overrides or [])
        ranks = default_world_size(job, devices=0)
        check(job, ranks)
    job = resolve(job, ranks)
    keep_single_threaded()
    _tokenize(job)
    print(f"\n== Training on {ranks} ranks: {_axes(job)}", flush=True)
    with collection_paused():
        from phalanx.train import run_folder
        from phalanx.train.launch import launch

    folder = run_folder.create(job)
    code = launch(job, ranks, folder)
    if code == 0:
        print(_what_next(job, folder))
    raise typer.Exit(code)


def _tokenize(job: Job) -> None:
    from phalanx.data import DataError, read_manifest

    corpus = Path(job.data.path)
    with suppress(DataError):  # none there, or one of an older format
        read_manifest(corpus)
        print(f"== The corpus is there already: {corpus}", flush=True)
        return
    print("== Tokenising the sources of Python's standard library", flush=True)
    # In a process of its own: the tokenizer's threads would otherwise be alive when ranks fork.
    command = [sys.executable, "-m", "phalanx", "data", "tokenize", "--stdlib", "--force"]
    command += ["--vocab-size", str(job.model.vocab), "--out", str(corpus)]
    code = subprocess.run(command, check=False).returncode
    if code:
        raise typer.Exit(code)


def _axes(job: Job) -> str:
    sizes = {
        name: getattr(job.parallel, name) for name in ("pipeline", "data", "context", "tensor")
    }
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _what_next(job: Job, folder: RunFolder) -> str:
    program = "phalanx" if shutil.which("phalanx") else _from_here(Path(sys.argv[0]))
    train = f"{program} train {_from_here(JOB)}"
    return f"""
== Where everything is
  corpus        {job.data.path}
  checkpoints   {_from_here(folder.checkpoints)}
  metrics       {_from_here(folder.steps)}
  settings      {_from_here(folder.config)}
  logs          {_from_here(folder.logs)}

== What to try next
  {train} --set checkpoint.resume=auto --set train.steps={job.train.steps + 40}
  {train} --set parallel.pipeline=1 --set parallel.data=4
  {program} train {_from_here(JOB.with_name("llama3-405b.toml"))} --dry-run
  {program} data inspect {job.data.path}
  {program} config explain parallel"""


def _from_here(path: Path) -> str:
    """A path as one would type it in the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
