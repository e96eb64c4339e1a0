"""Arithmetic on spans of time, for questions such as "how much of this ran beside that"."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]  # start and end, in one unit; empty where end <= start


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals in order; what touches is joined."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The time that lies in both."""
    left, right = merge(a), merge(b)
    common: list[Interval] = []
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if end > start:
            common.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The time of ``a`` that is not in ``b``."""
    holes = merge(b)
    left: list[Interval] = []
    first = 0  # holes before this one end before anything that is still to come
    for start, end in merge(a):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        hole = first
        while hole < len(holes) and holes[hole][0] < end:
            left.append((start, holes[hole][0]))
            start = holes[hole][1]
            hole += 1
        left.append((start, end))
    return merge(left)


def total(intervals: Iterable[Interval]) -> float:
    """Time covered, counted once where intervals lie over each other."""
    return sum(end - start for start, end in merge(intervals))
