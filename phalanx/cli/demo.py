"""``phalanx demo``: text to checkpoint in about a minute, on four CPU ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import phalanx
from phalanx.cli.options import Set, keep_single_threaded, refused_in_words
from phalanx.config import Job, check, default_world_size, load_job, resolve

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
    _tokenize(job)
    print(f"\n== Training on {ranks} ranks: {_axes(job)}", flush=True)
    keep_single_threaded()
    from phalanx.train import run_folder
    from phalanx.train.launch import launch

    folder = run_folder.create(job)
    code = launch(job, ranks, folder)
    if code == 0:
        print(_what_next(job, folder))
    raise typer.Exit(code)


def _tokenize(job: Job) -> None:
    corpus = Path(job.data.path)
    if corpus.exists():
        print(f"== The corpus is there already: {corpus}", flush=True)
        return
    print("== Tokenising the sources of Python's standard library", flush=True)
    # In a process of its own: the tokenizer's threads would otherwise be alive when ranks fork.
    command = [sys.executable, "-m", "phalanx", "data", "tokenize", "--stdlib"]
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
    example = JOB.relative_to(Path.cwd()) if JOB.is_relative_to(Path.cwd()) else JOB
    more = job.train.steps + 40
    return f"""
== Where everything is
  corpus        {job.data.path}
  checkpoints   {folder.checkpoints}
  metrics       {folder.steps}
  settings      {folder.config}
  logs          {folder.logs}

== What to try next
  phalanx train {example} --set checkpoint.resume=auto --set train.steps={more}
  phalanx train {example} --set parallel.pipeline=1 --set parallel.tensor=2
  phalanx data inspect {job.data.path}
  tensorboard --logdir {folder.metrics}
  phalanx train examples/llama3-405b.toml --dry-run
  phalanx config explain parallel"""
