"""Questions that the page asks of the metric store, in the shapes that its JSON has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from phalanx.observe.node.node_records import DETAIL_WORLD
from phalanx.observe.store.metric_store import ColumnRows, MetricStore, TableInfo
from phalanx.observe.store.tables import SECOND_NS, TIERS, Array

MOST_VALUES = 6_000_000  # read for one answer
MOST_ROWS = 40_000

Numbers = list[float | None]


class Series(Struct):
    """One metric over time; None where it is not known."""

    step: list[int] = []
    time: list[float] = []  # seconds since 1970
    value: Numbers = []
    min: Numbers = []
    max: Numbers = []


class SeriesAnswer(Struct):
    """Several metrics of one owner."""

    tier: str
    series: dict[str, Series]


class RankAnswer(Struct):
    """Ranks (or, of large gangs, nodes) over time; a row each, a column a step."""

    tier: str = "raw"
    rows: str = "rank"  # or "node"
    steps: list[int] = []
    time: list[float] = []
    ranks: list[int] = []
    nodes: list[str] = []  # by row
    step_seconds: list[Numbers] = []
    own_seconds: list[Numbers] = []  # without waiting for peers: what makes a straggler jump out
    parts: dict[str, Numbers] = {}  # by row: mean seconds of the time asked for


def series(
    store: MetricStore,
    owner: str,
    kinds: Sequence[str],
    names: Sequence[str],
    span: tuple[int, int],
    points: int,
) -> SeriesAnswer:
    """Metrics between two times, at most so many points each."""
    tables = [table for kind in kinds for table in store.find(owner, kind)]
    tier = choose_tier(store, tables[:1], span, points, width=1)
    series_by_name: dict[str, Series] = {}
    for name in names:
        reads = [
            _newest_too(store, table, name, tier, span)
            for table in tables
            if table.column(name) is not None
        ]
        if reads:
            series_by_name[name] = _series(_together(reads), tier, points)
    return SeriesAnswer(TIERS[tier].name, series_by_name)


def ranks(
    store: MetricStore, owner: str, span: tuple[int, int], columns: int, *, parts: bool = False
) -> RankAnswer | None:
    """What ranks did between two times: of the newest gang, and of those before it that had the
    same ranks (or, of large gangs, the same nodes). Nodes are those of the newest."""
    tables = [table for table in store.find(owner, "ranks") if _overlaps(store, table, span)]
    if not tables:
        return None
    newest = tables[-1]
    column = newest.column("own_seconds")
    assert column is not None
    same = _rows_of(newest)
    alike = [table for table in tables if _rows_of(table) == same]
    tier = choose_tier(store, alike, span, columns, width=column.width)
    statistic = "mean" if tier == 0 else "max"

    def read(name: str) -> ColumnRows:
        return _together([_newest_too(store, table, name, tier, span) for table in alike])

    own = read("own_seconds")
    # Of a large gang whole steps, which are equally long, would double megabytes for nothing.
    told = column.width > DETAIL_WORLD and bool(np.isfinite(own.values[statistic]).any())
    whole = None if told else _rows_as(read("step_seconds"), own)
    edges = _edges(len(own.times_ns), columns)
    last = edges[1:] - 1
    facts: dict[str, Any] = newest.facts
    return RankAnswer(
        tier=TIERS[tier].name,
        rows=facts.get("rows", "rank"),
        steps=own.steps[last].tolist(),
        time=(own.times_ns[last] / SECOND_NS).tolist(),
        ranks=facts.get("ranks", []),
        nodes=facts.get("nodes", []),
        step_seconds=_matrix(whole.values[statistic], edges) if whole is not None else [],
        own_seconds=_matrix(own.values[statistic], edges),
        parts=_parts(store, alike, tier, span) if parts else {},
    )


def _rows_as(read: ColumnRows, other: ColumnRows) -> ColumnRows:
    """The rows of another column; unknown where one was written between the two readings."""
    if np.array_equal(read.times_ns, other.times_ns):
        return read
    at = np.searchsorted(read.times_ns, other.times_ns).clip(0, max(0, len(read.times_ns) - 1))
    same = (
        read.times_ns[at] == other.times_ns
        if len(read.times_ns)
        else np.zeros(len(other.times_ns), bool)
    )
    values = {
        name: np.where(same[:, None], each[at] if len(each) else np.nan, np.nan)
        for name, each in read.values.items()
    }
    return ColumnRows(other.times_ns, other.steps, values)


def _rows_of(table: TableInfo) -> object:
    """What the rows of a table are."""
    by_node = table.facts.get("rows") == "node"
    return table.facts.get("nodes" if by_node else "ranks")


class DevicesAnswer(Struct):
    """A node's devices over time; GPUs by metric, a row each."""

    tier: str
    host: dict[str, Series]
    gpus: dict[str, list[Numbers]]
    time: list[float]


