"""How ``phalanx simulate`` shows what it found."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.cli.tables import counted
from phalanx.plan.question.quantities import duration, short
from phalanx.simulate.result import SeedResult, SimulationReport
from phalanx.simulate.scenario.scenario import Scenario

ROWS_SHOWN = 30
CAUSES_SHOWN = 8


def print_report(scenario: Scenario, report: SimulationReport) -> None:
    """Seeds, their mean, where the time went, and every violation."""
    console = Console(highlight=False)
    console.print(f"[bold]{escape(scenario.name)}[/bold]: {escape(scenario.about)}")
    if scenario.chaos is not None:
        _chaos(report, console)
    else:
        _seeds(scenario, report, console)
        _jobs(scenario, report, console)
        _buckets(report, console)
    for one in report.seeds:
        for line in one.found:
            console.print(f"[red]seed {one.seed}: {escape(line)}[/red]")
    total = report.summary
    verdict = "no violations" if not total.violations else f"{total.violations} VIOLATIONS"
    console.print(f"{counted(total.seeds, 'seed')} in {duration(total.wall_seconds)}: {verdict}")


def _seeds(scenario: Scenario, report: SimulationReport, console: Console) -> None:
    table = Table(box=SIMPLE)
    headings = ("seed", "interruptions", "ETTR", "goodput", "recovery", "planned", "events", "s")
    many = scenario.workload.kind != "one-job"
    if many:
        headings = (*headings[:5], "jobs done", "median wait", "s")
    for heading in headings:
        table.add_column(heading, justify="right")
    for one in report.seeds[:ROWS_SHOWN]:
        table.add_row(*_row(one, many))
    if len(report.seeds) > ROWS_SHOWN:
        table.add_row("…")
    if len(report.seeds) > 1:
        table.add_section()
        table.add_row(*_mean_row(report, many))
    console.print(table)


def _row(one: SeedResult, many: bool) -> tuple[str, ...]:
    first = (
        str(one.seed),
        f"{one.interruptions:,}",
        f"{one.ettr:.2%}",
        f"{one.goodput:.2%}",
        duration(one.mean_recovery_seconds) if one.recoveries else "-",
    )
    if many:
        done = f"{one.jobs_done:,} of {one.jobs:,}"
        return (*first, done, duration(one.median_wait_seconds), f"{one.wall_seconds:.1f}")
    return (*first, str(one.planned), f"{one.events:,}", f"{one.wall_seconds:.1f}")


def _mean_row(report: SimulationReport, many: bool) -> tuple[str, ...]:
    mean, deviation = report.summary.mean, report.summary.deviation
    first = (
        "mean",
        f"{mean['interruptions']:.1f} ± {deviation['interruptions']:.1f}",
        f"{mean['ettr']:.2%}",
        f"{mean['goodput']:.2%}",
        duration(mean["mean_recovery_seconds"]) if mean["recoveries"] else "-",
    )
    if many:
        done = f"{mean['jobs_done']:,.0f} of {mean['jobs']:,.0f}"
        wait = duration(mean["median_wait_seconds"])
        return (*first, done, wait, f"{mean['wall_seconds']:.1f}")
    return (
        *first,
        f"{mean['planned']:.1f}",
        f"{mean['events']:,.0f}",
        f"{mean['wall_seconds']:.1f}",
    )


def _jobs(scenario: Scenario, report: SimulationReport, console: Console) -> None:
    """Jobs that did not come to their end, and rows of a trace that were not played."""
    for one in report.seeds if scenario.workload.kind == "one-job" else ():
        for problem in (*one.failures, *([one.waiting] if one.waiting else [])):
            console.print(f"[red]seed {one.seed}: {escape(problem)}[/red]")
        if one.queued_seconds >= 60:
            waited = duration(one.queued_seconds)
            console.print(f"seed {one.seed}: the job had no nodes for {waited}; ETTR counts it")
    left_out = report.seeds[0].left_out  # a trace is the same for every seed
    if left_out:
        reasons = ", ".join(f"{count:,} that {why}" for why, count in left_out.items())
        console.print(f"rows of {escape(scenario.workload.file)} left out: {reasons}")
    if scenario.workload.kind == "csv":
        played = max(one.days for one in report.seeds)
        console.print(f"played until the last job had ended or the last day: {played:.2f} days")
    if scenario.workload.kind != "one-job":
        for what, tables in (
            ("failed", [one.failed for one in report.seeds]),
            ("refused", [one.refused for one in report.seeds]),
        ):
            together = {
                key: sum(t.get(key, 0) for t in tables) for table in tables for key in table
            }
            if together:
                reasons = ", ".join(f"{count:,} {why}" for why, count in together.items())
                console.print(f"jobs {what}, by reason: {escape(reasons)}")


def _buckets(report: SimulationReport, console: Console) -> None:
    summary = report.summary
    expected = summary.mean["expected_interruptions"]
    interval = "none came"
    if summary.mean["interruptions"]:
        interval = f"one every {duration(summary.mean['mtbf_hours'] * 3600)}"
    console.print(f"interruptions expected from the rates: {expected:.1f}; {interval}")
    table = Table(box=SIMPLE, title="Where all GPU time went", title_justify="left")
    for heading in ("bucket", "share", "", "interruptions by cause", "mean"):
        table.add_column(heading, justify="left" if heading in ("bucket", "") else "right")
    buckets = [(name, share) for name, share in summary.buckets.items() if share >= 5e-5]
    causes = list(summary.by_cause.items())[:CAUSES_SHOWN]
    for index in range(max(len(buckets), len(causes))):
        bucket = buckets[index] if index < len(buckets) else None
        cause = causes[index] if index < len(causes) else None
        table.add_row(
            bucket[0].replace("_", " ") if bucket else "",
            f"{bucket[1]:.2%}" if bucket else "",
            "█" * round(bucket[1] * 24) if bucket else "",
            cause[0].replace("_", " ") if cause else "",
            f"{cause[1]:,.1f}" if cause else "",
        )
    console.print(table)
    dollars = summary.mean["dollars"]
    if dollars >= 1:
        lost = (1 - summary.mean["goodput"]) * dollars
        console.print(f"{short(dollars)} dollars of GPU time, {short(lost)} of it no goodput")


def _chaos(report: SimulationReport, console: Console) -> None:
    faults: dict[str, int] = {}
    for one in report.seeds:
        for kind, count in one.faults.items():
            faults[kind] = faults.get(kind, 0) + count
    table = Table(box=SIMPLE)
    table.add_column("injected")
    table.add_column("times", justify="right")
    for kind, count in sorted(faults.items(), key=lambda item: -item[1]):
        table.add_row(kind.replace("_", " "), f"{count:,}")
    console.print(table)
    mean = report.summary.mean
    console.print(
        f"a seed: {mean['events']:,.0f} events, {mean['formations']:.1f} formations, "
        f"{mean['jobs_done']:.1f} of {mean['jobs']:.1f} jobs done, {mean['wall_seconds']:.3f} s"
    )


def print_comparison(
    scenarios: Mapping[str, Scenario], reports: Mapping[str, SimulationReport]
) -> None:
    """Policies side by side."""
    console = Console(highlight=False)
    first = next(iter(scenarios.values()))
    table = Table(box=SIMPLE, title=escape(first.about), title_justify="left")
    table.add_column("", no_wrap=True)
    many = first.workload.kind != "one-job" or first.chaos is not None
    headings = ("faults", "ETTR", "goodput", "recovery", "jobs done" if many else "steps")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, report in reports.items():
        mean = report.summary.mean
        table.add_row(
            escape(name),
            f"{mean['interruptions']:,.0f}",
            f"{mean['ettr']:.2%}",
            f"{mean['goodput']:.2%}",
            duration(mean["mean_recovery_seconds"]) if mean["recoveries"] else "-",
            f"{mean['jobs_done']:,.0f} of {mean['jobs']:,.0f}" if many else f"{mean['steps']:,.0f}",
        )
    console.print(table)
    for name, report in reports.items():
        for one in report.seeds:
            failures = one.failures if scenarios[name].workload.kind == "one-job" else []
            for told in (*failures, *one.found):
                console.print(f"[red]{escape(name)}, seed {one.seed}: {escape(told)}[/red]")
