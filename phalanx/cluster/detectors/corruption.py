"""Wrong numbers that nothing reported: replicas compare fingerprints, a vote names the culprit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct


class FingerprintVerdict(Struct, frozen=True):
    """What fingerprints say: ``wrong`` ranks, or (without a majority) ranks that disagree."""

    wrong: tuple[int, ...]
    undecided: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        """All replicas agree."""
        return not self.wrong and not self.undecided


def vote(shards: Mapping[int, Sequence[tuple[int, int]]]) -> FingerprintVerdict:
    """Compares replicas of each shard; ``shards``: by shard, (rank, fingerprint) of each replica.

    A strict majority is right. Without one (two replicas that differ) the step is made again, by
    others if need be: see ``told_wrong``.
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
    return FingerprintVerdict(tuple(dict.fromkeys(wrong)), tuple(dict.fromkeys(undecided)))


def told_wrong(claims: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Who was wrong, by all that was said of one step in every attempt at it.

    ``claims``: (node, fingerprint), oldest first. More different nodes came to the right one than
    to any other; without such a majority, a node that contradicts itself was wrong at least once.
    Either way one node must have said the same every time: where none has, the step itself is not
    deterministic and nothing can be told. (): word stands against word.
    """
    reports: dict[int, list[int]] = {}
    for node, fingerprint in claims:
        reports.setdefault(node, []).append(fingerprint)
    steady = {
        n: fingerprints[0]
        for n, fingerprints in reports.items()
        if len(fingerprints) > 1 and len(set(fingerprints)) == 1
    }
    backers: dict[int, int] = {}  # of a fingerprint: how many nodes came to it
    for fingerprints in reports.values():
        for fingerprint in dict.fromkeys(fingerprints):
            backers[fingerprint] = backers.get(fingerprint, 0) + 1
    most = max(backers.values(), default=0)
    usual = [fingerprint for fingerprint, count in backers.items() if count == most]
    if not steady:
        return ()
    if most > 1 and len(usual) == 1:
        right = usual[0]
        known = right in steady.values()
        if not known:
            return ()
        return tuple(node for node, said in reports.items() if set(said) != {right})
    return tuple(node for node, fingerprints in reports.items() if len(set(fingerprints)) > 1)
