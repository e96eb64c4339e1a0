"""From the events of traced steps to where their time went."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from phalanx.observe.profile.costs import (
    COMPUTE,
    Kind,
    bytes_of,
    flops_of,
    format_of,
    kind_of,
)
from phalanx.observe.profile.events import Inside, StepEvents, TracedMessage, TracedWork
from phalanx.observe.profile.profile import AxisTime, KernelTime, MemorySample
from phalanx.train.measure.intervals import Interval, intersect, merge, subtract, total

TOP = 20  # kernels that are kept
POINTS = 400  # of the memory's line
SHORT_GAP = 2e-6  # seconds between two kernels that no host could make shorter
NEAR = 50e-6  # seconds between the end of a wait and the gap that it leaves


class ClassedWork(NamedTuple):
    """Work with what it belongs to."""

    work: TracedWork
    kind: Kind
    recomputed: bool


class StepAnalysis(NamedTuple):
    """What a trace says, in seconds of one step."""

    seconds: float
    kinds: dict[str, float]
    phases: dict[str, float]
    axes: list[AxisTime]
    kernels: list[KernelTime]
    matmul_formats: dict[str, float]
    recomputed_seconds: float
    gaps: int
    longest_gap_seconds: float
    memory: list[MemorySample]


def analyse(events: StepEvents, only_axis: str = "") -> StepAnalysis:
    """Where the traced steps went; ``only_axis``: the one that communicates, if just one does."""
    count, steps = len(events.steps), events.steps
    work = classed(events)
    busy = [(w.work.start, w.work.end) for w in work if w.kind is not Kind.COMMUNICATION]
    idle = [gap for gap in subtract(steps, busy) if gap[1] - gap[0] > SHORT_GAP]
    waits = [w.work for w in work if w.kind is Kind.COMMUNICATION]
    talking = [(m.start, m.end) for m in events.messages] + [(w.start, w.end) for w in waits]
    gaps = subtract(idle, talking)
    return StepAnalysis(
        seconds=total(steps) / count,
        kinds={kind: s / count for kind, s in partition(events, work, talking).items() if s > 0},
        phases={
            name: total(intersect(spans, steps)) / count
            for name, spans in events.phases.items()
            if spans
        },
        axes=axis_times(events, busy, count, only_axis),
        kernels=kernel_times(work, count),
        matmul_formats=format_times(work, count),
        recomputed_seconds=sum(w.work.end - w.work.start for w in work if w.recomputed) / count,
        gaps=round(len(gaps) / count),
        longest_gap_seconds=max((end - start for start, end in gaps), default=0.0),
        memory=memory_line(events),
    )


def classed(events: StepEvents) -> list[ClassedWork]:
    """The work within steps by kind; the optimizer's is what was launched in its phase."""
    updating, again = Inside(events.phases.get("optimizer", [])), Inside(events.recomputed)
    backward, stepping = Inside(events.phases.get("backward", [])), Inside(events.steps)
    made = []
    for work in events.work:
        if not stepping.has(work.launched):
            continue
        kind = kind_of(work)
        if kind in COMPUTE and updating.has(work.launched):
            kind = Kind.OPTIMIZER
        repeated = backward.has(work.launched) and again.has(work.launched)
        made.append(ClassedWork(work, kind, repeated and kind in COMPUTE))
    return made


def partition(
    events: StepEvents, work: Sequence[ClassedWork], talking: Sequence[Interval]
) -> dict[str, float]:
    """Every second of the steps once: compute, then copies, communication, and why nothing ran."""
    by_kind: dict[Kind, list[Interval]] = defaultdict(list)
    for each in work:
        by_kind[each.kind].append((each.work.start, each.work.end))
    by_kind[Kind.COMMUNICATION] = list(talking)
    left, seconds = merge(events.steps), dict[str, float]()
    for kind in (*COMPUTE, Kind.COMMUNICATION, Kind.COPY):
        taken = intersect(left, by_kind[kind])
        seconds[kind], left = total(taken), subtract(left, taken)
    data = intersect(left, events.phases.get("data", []))
    seconds[Kind.DATA], left = total(data), subtract(left, data)
    drained = [gap for gap in left if _after_wait(gap, events)]
    seconds[Kind.SYNC] = total(drained)
    seconds[Kind.HOST] = total(left) - seconds[Kind.SYNC]
    return seconds


