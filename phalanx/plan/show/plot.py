"""One picture of a plan: where the step goes, what else there was, how near the roof it is."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.config.errors import plain_reason
from phalanx.plan.question.quantities import duration

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".html")

USEFUL, EXPOSED, IDLE, INK, SOFT = "#2f6f8f", "#d08a2e", "#b9534b", "#22303a", "#9aa7b0"
# Work that the mathematics needs, traffic that nothing hides, and waiting.
KINDS = {
    **dict.fromkeys(("matmul", "attention", "elementwise", "optimizer"), USEFUL),
    **dict.fromkeys(
        ("tensor", "context", "expert", "pipeline", "data", "recompute", "offload"), EXPOSED
    ),
    **dict.fromkeys(("bubble", "straggler", "host"), IDLE),
}


class Point(Struct, frozen=True):
    """A mapping beside others: what it costs, what it gives."""

    label: str
    x: float
    y: float
    chosen: bool = False


class Kernel(Struct, frozen=True):
    """A kind of work in the roofline."""

    name: str
    flops_per_byte: float
    flops_per_second: float


class Picture(Struct, frozen=True, kw_only=True):
    """Everything that is drawn."""

    title: str
    subtitle: str
    parts: dict[str, float]  # seconds of a step, in the order of the bars
    front: tuple[Point, ...]  # x: GiB used a GPU, y: tokens/s a GPU
    front_axes: tuple[str, str]
    memory_limit: float  # on the x axis of the front; 0: none
    kernels: tuple[Kernel, ...]
    peak_flops: float
    memory_bandwidth: float
    gpu: str


def check_path(path: Path) -> None:
    """Refuse a kind of file that cannot be drawn, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        fix = f"try {path.with_suffix('.html')}"
        raise ConfigError("plot", str(path), "must end in " + ", ".join(SUFFIXES), fix)
    if not path.absolute().parent.is_dir():
        fix = f"make the folder, or try {path.name}"
        raise ConfigError("plot", str(path), "its folder does not exist", fix)


def draw(picture: Picture, path: Path) -> None:
    """Write the picture as PNG, SVG, or an HTML page that needs nothing else."""
    check_path(path)
    rows = [(name, duration(seconds)) for name, seconds in picture.parts.items()]
    write(_figure(picture), path, picture.title, rows)


def write(figure: Figure, path: Path, title: str, rows: Sequence[Sequence[str]]) -> None:
    """The figure as a file; a page also has its numbers as a table."""
    kind = path.suffix.lower()
    try:
        if kind == ".html":
            text = io.StringIO()
            figure.savefig(text, format="svg", bbox_inches="tight")
            path.write_text(_page(title, text.getvalue(), rows), encoding="utf-8")
        else:
            figure.savefig(path, format=kind[1:], dpi=150, bbox_inches="tight")
    except OSError as error:
        rule = f"cannot be written: {plain_reason(error)}"
        fix = "give a path in a folder where you may write"
        raise ConfigError("plot", str(path), rule, fix) from None


def new_figure(title: str) -> Figure:
    """An empty figure with its title."""
    try:
        from matplotlib.figure import Figure as NewFigure
    except ImportError:
        fix = "pip install 'phalanx[plot]'"
        raise ConfigError("plot", "", "needs matplotlib, which is not installed", fix) from None
    # A figure of its own and no pyplot: no window system, no global state.
    figure = NewFigure(figsize=(15, 5.2), facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, weight="bold", color=INK)
    return figure


def _figure(picture: Picture) -> Figure:
    figure = new_figure(f"{picture.title}\n{picture.subtitle}")
    waterfall, front, roof = figure.subplots(1, 3, width_ratios=(1.25, 1, 1))
    _waterfall(waterfall, picture)
    _front(front, picture)
    _roofline(roof, picture)
    plain(waterfall, front, roof)
    return figure


def plain(*every: Axes) -> None:
    """Axes without a box, in the colour of the text."""
    for axes in every:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=8)


