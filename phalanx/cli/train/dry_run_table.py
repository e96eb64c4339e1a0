"""The table that ``phalanx train --dry-run`` prints."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from phalanx.parallel.dryrun import DryRunReport


# Short enough for a terminal of 80 columns.
HEADINGS = ("rank", "layers", "params", "weights", "grads", "optimizer", "activ.", "total")


def print_report(report: DryRunReport, console: Console | None = None) -> None:
    """Bytes of one rank at each pipeline position, and what holds for the whole job."""
    console = console or Console(highlight=False, soft_wrap=True)
    largest = max(report.rows, key=lambda row: row.total_bytes)
    name, unit = ("GiB", 2**30) if largest.total_bytes >= 2**30 else ("MiB", 2**20)
    table = Table(title=f"{report.name}: one rank of each pipeline position, in {name}", box=SIMPLE)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.rows:
        sizes = (row.weight_bytes, row.gradient_bytes, row.optimizer_bytes, row.activation_bytes)
        table.add_row(
            str(row.pipeline_rank),
            spans(row.layers),
            short(row.parameters),
            *(f"{size / unit:.2f}" for size in (*sizes, row.total_bytes)),
        )
    console.print(table)
    axes = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items() if size > 1)
    console.print(f"{report.world_size:,} ranks: {axes or 'no axis'}")
    console.print(
        f"{report.parameters:,} parameters, {report.micro_batches} micro-batches a replica; "
        f"position {largest.pipeline_rank} holds the most, {largest.total_bytes / unit:.2f} {name}"
    )
    for note in report.notes:
        console.print(f"note: {note}")
    console.print(f"made in {report.seconds:.1f} s")


def short(count: int) -> str:
    """A number of parameters in four digits or so: ``25.50B``."""
    for letter, unit in (("B", 10**9), ("M", 10**6)):
        if count >= unit:
            return f"{count / unit:.2f}{letter}"
    return str(count)


def spans(numbers: list[int]) -> str:
    """Layer numbers as runs: ``0-3, 8-11``."""
    if not numbers:
        return "none"
    ordered = sorted(numbers)
    breaks = [i for i, (a, b) in enumerate(pairwise(ordered), start=1) if b != a + 1]
    runs = [ordered[a:b] for a, b in pairwise([0, *breaks, len(ordered)])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
