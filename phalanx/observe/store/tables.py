"""Tables of metrics on their way into the store: rows in, rows of every tier out.

A table has one row a step (or a sample) and named columns; a matrix of ranks is one column of some
width. Coarser tiers keep mean, least and most of each bucket of time, or for wide columns mean and
most in half precision: a straggler stays visible at any distance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

SECOND_NS = 1_000_000_000

Array = np.ndarray[Any, np.dtype[Any]]


class Resolution(NamedTuple):
    """A resolution and how long it is kept."""

    name: str
    bucket_ns: int  # 0: every row
    keep_ns: int


HOUR_NS, DAY_NS = 3600 * SECOND_NS, 86_400 * SECOND_NS
RAW = Resolution("raw", 0, 6 * HOUR_NS)
TIERS = (
    RAW,
    Resolution("10s", 10 * SECOND_NS, 2 * DAY_NS),
    Resolution("1min", 60 * SECOND_NS, 60 * DAY_NS),
    Resolution("30min", 1800 * SECOND_NS, 800 * DAY_NS),
)


class Column(Struct, frozen=True):
    """A metric: one number a row, or ``width`` of them."""

    name: str
    width: int = 1


class Rows(NamedTuple):
    """Rows of one tier that are ready to be stored."""

    tier: int
    times_ns: Array  # int64
    steps: Array  # int64: of the last row in the bucket
    values: dict[str, Array]  # by column: [rows, statistics, width]


def statistics(tier: int, column: Column) -> tuple[str, ...]:
    """What is kept of a column in a tier."""
    if tier == 0:
        return ("mean",)
    return ("mean", "max") if column.width > 1 else ("mean", "min", "max")


def kind_of(tier: int, column: Column) -> str:
    """The numbers' type in the store."""
    return "<f2" if tier and column.width > 1 else "<f8" if column.width == 1 else "<f4"


class Bucket:
    """The rows of one bucket of time, added up; all columns side by side."""

    def __init__(self, number: int, width: int) -> None:
        self.number, self.step = number, 0
        self.count, self.sum = np.zeros(width), np.zeros(width)
        self.least, self.most = np.full(width, np.nan), np.full(width, np.nan)

    def add(self, step: int, row: Array, is_known: Array) -> None:
        self.step = max(self.step, step)
        self.count += is_known
        with np.errstate(over="ignore"):  # a sum beyond all numbers is shown as unknown
            self.sum += np.where(is_known, row, 0.0)
        np.fmin(self.least, row, out=self.least)
        np.fmax(self.most, row, out=self.most)

    def row(self, place: slice, wanted: Sequence[str]) -> Array:
        with np.errstate(invalid="ignore", divide="ignore"):
            values = {
                "mean": self.sum[place] / self.count[place],
                "min": self.least[place],
                "max": self.most[place],
            }
        return np.stack([values[each] for each in wanted])


class MetricTable:
    """One table's rows that are not stored yet, in every tier."""

    def __init__(self, number: int, columns: Sequence[Column]) -> None:
        self.number = number
        self.columns = tuple(columns)
        ends = np.cumsum([column.width for column in columns])
        self._width = int(ends[-1])
        self._places = {
            column.name: slice(int(end) - column.width, int(end))
            for column, end in zip(self.columns, ends, strict=True)
        }
        self._raw: list[tuple[int, int, Array]] = []
        self._open: list[Bucket | None] = [None] * len(TIERS)
        self._closed: list[list[Bucket]] = [[] for _ in TIERS]

    def append(self, time_ns: int, step: int, values: Mapping[str, float | Array]) -> None:
        """One row; what is missing is unknown, what is not finite counts as unknown."""
        row = np.full(self._width, np.nan)
        for name, value in values.items():
            place = self._places.get(name)
            if place is not None:
                row[place] = value
        finite = np.isfinite(row)
        row[~finite] = np.nan
        self._raw.append((time_ns, step, row))
        for index, tier in enumerate(TIERS[1:], 1):
            number = time_ns // tier.bucket_ns
            bucket = self._open[index]
            if bucket is None or bucket.number != number:
                if bucket is not None:
                    self._closed[index].append(bucket)
                bucket = self._open[index] = Bucket(number, self._width)
            bucket.add(step, row, finite)

    def take(self, *, everything: bool = False) -> Iterator[Rows]:
        """Rows to be stored; with ``everything`` also buckets that are not full."""
        raw, self._raw = self._raw, []
        if raw:
            yield Rows(
                0,
                np.asarray([time for time, _, _ in raw], np.int64),
                np.asarray([step for _, step, _ in raw], np.int64),
                self._apart(np.stack([row for *_, row in raw])),
            )
        for index, tier in enumerate(TIERS):
            buckets, self._closed[index] = self._closed[index], []
            last = self._open[index]
            if everything and last is not None:
                buckets.append(last)
                self._open[index] = None
            if buckets:
                yield self._bucket_rows(index, tier, buckets)

    def _apart(self, rows: Array) -> dict[str, Array]:
        return {name: rows[:, None, place] for name, place in self._places.items()}

    def _bucket_rows(self, tier: int, kept: Resolution, buckets: Sequence[Bucket]) -> Rows:
        values = {
            column.name: np.stack(
                [each.row(self._places[column.name], statistics(tier, column)) for each in buckets]
            )
            for column in self.columns
        }
        times = np.asarray([each.number * kept.bucket_ns for each in buckets], np.int64)
        steps = np.asarray([each.step for each in buckets], np.int64)
        return Rows(tier, times, steps, values)