def devices(store: MetricStore, owner: str, span: tuple[int, int], points: int) -> DevicesAnswer:
    """What a node's devices did between two times; of the number of GPUs that it had last."""
    tables = [each for each in store.all_tables(owner) if _overlaps(store, each, span)]
    if not tables:
        return DevicesAnswer("raw", {}, {}, [])
    table = tables[-1]
    width = max(column.width for column in table.columns)
    tier = choose_tier(store, [table], span, points, width=width)
    host, gpus = dict[str, Series](), dict[str, list[Numbers]]()
    time: list[float] = []
    for column in table.columns:
        read = _newest_too(store, table, column.name, tier, span)
        edges = _edges(len(read.times_ns), points)
        if column.name.startswith("gpu_"):
            time = (read.times_ns[edges[1:] - 1] / SECOND_NS).tolist()
            gpus[column.name] = _matrix(read.values["mean" if tier == 0 else "max"], edges)
        else:
            host[column.name] = _series(read, tier or 1, points)
    return DevicesAnswer(TIERS[tier].name, host, gpus, time)


def _parts(
    store: MetricStore, tables: Sequence[TableInfo], tier: int, span: tuple[int, int]
) -> dict[str, Numbers]:
    parts = {}
    for column in tables[-1].columns:
        if column.name not in ("step_seconds", "own_seconds"):
            read = _together([store.read(table, column.name, tier, *span) for table in tables])
            parts[column.name] = numbers(_mean(read.values["mean"].astype(np.float64)))
    return parts


