"""How ``phalanx simulate trace`` and ``policies`` show what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.simulate.policies.outcome import GroupOutcome, PolicyOutcome, Spread
from phalanx.simulate.policies.study import StudyReport

TEAMS_SHOWN = 12
GROUPS_ACROSS = 4  # teams side by side
SPREAD = ("mean", "p50", "p95", "p99", "longest")


def print_study(report: StudyReport, *, groups: bool) -> None:
    """All policies side by side; ``groups``: each with all of its sizes and teams instead."""
    console = Console(highlight=False)
    failing = f", failures as in {report.faults}" if report.faults else ""
    console.print(
        f"{escape(report.trace)}: {report.jobs:,} jobs on {report.gpus:,} GPUs, time limits "
        f"{report.limit_factor:g} times their runs where none is recorded{failing}"
    )
    console.print(_spreads("wait, hours", report, lambda outcome: outcome.wait_hours))
    console.print(_spreads("ends, hours", report, lambda outcome: outcome.completion_hours))
    console.print(_spreads("slowdown", report, lambda outcome: outcome.slowdown))
    console.print(_sharing(report))
    if not groups:
        console.print(_by_group("wait by GPUs", report, lambda outcome: outcome.by_size))
        console.print(_by_group("wait by team", report, lambda outcome: outcome.by_team))
    for one in report.policies:
        if groups:
            for what, known in (("GPUs", one.outcome.by_size), ("team", one.outcome.by_team)):
                console.print(_groups(f"{what}: wait, hours", known, lambda one: one.wait_hours))
                ends = _groups(f"{what}: ends, hours", known, lambda one: one.completion_hours)
                console.print(ends)
        for count, what in ((one.refused, "refused"), (one.outcome.unfinished, "unfinished")):
            if count:
                console.print(f"[red]{one.name}: {count:,} jobs {what}[/red]")
        for complaint in one.violations:
            console.print(f"[red]{one.name}: {escape(complaint)}[/red]")
    if report.left_out:
        reasons = ", ".join(f"{count:,} that {why}" for why, count in report.left_out.items())
        console.print(f"rows left out: {reasons}")
        for complaint in report.unreadable:
            console.print(f"  {escape(complaint)}")


def _spreads(heading: str, report: StudyReport, of: Callable[[PolicyOutcome], Spread]) -> Table:
    """A quantity under each policy."""
    table = _headed(heading, SPREAD)
    for one in report.policies:
        table.add_row(one.name, *_digits(of(one.outcome)))
    return table


def _sharing(report: StudyReport) -> Table:
    headings = ["ratio", "worst team", "used", "scattered", "preempted", "starts/s"]
    if report.faults:
        headings += ["failures", "goodput"]
    table = _headed("", headings)
    for one in report.policies:
        outcome = one.outcome
        row = (
            f"{outcome.finish_ratio.mean:.2f}",
            f"{outcome.worst_team_ratio:.2f}",
            f"{outcome.utilisation:.1%}",
            f"{outcome.fragmentation:.1%}",
            f"{outcome.preempted_gpu_hours:,.0f}",
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


def _digits(spread: Spread) -> tuple[str, ...]:
    values = (spread.mean, spread.p50, spread.p95, spread.p99, spread.longest)
    return tuple(f"{value:,.2f}" for value in values)


def _by_group(
    heading: str, report: StudyReport, of: Callable[[PolicyOutcome], dict[str, GroupOutcome]]
) -> Table:
    """Mean and 95th percentile of the wait of each size or team, the largest teams first."""
    names = list(dict.fromkeys(name for one in report.policies for name in of(one.outcome)))
    table = _headed(heading, [escape(name) for name in names[:GROUPS_ACROSS]])
    for one in report.policies:
        groups = [of(one.outcome).get(name) for name in names[:GROUPS_ACROSS]]
        waits = [group.wait_hours if group is not None else None for group in groups]
        shown = [f"{wait.mean:,.2f} / {wait.p95:,.2f}" if wait else "" for wait in waits]
        table.add_row(one.name, *shown)
    return table


def _groups(
    heading: str, groups: dict[str, GroupOutcome], of: Callable[[GroupOutcome], Spread]
) -> Table:
    """A quantity of every size or team under one policy."""
    table = _headed(heading, ("jobs", *SPREAD, "ratio"))
    for name, group in list(groups.items())[:TEAMS_SHOWN]:
        row = (f"{group.jobs:,}", *_digits(of(group)), f"{group.finish_ratio:.2f}")
        table.add_row(escape(name), *row)
    return table