def _after_wait(gap: Interval, events: StepEvents) -> bool:
    """Whether the device ran dry because the host waited for it instead of launching on."""
    own = Inside(events.phases.get("tracing", []))
    return any(
        wait.start <= gap[0] + NEAR
        and gap[0] - NEAR <= wait.end <= gap[1]
        and not own.has(wait.start)
        for wait in events.waits
    )


def axis_of(group: str, only_axis: str) -> str:
    """The axis of a group, by the description that its mesh gave it."""
    if group.startswith("mesh_"):
        return group.removeprefix("mesh_")
    if group == "default_pg":
        return "all ranks"
    return only_axis or group or "unknown"


def axis_times(
    events: StepEvents, busy: Sequence[Interval], count: int, only_axis: str
) -> list[AxisTime]:
    """Messages by axis and collective, the most exposed first."""
    groups: dict[tuple[str, str], list[TracedMessage]] = defaultdict(list)
    for message in events.messages:
        groups[axis_of(message.group, only_axis), message.name].append(message)
    rows = []
    for (axis, name), messages in groups.items():
        spans = intersect(((m.start, m.end) for m in messages), events.steps)
        if not spans:
            continue
        rows.append(
            AxisTime(
                axis=axis,
                collective=name,
                calls=len(messages) / count,
                bytes=sum(m.bytes for m in messages) / count,
                seconds=total(spans) / count,
                exposed_seconds=total(subtract(spans, busy)) / count,
            )
        )
    return sorted(rows, key=lambda row: -row.exposed_seconds)


def kernel_times(work: Sequence[ClassedWork], count: int) -> list[KernelTime]:
    """The work that takes longest, by name and shapes.

    An operation may launch several kernels: what it costs is counted for the longest.
    """
    longest: dict[int, TracedWork] = {}
    for piece in (each.work for each in work):
        known = longest.get(piece.number)
        if known is None or piece.end - piece.start > known.end - known.start:
            longest[piece.number] = piece
    groups: dict[tuple[str, str, str, str], list[TracedWork]] = defaultdict(list)
    for each in work:
        operation = each.work.operation
        shapes = " x ".join(str(list(dims)) for dims in operation.dims if dims)
        key = (short_name(each.work.name), str(each.kind), shapes, format_of(operation))
        groups[key].append(each.work)
    rows = []
    for (name, kind, shapes, number_format), members in groups.items():
        paid = [w.operation for w in members if longest[w.number] is w]
        rows.append(
            KernelTime(
                name=name,
                kind=kind,
                shapes=shapes,
                number_format=number_format,
                calls=len({w.number for w in members}) / count,
                seconds=sum(w.end - w.start for w in members) / count,
                flops=sum(map(flops_of, paid)) / count,
                bytes=sum(map(bytes_of, paid)) / count,
            )
        )
    return sorted(rows, key=lambda row: -row.seconds)[:TOP]


def short_name(name: str) -> str:
    """A kernel's name without the arguments of its template."""
    plain = re.sub(r"<.*", "", name.removeprefix("void "))
    return plain[:80]


def format_times(work: Iterable[ClassedWork], count: int) -> dict[str, float]:
    """Seconds of products by the format of their operands."""
    seconds: dict[str, float] = defaultdict(float)
    for each in work:
        if each.kind is Kind.MATMUL and (name := format_of(each.work.operation)):
            seconds[name] += (each.work.end - each.work.start) / count
    return dict(seconds)


def memory_line(events: StepEvents) -> list[MemorySample]:
    """Bytes over the traced steps; of each stretch the moment with the most."""
    begin, end = events.steps[0][0], events.steps[-1][1]
    points = [point for point in events.memory if begin <= point.at <= end]
    stretch = max(1, len(points) // POINTS)
    most = (
        max(points[i : i + stretch], key=lambda point: point.used)
        for i in range(0, len(points), stretch)
    )
    return [MemorySample(point.at - begin, point.used, point.reserved) for point in most]
