"""Overlap is computed from intervals: each time counted once, waiting never counted."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from phalanx.train.measure.intervals import Interval, intersect, merge, subtract, total

interval = st.tuples(st.integers(0, 30), st.integers(0, 30))
spans = st.lists(interval, max_size=8)


def cells(intervals: list[Interval]) -> set[int]:
    """The same time as unit cells: slow, and obviously right."""
    return {cell for start, end in intervals for cell in range(int(start), int(end))}


@given(spans)
def test_merged_intervals_cover_the_same_time_without_touching(given_spans: list[Interval]) -> None:
    merged = merge(given_spans)
    assert cells(merged) == cells(given_spans)
    assert all(a[1] < b[0] for a, b in itertools.pairwise(merged))


@given(spans, spans)
def test_intersection_and_difference_agree_with_cells(a: list[Interval], b: list[Interval]) -> None:
    assert cells(intersect(a, b)) == cells(a) & cells(b)
    assert cells(subtract(a, b)) == cells(a) - cells(b)
    assert total(intersect(a, b)) + total(subtract(a, b)) == total(a)


def test_time_covered_twice_counts_once() -> None:
    assert total([(0, 4), (2, 6), (5, 6)]) == 6
