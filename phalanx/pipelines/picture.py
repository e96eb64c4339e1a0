"""The graph of a run as SVG: each task with its state, time and GPU-hours."""

from __future__ import annotations

from html import escape

from phalanx.cluster.pipelines.events import BAD, TaskState
from phalanx.cluster.pipelines.machine import PipelineMachine, TaskProgress
from phalanx.cluster.units import HOUR_NS, SECOND_NS

WIDTH, HEIGHT, GAP, ROW = 210, 46, 60, 64
FILL = {
    TaskState.DONE: "#d6f0d9",
    TaskState.CACHED: "#e3e8ef",
    TaskState.RUNNING: "#dbe8fd",
    TaskState.RETRYING: "#fdeccf",
    TaskState.ASKING: "#fdeccf",
    **dict.fromkeys(BAD, "#f9d8d6"),
}
LONGEST = 30  # letters of a name


def graph_svg(machine: PipelineMachine) -> str:
    """An SVG of all tasks, each to the right of those that it depends on."""
    places = _places(machine)
    height = max((row for _, row in places.values()), default=0) + 1
    width = max((column for column, _ in places.values()), default=0) + 1
    size = f'width="{width * (WIDTH + GAP)}" height="{height * ROW}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">']
    for name, progress in machine.tasks.items():
        parts += (_edge(places[waits.task], places[name]) for waits in progress.task.waits)
    parts += (_box(progress, places[name]) for name, progress in machine.tasks.items())
    return "\n".join([*parts, "</svg>", ""])


def _places(machine: PipelineMachine) -> dict[str, tuple[int, int]]:
    """Column and row of each task: one column after its last dependency."""
    columns: dict[str, int] = {}
    rows: dict[int, int] = {}
    places = {}
    for name, progress in machine.tasks.items():  # in an order in which they can run
        before = [columns[waits.task] for waits in progress.task.waits]
        column = columns[name] = max(before, default=-1) + 1
        places[name] = (column, rows.get(column, 0))
        rows[column] = rows.get(column, 0) + 1
    return places


def _box(progress: TaskProgress, place: tuple[int, int]) -> str:
    x, y = place[0] * (WIDTH + GAP), place[1] * ROW
    name = progress.task.name
    short = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    facts = [str(progress.state)]
    if progress.attempts:
        facts.append(f"{progress.took_ns / SECOND_NS:.1f} s")
    if progress.attempts and progress.task.step.gpus:
        facts.append(f"{progress.took_ns * progress.task.step.gpus / HOUR_NS:.2f} GPU-h")
    facts += [f"{metric} {value:.4g}" for metric, value in progress.result.scores.items()][:1]
    fill = FILL.get(progress.state, "#ffffff")
    return (
        f"<g><title>{escape(f'{name}: {progress.reason}')}</title>"
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6" fill="{fill}" '
        f'stroke="#66707c"/><text x="{x + 10}" y="{y + 19}" font-size="13">{escape(short)}</text>'
        f'<text x="{x + 10}" y="{y + 37}" font-size="11" fill="#444c56">'
        f"{escape(' · '.join(facts))}</text></g>"
    )


def _edge(start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1 = start[0] * (WIDTH + GAP) + WIDTH, start[1] * ROW + HEIGHT // 2
    x2, y2 = end[0] * (WIDTH + GAP), end[1] * ROW + HEIGHT // 2
    middle = (x1 + x2) // 2
    path = f"M{x1},{y1} C{middle},{y1} {middle},{y2} {x2},{y2}"
    return f'<path d="{path}" fill="none" stroke="#9aa4b0"/>'