def _waterfall(axes: Axes, picture: Picture) -> None:
    parts = {name: seconds for name, seconds in picture.parts.items() if seconds > 0}
    total = sum(parts.values())
    start = 0.0
    for row, (name, seconds) in enumerate(parts.items()):
        axes.barh(row, seconds, left=start, color=KINDS.get(name, SOFT), height=0.7)
        text = f" {seconds / total:.1%}"
        axes.text(start + seconds, row, text, va="center", fontsize=8, color=INK)
        start += seconds
    axes.barh(len(parts), total, color=INK, height=0.7)
    axes.text(total, len(parts), f" {duration(total)}", va="center", fontsize=8, color=INK)
    axes.set_yticks(range(len(parts) + 1), [*parts, "step"])
    axes.invert_yaxis()
    axes.set_xlim(0, total * 1.13)
    axes.set_xlabel("seconds", fontsize=9, color=INK)
    axes.set_title("Where a step goes", fontsize=9, loc="left", color=INK)
    legend = (("work", USEFUL), ("exposed or repeated", EXPOSED), ("waiting", IDLE))
    for name, colour in legend:
        axes.barh(0, 0, color=colour, label=name)
    axes.legend(fontsize=8, frameon=False, loc="center left")


def _front(axes: Axes, picture: Picture) -> None:
    points = sorted(picture.front, key=lambda point: point.x)
    xs, ys = [point.x for point in points], [point.y for point in points]
    axes.plot(xs, ys, "o-", color=SOFT, ms=4, lw=1, drawstyle="steps-post")
    for point in points:
        if point.chosen:
            axes.plot(point.x, point.y, "*", color=EXPOSED, ms=15, label=point.label)
    if picture.memory_limit:
        axes.axvline(picture.memory_limit, color=IDLE, lw=1, ls="--", label="memory of a GPU")
    axes.set_xlabel(picture.front_axes[0], fontsize=9, color=INK)
    axes.set_ylabel(picture.front_axes[1], fontsize=9, color=INK)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, 1.06 * max([picture.memory_limit, *xs]))
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    axes.set_title("Pareto front: memory against speed", fontsize=9, loc="left", color=INK)


def _roofline(axes: Axes, picture: Picture) -> None:
    ridge = picture.peak_flops / picture.memory_bandwidth
    low = min([0.1, *(kernel.flops_per_byte / 2 for kernel in picture.kernels)])
    high = max([10 * ridge, *(kernel.flops_per_byte * 2 for kernel in picture.kernels)])
    xs = [low, ridge, high]
    roof = [min(picture.peak_flops, x * picture.memory_bandwidth) / 1e12 for x in xs]
    axes.loglog(xs, roof, color=INK, lw=1.5)
    for kernel, marker in zip(picture.kernels, "osD^v<>", strict=False):
        reached = kernel.flops_per_second / 1e12
        best = min(picture.peak_flops, kernel.flops_per_byte * picture.memory_bandwidth) / 1e12
        label = f"{kernel.name}: {reached / best:.0%} of the roof"
        colour = KINDS.get(kernel.name, SOFT)
        axes.loglog(kernel.flops_per_byte, reached, marker, color=colour, ms=7, label=label)
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.set_xlabel("FLOP per byte of memory traffic", fontsize=9, color=INK)
    axes.set_ylabel("TFLOP/s of a GPU", fontsize=9, color=INK)
    axes.set_title(f"Roofline of one {picture.gpu}", fontsize=9, loc="left", color=INK)


def _page(title: str, svg: str, rows: Sequence[Sequence[str]]) -> str:
    drawing = svg[svg.index("<svg") :]
    cells = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    style = (
        "body{font:15px system-ui,sans-serif;color:#22303a;margin:2rem;max-width:100rem}"
        "svg{width:100%;height:auto}td{padding:.15rem 1rem .15rem 0}"
        "td+td{text-align:right;font-variant-numeric:tabular-nums}"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body>{drawing}<table>{cells}</table></body></html>\n"
    )
