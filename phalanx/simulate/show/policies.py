"""One picture of policies side by side: waits, completion, fairness, use of the fleet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.plan.show.plot import EXPOSED, IDLE, INK, SOFT, USEFUL, new_figure, plain, write
from phalanx.simulate.policies.study import StudyReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_study(report: StudyReport, path: Path) -> None:
    """Writes the picture."""
    heading = f"{report.jobs:,} jobs on {report.gpus:,} GPUs under {len(report.policies)} policies"
    figure = new_figure(f"{heading}\n{Path(report.trace).name}")
    figure.set_size_inches(15, 9)
    grid = figure.add_gridspec(2, 2)
    axes = [figure.add_subplot(grid[row, column]) for row in (0, 1) for column in (0, 1)]
    found = {one.name: one.outcome for one in report.policies}
    waits = {name: (one.wait_hours.mean, one.wait_hours.p95) for name, one in found.items()}
    _bars(axes[0], waits, ("mean", "95th percentile"), "Wait (hours)")
    completion = {name: (one.completion_hours.mean,) for name, one in found.items()}
    _bars(axes[1], completion, ("mean",), "Completion (hours)")
    ratios = {name: (one.finish_ratio.mean, one.worst_team_ratio) for name, one in found.items()}
    _bars(axes[2], ratios, ("all jobs", "worst team"), "Finish-time ratio")
    use = {name: (100 * one.utilisation, 100 * one.fragmentation) for name, one in found.items()}
    _bars(axes[3], use, ("held", "free, though a job waits"), "GPU time (%)")
    plain(*axes)
    rows = [
        (name, f"{one.wait_hours.mean:.3f} h wait", f"{one.completion_hours.mean:.3f} h completion")
        for name, one in found.items()
    ]
    write(figure, path, heading, rows)


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
