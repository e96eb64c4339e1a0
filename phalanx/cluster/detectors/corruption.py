"""Wrong numbers that nothing reported: replicas compare fingerprints, a vote names the culprit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct


class Verdict(Struct, frozen=True):
    """What fingerprints say: ``wrong`` ranks, or (without a majority) ranks that disagree."""

    wrong: tuple[int, ...]
    undecided: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        """All replicas agree."""
        return not self.wrong and not self.undecided


def vote(shards: Mapping[int, Sequence[tuple[int, int]]]) -> Verdict:
    """Compares replicas of each shard; ``shards``: by shard, (rank, fingerprint) of each replica.

    A strict majority is right. Without one (two replicas that differ), a replay decides.
    """
    wrong: list[int] = []
    undecided: list[int] = []
    for shard in sorted(shards):
        copies = shards[shard]
        counts: dict[int, int] = {}
        for _, fingerprint in copies:
            counts[fingerprint] = counts.get(fingerprint, 0) + 1
        if len(counts) < 2:
            continue
        usual = max(sorted(counts), key=lambda fingerprint: counts[fingerprint])
        minority = [rank for rank, fingerprint in copies if fingerprint != usual]
        if 2 * counts[usual] > len(copies):
            wrong.extend(minority)
        else:
            undecided.extend(rank for rank, _ in copies)
    return Verdict(tuple(dict.fromkeys(wrong)), tuple(dict.fromkeys(undecided)))


def replayed(original: Mapping[int, int], elsewhere: Mapping[int, Sequence[int]]) -> Verdict:
    """Judges ranks by a micro-batch that others computed again.

    ``original``: fingerprint by rank; ``elsewhere``: by rank, fingerprints of its micro-batch from
    other nodes. A rank is wrong when the others agree with each other and not with it.
    """
    wrong: list[int] = []
    undecided: list[int] = []
    for rank in sorted(original):
        others = elsewhere.get(rank, ())
        if not others:
            continue
        if any(other != others[0] for other in others):
            undecided.append(rank)
        elif others[0] != original[rank]:
            # One node's word against another's decides nothing.
            (wrong if len(others) > 1 else undecided).append(rank)
    return Verdict(tuple(wrong), tuple(undecided))
