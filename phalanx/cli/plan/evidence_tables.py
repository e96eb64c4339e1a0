"""Tables of ``phalanx plan check``, ``calibrate`` and ``textbook``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import structs
from rich.markup import escape
from rich.table import Table

from phalanx.cli.plan.proposal_tables import console, table
from phalanx.plan.show.textbook import FormulaLine

if TYPE_CHECKING:
    from phalanx.plan.evidence.calibrate import Calibration
    from phalanx.plan.evidence.check import CheckReport
    from phalanx.plan.evidence.memory_readings import MemoryErrors
    from phalanx.plan.evidence.ordering import Ordering


def print_calibration(calibration: Calibration) -> None:
    """How the fitted constants predict each project that was left out of its own fit."""
    out = console()
    made = table(f"Fitted to {calibration.runs} runs", "left out", "runs", "mean", "median", "bias")
    for name, errors in calibration.left_out.items():
        made.add_row(escape(name), *_errors(errors))
    out.print(made)
    _print_counts("columns not read:", calibration.unread)
    _print_ordering(calibration.ordering)
    out.print(f"left-one-out error: mean {calibration.mape:.1%}, median {calibration.median:.1%}")


def print_unseen(calibration: Calibration) -> None:
    """Each project predicted by constants fitted without it, as if its software had no name."""
    headings = ("runs", "mean", "median", "bias", "in interval")
    made = table("Software that is unseen and unnamed, share of error", "left out", *headings)
    for name, errors in calibration.unseen.items():
        if name == "dense":
            made.add_section()
        made.add_row(escape(name), *_errors(errors), f"{errors['coverage80']:.0%}")
    console().print(made)
    _print_ordering(calibration.unseen_ordering)
    if calibration.unseen_memory is not None:
        _print_memory(calibration.unseen_memory)


def _print_ordering(ordering: Ordering | None) -> None:
    if ordering is not None:
        console().print(
            f"order: {ordering.right:.0%} of {ordering.pairs} pairs measured side by side; in "
            f"{ordering.groups} groups the pick takes {ordering.regret:.1%} longer than the best "
            f"({ordering.worst_regret:.0%} at worst)"
        )


def _print_memory(memory: MemoryErrors) -> None:
    out = console()
    if memory.n:
        out.print(
            f"memory: {memory.within_10:.0%} of {memory.n} readings within 10 %, "
            f"{memory.within_15:.0%} within 15 %"
        )
    oom, fit = memory.false_oom_between, memory.false_fit_between
    out.print(f"false OOM: {_rate(memory.false_oom, memory.ran, oom)} that ran")
    out.print(f"false fit: {_rate(memory.false_fit, memory.failed, fit)} that ran out of memory")


def print_check(report: CheckReport, every_row: bool) -> None:
    """Errors by group and by source; with ``every_row``, each run beside its prediction."""
    out = console()
    if every_row:
        out.print(_checked_rows(report))
    headings = ("runs", "mean", "median", "bias", "in interval")
    made = table("Predicted against measured, share of error", "", *headings)
    for name, errors in (*report.groups.items(), *report.by_source.items()):
        if name == next(iter(report.by_source), None):
            made.add_section()
        if not errors.n:
            continue
        row = _errors(structs.asdict(errors))
        made.add_row(escape(name), *row, f"{errors.coverage80:.0%}")
    out.print(made if report.rows else "no run of the file can be compared")
    _print_ordering(report.ordering)
    if report.memory is not None:
        _print_memory(report.memory)
    reasons = Counter(skipped.reason for skipped in report.skipped)
    _print_counts(f"{len(report.skipped)} rows skipped:", dict(reasons.most_common()))
    _print_counts("assumed:", report.assumed)
    _print_counts("columns not read:", report.unread)


def _rate(misjudged: int, whole: int, between: tuple[float, float]) -> str:
    """A count of runs, its share, and how well so many runs know it."""
    if not whole:
        return "0 of 0 runs"
    low, high = between
    share = f"{misjudged / whole:.1%}; 95 % interval {low:.0%} to {high:.0%}"
    return f"{misjudged} of {whole} runs ({share})"


def _print_counts(title: str, rows_of: dict[str, int]) -> None:
    """How many rows each sentence concerns; nothing where there is none."""
    if rows_of:
        out = console()
        out.print(title)
        for sentence, count in rows_of.items():
            out.print(escape(f"  {count} x {sentence}"))


def _checked_rows(report: CheckReport) -> Table:
    made = table("", "row", "source", "GPUs", "predicted", "80 %", "measured", "error", left=2)
    for row in report.rows:
        made.add_row(
            str(row.row),
            escape(f"{row.project} ({row.kind})"),
            f"{row.gpus:,}",
            f"{row.predicted_seconds:.3g} s",
            f"{row.low_seconds:.3g} to {row.high_seconds:.3g}",
            f"{row.measured_seconds:.3g} s",
            f"{row.error:+.1%}" + ("" if row.covered else " [yellow]*[/yellow]"),
        )
    return made


def _errors(errors: dict[str, float]) -> tuple[str, ...]:
    return (
        f"{errors['n']:.0f}",
        f"{errors['mape']:.1%}",
        f"{errors['median']:.1%}",
        f"{errors['bias']:+.1%}",
    )


def print_textbook(lines: Sequence[FormulaLine], title: str) -> None:
    """Every formula with its numbers, and below it where they disagree."""
    out = console()
    made = table(title, "", "formula", "result", left=2)
    for row in lines:
        mark = "" if row.fits else " [yellow](!)[/yellow]"
        formula = f"{escape(row.formula)}\n[dim]= {escape(row.numbers)}[/dim]"
        made.add_row(escape(row.topic), formula, escape(row.result) + mark)
    out.print(made)
    out.print("(!) where the usual numbers do not fit together:")
    for row in lines:
        if not row.fits:
            out.print(f"  {escape(row.topic)}: {escape(row.result)}; {escape(row.note)}")
    out.print("Notes:")
    for row in lines:
        if row.fits and row.note:
            out.print(f"  {escape(row.topic)}: {escape(row.note)}")
