"""One picture of policies side by side: waits, completion, sizes, fairness, use of the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.plan.show.plot import EXPOSED, IDLE, INK, SOFT, USEFUL, new_figure, plain, write
from phalanx.simulate.policies.outcome import Spread
from phalanx.simulate.policies.study import StudyReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SPREAD = ("mean", "95th percentile", "99th percentile")


def draw_study(report: StudyReport, path: Path) -> None:
    """Writes the picture."""
    heading = f"{report.jobs:,} jobs on {report.gpus:,} GPUs under {len(report.policies)} policies"
    failing = f", failures as in {report.faults}" if report.faults else ""
    figure = new_figure(f"{heading}{failing}\n{Path(report.trace).name}")
    figure.set_size_inches(18, 9)
    grid = figure.add_gridspec(2, 3)
    axes = [figure.add_subplot(grid[row, column]) for row in (0, 1) for column in (0, 1, 2)]
    outcomes = {one.name: one.outcome for one in report.policies}
    waits = {name: _of(one.wait_hours) for name, one in outcomes.items()}
    _bars(axes[0], waits, SPREAD, "Wait (hours)")
    completion = {name: _of(one.completion_hours) for name, one in outcomes.items()}
    _bars(axes[1], completion, SPREAD, "Completion (hours)")
    sizes = list(dict.fromkeys(size for one in outcomes.values() for size in one.by_size))
    by_size = {
        name: tuple(
            one.by_size[size].wait_hours.mean if size in one.by_size else 0.0 for size in sizes
        )
        for name, one in outcomes.items()
    }
    _bars(axes[2], by_size, tuple(f"{size} GPUs" for size in sizes), "Mean wait by size (hours)")
    ratios = {name: (one.finish_ratio.mean, one.worst_team_ratio) for name, one in outcomes.items()}
    _bars(axes[3], ratios, ("all jobs", "worst team"), "Finish-time ratio")
    use = {name: (100 * one.utilisation, 100 * one.fragmentation) for name, one in outcomes.items()}
    _bars(axes[4], use, ("held", "free, though a job waits"), "GPU time (%)")
    sent_away = {name: (one.preempted_gpu_hours,) for name, one in outcomes.items()}
    _bars(axes[5], sent_away, ("preempted",), "GPU-hours of stays that others ended")
    plain(*axes)
    rows = [
        (name, f"{one.wait_hours.mean:.3f} h wait", f"{one.completion_hours.mean:.3f} h completion")
        for name, one in outcomes.items()
    ]
    write(figure, path, heading, rows)


def _of(spread: Spread) -> tuple[float, ...]:
    return spread.mean, spread.p95, spread.p99


def _bars(
    axes: Axes, rows: Mapping[str, tuple[float, ...]], labels: tuple[str, ...], title: str
) -> None:
    height = 0.8 / len(labels)
    for index, label in enumerate(labels):
        places = [row + index * height for row in range(len(rows))]
        values = [row[index] for row in rows.values()]
        colour = (USEFUL, EXPOSED, IDLE, SOFT)[index]
        axes.barh(places, values, height=height, color=colour, label=label)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(rows))], list(rows))
    axes.invert_yaxis()
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    if len(labels) > 1:
        axes.legend(fontsize=8, frameon=False)
