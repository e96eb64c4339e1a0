"""Who holds up a gang that makes no steps: whoever is behind in the collectives."""

from __future__ import annotations

from collections.abc import Sequence

MOST_CULPRITS_PPM = 100_000  # of the ranks: when more are behind, nobody in particular is


def behind(collectives: Sequence[int], most_ppm: int = MOST_CULPRITS_PPM) -> list[int]:
    """Ranks that have entered fewer collectives than the others; -1: did not answer at all.

    ``collectives``: by rank, how many it has entered. Ranks that wait for a culprit have entered
    one more than it has.
    """
    if not collectives:
        return []
    least, most = min(collectives), max(collectives)
    if least == most:
        return []
    late = [rank for rank, count in enumerate(collectives) if count == least]
    few = max(1, len(collectives) * most_ppm // 1_000_000)
    return late if len(late) <= few else []
