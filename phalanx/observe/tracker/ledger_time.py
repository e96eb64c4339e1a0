"""The ledger over time: differences of its sums, in integers that add up to the whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

Sums = dict[str, int]


def slices(
    rows: Sequence[tuple[int, Sums]], from_ns: int, to_ns: int, bins: int
) -> list[tuple[int, int, Sums]]:
    """What was added in each of ``bins`` stretches; together, all that was added.

    ``rows``: sums at times. Time that was not explained yet may move between buckets when it is:
    then the later word counts for the earlier stretch, so that nothing is ever taken back.
    """
    if not rows or to_ns <= from_ns:
        return []
    times = [time for time, _ in rows]
    edges = [from_ns + (to_ns - from_ns) * index // bins for index in range(bins + 1)]
    names = list(dict.fromkeys(name for _, sums in rows for name in sums))
    # What happened before the first row is in the first stretch if that begins before it.
    at = [bisect_right(times, edge) - 1 for edge in edges]
    sums = [rows[index][1] if index >= 0 else {} for index in at]
    levels = {name: [each.get(name, 0) for each in sums] for name in names}
    for level in levels.values():
        for index in range(bins - 1, -1, -1):
            level[index] = min(level[index], level[index + 1])
    return [
        (
            edges[index],
            edges[index + 1],
            {
                name: level[index + 1] - level[index]
                for name, level in levels.items()
                if level[index + 1] != level[index]
            },
        )
        for index in range(bins)
    ]
