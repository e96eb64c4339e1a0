"""How ``phalanx simulate trace`` and ``policies`` show what they found."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.simulate.policies.outcome import GroupOutcome, Spread
from phalanx.simulate.policies.study import StudyReport

TEAMS_SHOWN = 12


def print_study(report: StudyReport, *, groups: bool) -> None:
    """All policies in one table; ``groups``: of each the sizes and teams, too."""
    console = Console(highlight=False)
    failing = f", failures as in {report.faults}" if report.faults else ""
    console.print(
        f"{escape(report.trace)}: {report.jobs:,} jobs on {report.gpus:,} GPUs, time limits "
        f"{report.limit_factor:g} times their runs where none is recorded{failing}"
    )
    console.print(_waiting(report))
    console.print(_sharing(report))
    for one in report.policies:
        if groups:
            console.print(_groups("GPUs", one.outcome.by_size))
            console.print(_groups("team", one.outcome.by_team))
        for count, what in ((one.refused, "refused"), (one.outcome.unfinished, "unfinished")):
            if count:
                console.print(f"[red]{one.name}: {count:,} jobs {what}[/red]")
        for told in one.violations:
            console.print(f"[red]{one.name}: {escape(told)}[/red]")
    if report.left_out:
        reasons = ", ".join(f"{count:,} that {why}" for why, count in report.left_out.items())
        console.print(f"rows left out: {reasons}")
        for told in report.unreadable:
            console.print(f"  {escape(told)}")


def _waiting(report: StudyReport) -> Table:
    table = _headed("hours", ("wait", "p50", "p95", "p99", "longest", "ends", "slowdown"))
    for one in report.policies:
        found = one.outcome
        completion, slowdown = found.completion_hours.mean, found.slowdown.mean
        waits = _waits(found.wait_hours)
        table.add_row(one.name, *waits, f"{completion:.2f}", f"{slowdown:,.1f}")
    return table


def _sharing(report: StudyReport) -> Table:
    headings = ["ratio", "worst team", "used", "scattered", "preempted", "starts/s"]
    if report.faults:
        headings += ["failures", "goodput"]
    table = _headed("", headings)
    for one in report.policies:
        found = one.outcome
        row = (
            f"{found.finish_ratio.mean:.2f}",
            f"{found.worst_team_ratio:.2f}",
            f"{found.utilisation:.1%}",
            f"{found.fragmentation:.1%}",
            f"{found.preempted_gpu_hours:,.0f}",
            f"{one.decisions_per_second:,.0f}",
        )
        failing = (f"{one.interruptions:,}", f"{one.goodput:.1%}") if report.faults else ()
        table.add_row(one.name, *row, *failing)
    return table


def _headed(first: str, headings: Iterable[str]) -> Table:
    table = Table(box=SIMPLE)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _waits(spread: Spread) -> tuple[str, ...]:
    values = (spread.mean, spread.p50, spread.p95, spread.p99, spread.longest)
    return tuple(f"{value:.2f}" for value in values)


def _groups(heading: str, groups: dict[str, GroupOutcome]) -> Table:
    headings = ("jobs", "wait", "p50", "p95", "p99", "longest", "ends", "ratio")
    table = _headed(heading, headings)
    for name, group in list(groups.items())[:TEAMS_SHOWN]:
        mean, ratio = group.completion_hours.mean, group.finish_ratio
        row = (f"{group.jobs:,}", *_waits(group.wait_hours), f"{mean:.2f}", f"{ratio:.2f}")
        table.add_row(escape(name), *row)
    return table
