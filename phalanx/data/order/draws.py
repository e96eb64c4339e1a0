"""The order of a whole run: which sample of which source each sample number means."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data.order.curriculum import Numbers, curriculum
from phalanx.data.order.cursor import Cursor
from phalanx.data.order.shuffle import BlockedShuffle, GlobalShuffle, Shuffle

VERSION = 2  # of the order: another one gives other samples for the same seed


class SourceSize(Protocol):
    """What the order needs to know of a source."""

    @property
    def samples(self) -> int:
        """Number of samples in one epoch."""

    @property
    def fingerprint(self) -> str:
        """Identity of the content."""


class SampleDraws:
    """Sample numbers 0, 1, 2, … of a run as (source, sample of it): O(1) time and memory."""

    def __init__(self, data: Data, split: str, sources: Mapping[str, SourceSize]) -> None:
        self.names = tuple(sources)
        self._data, self._split = data, split
        self._sources = tuple(sources.values())
        self._curriculum = curriculum(data)
        self._fingerprints: dict[int, str] = {}
        self._shuffles: list[Shuffle] = [
            _shuffle(data, f"{split}/{name}", source.samples) for name, source in sources.items()
        ]

    def locate(self, numbers: NDArray[np.int64]) -> tuple[Numbers, Numbers]:
        """Number of the source, and sample of it, that each sample number means."""
        which, ordinals = self._curriculum.locate(numbers)
        if len(self.names) == 1:
            return which, self._shuffles[0].indices(ordinals)
        indices = np.empty_like(ordinals)
        for source in np.unique(which).tolist():
            chosen = which == source
            indices[chosen] = self._shuffles[source].indices(ordinals[chosen])
        return which, indices

    def seen(self, cursor: Cursor) -> dict[str, int]:
        """Samples of each source that a run at ``cursor`` has read; skipped ones left out.

        Skipped samples that the cursor only counts are taken from the sources in proportion.
        """
        counts = self._curriculum.counts(cursor.consumed)
        skips = cursor.skips
        if skips.forgotten:
            counts -= _apportioned(skips.forgotten, self._curriculum.counts(skips.floor))
        for first, past in skips.ranges:
            past = min(past, cursor.consumed)
            if first < past:
                counts -= self._curriculum.counts(past) - self._curriculum.counts(first)
        return dict(zip(self.names, counts.tolist(), strict=True))

    def limit(self, epochs: int) -> int:
        """Samples of the run until some source would begin epoch number ``epochs``."""
        most = np.array([source.samples * epochs for source in self._sources])

        def fits(samples: int) -> bool:
            return bool((self._curriculum.counts(samples) <= most).all())

        low, high = 0, 1
        while fits(high):
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def fingerprint(self, consumed: int) -> str:
        """Identity of all that decides what the first ``consumed`` samples were.

        Stages that have not begun, and sources that none has drawn from, are left out: they
        may still be changed.
        """
        stages = len(self._curriculum.firsts)
        begun = 1 if stages == 1 else self._curriculum.stage_of(max(0, consumed - 1)) + 1
        if begun not in self._fingerprints:
            self._fingerprints[begun] = self._fingerprint(begun)
        return self._fingerprints[begun]

    def _fingerprint(self, stages: int) -> str:
        data, plan = self._data, self._curriculum
        quotas = [blend.quotas for blend in plan.blends[:stages]]
        used = [at for at in range(len(self.names)) if any(quota[at] for quota in quotas)]
        corpus = [(self.names[at], self._sources[at].fingerprint) for at in used]
        blend = [
            (first, [quota[at] for at in used])
            for first, quota in zip(plan.firsts, quotas, strict=False)
        ]
        blocks = f":{data.block_tokens}:{data.window_blocks}" if data.shuffle == "blocked" else ""
        return (
            f"order={VERSION} split={self._split} corpus={_digest(corpus)} blend={_digest(blend)} "
            f"seed={data.seed} sequence={data.sequence} shuffle={data.shuffle}{blocks}"
        )


def _apportioned(total: int, counts: Numbers) -> Numbers:
    """``total`` cut into whole parts that stand to each other as ``counts`` do."""
    edges = [int(count) * total // int(counts.sum()) for count in np.cumsum(counts)]
    parts: Numbers = np.diff([0, *edges])
    return parts


def _shuffle(data: Data, source: str, samples: int) -> GlobalShuffle | BlockedShuffle:
    if data.shuffle == "global":
        return GlobalShuffle(data.seed, source, samples)
    block = max(1, data.block_tokens // data.sequence)
    return BlockedShuffle(data.seed, source, samples, block, data.window_blocks)


def _digest(content: object) -> str:
    return hashlib.blake2b(msgspec.json.encode(content), digest_size=5).hexdigest()
