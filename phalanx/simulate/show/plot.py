"""One picture of a seed: the fleet over time, where the time went, what interrupted it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cluster.policy import DAY_NS
from phalanx.plan.question.quantities import duration
from phalanx.plan.show.plot import INK, new_figure, plain, write
from phalanx.simulate.result import SeedResult
from phalanx.simulate.runner import played
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 240
LEAST_SHOWN = 5e-5
# Work first, then what steps lose, then failures, then GPUs that do nothing.
COLOURS = {
    "productive": "#2f6f8f",
    "unreported": "#a9c9c4",
    "exposed_communication": "#5b93ad",
    "bubble": "#8fb8ca",
    "data_wait": "#c9d8df",
    "straggler": "#e3c07a",
    "checkpoint_stall": "#d9a441",
    "recompute": "#d08a2e",
    "detection": "#c76a4a",
    "restart": "#b9534b",
    "idle_spare": "#b7bfc5",
    "quarantined": "#7d8790",
    "unallocated": "#e6eaed",
    "residual": "#555555",
}


def draw_seed(scenario: Scenario, seed: int, path: Path) -> None:
    """Plays a seed and draws it."""
    result, world, timeline = played(scenario, seed, bins=BINS)
    times = [time_ns / DAY_NS for time_ns, _, _ in world.record.interruptions]
    rows = [(name.replace("_", " "), f"{share:.3%}") for name, share in result.buckets.items()]
    write(_figure(scenario, result, timeline, times), path, scenario.name, rows)


def _figure(
    scenario: Scenario, result: SeedResult, timeline: Timeline, times: list[float]
) -> Figure:
    title = (
        f"{scenario.name}, seed {result.seed}: {result.gpus:,} GPUs, {result.days:g} days, "
        f"{result.interruptions:,} interruptions, ETTR {result.ettr:.2%}, "
        f"goodput {result.goodput:.2%}"
    )
    figure = new_figure(title)
    figure.set_size_inches(15, 9)
    grid = figure.add_gridspec(2, 2, height_ratios=(1.1, 1), width_ratios=(1.25, 1))
    over_time = figure.add_subplot(grid[0, :])
    waterfall, causes = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    _over_time(over_time, timeline, times)
    _waterfall(waterfall, result)
    _causes(causes, result)
    plain(over_time, waterfall, causes)
    return figure


def _over_time(axes: Axes, timeline: Timeline, times: list[float]) -> None:
    names = [name for name in COLOURS if _seen(name, timeline)]
    rows = [[100 * share.get(name, 0.0) for share in timeline.shares] for name in names]
    width = timeline.days[0] if timeline.days else 1.0
    axes.stackplot(
        [0.0, *timeline.days],
        [[row[0], *row] for row in rows],
        colors=[COLOURS[name] for name in names],
        labels=[name.replace("_", " ") for name in names],
        step="pre",
        linewidth=0,
    )
    axes.plot(times, [101.5] * len(times), "|", color=COLOURS["restart"], ms=6, mew=0.6)
    axes.text(0, 103, "interruptions", fontsize=8, color=COLOURS["restart"], va="bottom")
    axes.set_xlim(0, timeline.days[-1] if timeline.days else 1)
    floor = _floor(rows, names)
    axes.set_ylim(floor, 106)
    axes.set_xlabel("days", fontsize=9, color=INK)
    cut = f" (the axis begins at {floor:.0f})" if floor else ""
    axes.set_ylabel(f"% of all GPU time{cut}", fontsize=9, color=INK)
    heading = f"The fleet over time (each bar {duration(width * 86400)})"
    axes.set_title(heading, fontsize=10, loc="left", color=INK)
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _seen(name: str, timeline: Timeline) -> bool:
    return any(share.get(name, 0.0) >= LEAST_SHOWN for share in timeline.shares)


def _floor(rows: list[list[float]], names: list[str]) -> float:
    """Where the axis begins: a band of work that never changes tells nothing."""
    if not rows or names[0] != "productive":
        return 0.0
    return max(0.0, min(rows[0]) // 10 * 10 - 10)


def _waterfall(axes: Axes, result: SeedResult) -> None:
    shares = ((name, result.buckets.get(name, 0.0)) for name in COLOURS)
    parts = [(name, share) for name, share in shares if share >= LEAST_SHOWN]
    start = 0.0
    for row, (name, share) in enumerate(parts):
        axes.barh(row, 100 * share, left=100 * start, color=COLOURS[name], height=0.7)
        text = f" {share:.2%}"
        if start + share < 0.8:
            axes.text(100 * (start + share), row, text, va="center", fontsize=8, color=INK)
        else:
            axes.text(100 * start, row, text + " ", va="center", ha="right", fontsize=8, color=INK)
        start += share
    axes.set_yticks(range(len(parts)), [name.replace("_", " ") for name, _ in parts])
    axes.invert_yaxis()
    axes.set_xlim(0, 101)
    axes.set_xlabel("% of all GPU time", fontsize=9, color=INK)
    axes.set_title("Where every GPU-second went", fontsize=10, loc="left", color=INK)


def _causes(axes: Axes, result: SeedResult) -> None:
    rows = list(result.by_cause.items())[:16]
    axes.barh(range(len(rows)), [count for _, count in rows], color=COLOURS["restart"], height=0.7)
    for row, (_, count) in enumerate(rows):
        axes.text(count, row, f" {count}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(rows)), [name.replace("_", " ") for name, _ in rows])
    axes.invert_yaxis()
    if not rows:
        axes.set_xlim(0, 1)
        axes.text(0.5, 0.5, "nothing", fontsize=9, color=INK, ha="center", transform=axes.transAxes)
    axes.set_xlabel("interruptions", fontsize=9, color=INK)
    axes.set_title("What interrupted jobs", fontsize=10, loc="left", color=INK)
