"""The picture of a scaling curve: speed, share of the peak that is left, and price of a token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.config import ConfigError
from phalanx.plan.question.quantities import short
from phalanx.plan.search.sweep import Sweep
from phalanx.plan.show.plot import (
    EXPOSED,
    IDLE,
    INK,
    SOFT,
    USEFUL,
    check_path,
    new_figure,
    plain,
    write,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADINGS = ("GPUs", "tokens/s", "MFU", "goodput", "days", "$ per million tokens")


def draw_sweep(result: Sweep, path: Path) -> None:
    """Write the curve as PNG, SVG, or an HTML page that needs nothing else."""
    check_path(path)
    if not result.plans:
        rule = "no number of GPUs has a plan to draw"
        raise ConfigError("plot", str(path), rule, "sweep over larger numbers of GPUs")
    first = result.plans[0]
    title = f"{first.model}: {short(first.tokens)} tokens on {first.cluster.gpu.name}"
    figure = new_figure(title)
    speed, share, price = figure.subplots(1, 3)
    _speed(speed, result)
    _share(share, result)
    _price(price, result)
    plain(speed, share, price)
    write(figure, path, title, [HEADINGS, *_rows(result)])


def _rows(result: Sweep) -> list[tuple[str, ...]]:
    return [
        (
            f"{plan.gpus:,}",
            short(plan.prediction.tokens_per_second),
            f"{plan.prediction.mfu:.1%}",
            f"{plan.failures.goodput:.1%}",
            f"{plan.bill.days.mid:,.3g}",
            f"{plan.bill.dollars_per_million_tokens:.3g}",
        )
        for plan in result.plans
    ]


def _gpus(axes: Axes, result: Sweep, title: str) -> list[int]:
    """The axis that all three share: GPUs in powers of two."""
    counts = [plan.gpus for plan in result.plans]
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{count:,}" for count in counts], rotation=45, ha="right")
    axes.minorticks_off()
    axes.set_xlabel("GPUs", fontsize=9, color=INK)
    axes.set_title(title, fontsize=9, loc="left", color=INK)
    return counts


def _speed(axes: Axes, result: Sweep) -> None:
    axes.set_yscale("log", base=10)
    counts = _gpus(axes, result, "Tokens a second, with the 80 % interval")
    speeds = [plan.tokens_per_second for plan in result.plans]
    kept = [plan.tokens_per_second.mid * plan.failures.goodput for plan in result.plans]
    ideal = [speeds[0].mid * count / counts[0] for count in counts]
    axes.plot(counts, ideal, "--", color=SOFT, lw=1, label="as the first, times GPUs")
    lows, highs = [speed.low for speed in speeds], [speed.high for speed in speeds]
    axes.fill_between(counts, lows, highs, color=USEFUL, alpha=0.2, lw=0)
    axes.plot(counts, [speed.mid for speed in speeds], "o-", color=USEFUL, ms=4, label="healthy")
    axes.plot(counts, kept, "s-", color=IDLE, ms=4, label="after failures")
    axes.set_yticks([speed.mid for speed in speeds], [short(speed.mid) for speed in speeds])
    axes.minorticks_off()
    axes.legend(fontsize=8, frameon=False)


def _share(axes: Axes, result: Sweep) -> None:
    counts = _gpus(axes, result, "Shares")
    mfu = [100 * plan.prediction.mfu for plan in result.plans]
    left = [100 * plan.failures.goodput for plan in result.plans]
    axes.plot(counts, mfu, "o-", color=USEFUL, ms=4, label="MFU")
    axes.plot(counts, left, "s-", color=IDLE, ms=4, label="goodput")
    axes.set_ylim(0, 105)  # the marks at 100 are whole
    axes.set_ylabel("%", fontsize=9, color=INK)
    axes.legend(fontsize=8, frameon=False)


def _price(axes: Axes, result: Sweep) -> None:
    counts = _gpus(axes, result, "Dollars for a million tokens")
    dollars = [plan.bill.dollars_per_million_tokens for plan in result.plans]
    axes.plot(counts, dollars, "o-", color=EXPOSED, ms=4)
    axes.set_ylim(0, 1.1 * max(dollars))
    axes.set_ylabel("$", fontsize=9, color=INK)
