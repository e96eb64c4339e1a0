"""How ``phalanx ckpt`` speaks: tables, bars, and what went wrong, in words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from phalanx.cli.output import fail, file_problem
from phalanx.cli.tables import span

if TYPE_CHECKING:
    from phalanx.checkpoint.tools.inspect import ListedCheckpoint

COLUMNS = ("step", "tokens", "size", "ranks", "shards", "mesh", "age", "state", "path")
NUMBERS = 5  # of the columns


def print_list(listed: list[ListedCheckpoint]) -> None:
    """Columns for people; paths stay whole, so that they can be copied."""
    rows = [COLUMNS]
    for one in listed:
        counts: tuple[int | None, ...] = one.step, one.tokens, one.ranks, one.shards
        if not one.created:  # what describes it cannot be read
            counts = (one.step if one.step >= 0 else None, None, None, None)
        step, tokens, ranks, shards = ("-" if each is None else f"{each:,}" for each in counts)
        numbers = (step, tokens, size_text(one.bytes), ranks, shards)
        rows.append((*numbers, mesh_text(one), age_text(one), state_text(one), one.path))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = tuple(
            cell.rjust(width) if number < NUMBERS else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        print("  ".join(cells).rstrip())
    for one in listed:
        for problem in one.problems + one.notes:
            print(f"{one.path}: {problem}")


def state_text(one: ListedCheckpoint) -> str:
    """Whether a checkpoint may be trusted, as far as anybody looked."""
    if one.bad:
        state = "BAD"
    elif one.problems:
        state = "NOT GOOD"
    elif one.parts:
        state = f"{one.parts} of {one.ranks} ranks"
    else:
        state = "verified" if one.verified else "not verified"
    return state + ", pinned" * one.pinned


def mesh_text(one: ListedCheckpoint) -> str:
    return " ".join(f"{axis}{size}" for axis, size in one.mesh.items() if size > 1) or "-"


def size_text(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def age_text(one: ListedCheckpoint) -> str:
    return span(max(0.0, one.age_seconds)) if one.created else "-"


@contextmanager
def bar(name: str, total: int | None, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on standard error, where somebody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    hidden = quiet or not sys.stderr.isatty()
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=hidden) as progress:
        task = progress.add_task(name, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def reported(json: bool, out: Path | None = None) -> Iterator[None]:
    """Print what is wrong in words and end with the exit code of checkpoints.

    ``out`` is the folder that the command writes.
    """
    from phalanx.checkpoint import CheckpointError

    try:
        yield
    except Exception as error:
        foreign = sys.modules.get("phalanx.model.hf.config")
        known = (CheckpointError, OSError) + ((foreign.HfError,) if foreign else ())
        if not isinstance(error, known):
            raise
        text = file_problem(error, out) if isinstance(error, OSError) else str(error)
        fail(text, 15, {"error": text} if json else None)
