"""Options and endings that several commands share."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from phalanx.config import ConfigError, Job, check, default_world_size, load_job, resolve
from phalanx.config.rules.text import name_problems
from phalanx.hardware import count_cuda

JobFile = Annotated[Path, typer.Argument(metavar="JOB.toml", help="File that describes the job.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting (repeatable)."),
]
WorldSize = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of ranks (default: the product of the axes, or one a device)."
    ),
]
MOST_MINUTES = 5_000_000  # some ten years
FirstStepMinutes = Annotated[
    float,
    typer.Option(
        min=0, max=MOST_MINUTES, help="Allowance for the first step; 0: as the policy says."
    ),
]
HangMinutes = Annotated[
    float,
    typer.Option(
        min=0, max=MOST_MINUTES, help="A missing step is a hang after so long; 0: derived."
    ),
]
IdleMinutes = Annotated[
    float,
    typer.Option(
        min=0,
        max=MOST_MINUTES,
        help="Restart a program without steps, CPU, GPU and output activity for so long; "
        "0: as the policy says.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@contextmanager
def refused_in_words(json: bool = False) -> Iterator[None]:
    """Print what is wrong with a configuration and end with exit code 2."""
    try:
        yield
    except ConfigError as error:
        if json:
            print_json({"problems": error.problems})
        else:
            for found in error.problems:
                print(f"error: {found}", file=sys.stderr)
        raise typer.Exit(2) from None


def load(path: Path, overrides: list[str] | None, world_size: int | None) -> tuple[Job, int]:
    """The job in a file and the number of ranks to start."""
    job = load_job(path, overrides or [])
    return job, world_size or default_world_size(job, count_cuda())


def refuse_name(name: str) -> None:
    """A name given in place of the job's obeys the same rules."""
    if name and (wrong := list(name_problems("--name", name))):
        raise ConfigError.of(wrong)


def load_named(
    path: Path, overrides: list[str] | None, world_size: int | None, name: str
) -> tuple[Job, int]:
    """The same, checked and resolved, and called ``name`` where one is given."""
    refuse_name(name)
    job, ranks = load(path, overrides, world_size)
    job = msgspec.structs.replace(job, name=name or job.name)
    check(job, ranks)
    return resolve(job, ranks), ranks


@contextmanager
def collection_paused() -> Iterator[None]:
    """Import torch inside: what an import makes stays, so garbage is sought in vain.

    The search would be a sixth of the import, which is what one waits for longest.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def say_left(json: bool, reason: str) -> None:
    """The last word of a command that was asked to stop before any rank ran."""
    message = "stopped on request before the run began"
    if json:
        last = {"kind": "exit", "code": 0, "reason": reason, "message": message}
        print(msgspec.json.encode(last).decode(), flush=True)
    else:
        print(f"{message} ({reason})", flush=True)


def print_json(value: object) -> None:
    """One JSON document, indented."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