def choose_tier(
    store: MetricStore,
    tables: Sequence[TableInfo],
    span: tuple[int, int],
    points: int,
    *,
    width: int,
) -> int:
    """The coarsest tier that reaches back far enough and still gives so many points.

    Least and most are kept at every distance, so a finer one would show the same.
    """
    spans = [[store.span(table, tier) for table in tables] for tier in range(len(TIERS))]
    known = [[each for each in found if each[2]] for found in spans]
    starts = [min((first for first, _, _ in found), default=0) for found in known]
    # A coarse row bears the time at which its bucket began, before anything was in it.
    reached = [start + TIERS[tier].bucket_ns for tier, start in enumerate(starts) if start]
    oldest = min(reached, default=0)
    wanted = max(span[0], oldest)
    most_rows = min(MOST_ROWS, max(points * 4, MOST_VALUES // max(1, width)))
    chosen = 0
    for tier, found in enumerate(known):
        if not found:
            continue
        chosen = tier
        bucket = max(TIERS[tier].bucket_ns, 60 * SECOND_NS)
        rows = sum(rows * _share(first, last, span) for first, last, rows in found)
        if starts[tier] <= wanted + bucket and rows <= most_rows:
            return _coarser(known, starts, span, points, tier)
    return chosen


def _coarser(
    known: Sequence[Sequence[tuple[int, int, int]]],
    starts: Sequence[int],
    span: tuple[int, int],
    points: int,
    finest: int,
) -> int:
    chosen = finest
    for tier in range(finest + 1, len(TIERS)):
        rows = sum(rows * _share(first, last, span) for first, last, rows in known[tier])
        if rows >= points and starts[tier] <= starts[finest]:
            chosen = tier
    return chosen


def _newest_too(
    store: MetricStore, table: TableInfo, name: str, tier: int, span: tuple[int, int]
) -> ColumnRows:
    """A column in a tier, and behind its last whole bucket what finer tiers know already."""
    read = store.read(table, name, tier, *span)
    if tier == 0:
        return read
    ends = int(read.times_ns[-1]) + TIERS[tier].bucket_ns if len(read.times_ns) else span[0]
    if ends > span[1]:
        return read
    finer = _newest_too(store, table, name, tier - 1, (ends, span[1]))
    if not len(finer.times_ns):
        return read
    column = finer.values["mean"]
    return ColumnRows(
        np.concatenate([read.times_ns, finer.times_ns]),
        np.concatenate([read.steps, finer.steps]),
        {
            statistic: np.concatenate([values, finer.values.get(statistic, column)])
            for statistic, values in read.values.items()
        },
    )


def _share(first: int, last: int, span: tuple[int, int]) -> float:
    inside = min(last, span[1]) - max(first, span[0])
    return max(0.0, min(1.0, inside / max(1, last - first)))


def _overlaps(store: MetricStore, table: TableInfo, span: tuple[int, int]) -> bool:
    return any(
        rows and first <= span[1] and last >= span[0]
        for first, last, rows in (store.span(table, tier) for tier in range(len(TIERS)))
    )


def _together(reads: Sequence[ColumnRows]) -> ColumnRows:
    if len(reads) == 1:
        return reads[0]
    return ColumnRows(
        np.concatenate([read.times_ns for read in reads]),
        np.concatenate([read.steps for read in reads]),
        {name: np.concatenate([read.values[name] for read in reads]) for name in reads[0].values},
    )


def _series(read: ColumnRows, tier: int, points: int) -> Series:
    times, steps = read.times_ns, read.steps
    mean = read.values["mean"][:, 0].astype(np.float64)
    measured = ~np.isnan(mean)
    least = read.values.get("min", read.values["mean"])[:, 0].astype(np.float64)
    most = read.values.get("max", read.values["mean"])[:, 0].astype(np.float64)
    order = np.arange(len(times))
    if tier == 0:  # a step that was made again counts as it was in the end
        _, index = np.unique(steps[::-1], return_index=True)
        order = len(steps) - 1 - index
    if measured.sum() < len(measured) // 2:  # a column that hardly any row has
        order = order[measured[order]]
    times, steps, mean, least, most = (each[order] for each in (times, steps, mean, least, most))
    edges = _edges(len(times), points)
    last = edges[1:] - 1
    return Series(
        step=steps[last].tolist(),
        time=(times[last] / SECOND_NS).tolist(),
        value=numbers(_binned(mean, edges, "mean")),
        min=numbers(_binned(least, edges, "min")),
        max=numbers(_binned(most, edges, "max")),
    )


def _edges(rows: int, points: int) -> Array:
    """Where bins of rows begin and end: at most so many, of equal length."""
    if rows <= points:
        return np.arange(rows + 1)
    return np.linspace(0, rows, points + 1).astype(np.int64)


def _binned(values: Array, edges: Array, how: str) -> Array:
    if len(edges) - 1 == len(values):
        return values
    starts = edges[:-1]
    if how == "min":
        binned: Array = np.fmin.reduceat(values, starts)
    elif how == "max":
        binned = np.fmax.reduceat(values, starts)
    else:
        measured = ~np.isnan(values)
        total = np.add.reduceat(np.where(measured, values, 0.0), starts)
        with np.errstate(invalid="ignore"):
            binned = total / np.add.reduceat(measured.astype(np.float64), starts)
    return binned


def _matrix(values: Array, edges: Array) -> list[Numbers]:
    """Rows of time by columns of ranks, as rows of ranks; of several steps the slowest."""
    if len(values) == 0:
        return [[] for _ in range(values.shape[1])]
    if len(edges) - 1 < len(values):
        values = np.fmax.reduceat(values, edges[:-1], axis=0)
    turned = np.round(values.astype(np.float64), 6).T
    return [numbers(row) for row in turned]


def _mean(values: Array) -> Array:
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(known, values, 0.0).sum(axis=0) / known.sum(axis=0)
    return mean


def numbers(values: Array) -> Numbers:
    """For JSON, which knows neither NaN nor infinity."""
    finite = np.isfinite(values)
    if finite.all():
        return values.tolist()  # type: ignore[no-any-return]
    return [value if good else None for value, good in zip(values.tolist(), finite, strict=True)]
