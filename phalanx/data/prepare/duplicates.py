"""The phases of deduplication: copies, candidates of each band, verified pairs, groups."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.prepare.dedup.buckets import PAIRS_NAME, Pairs, choose_partitions
from phalanx.data.prepare.dedup.clusters import copies
from phalanx.data.prepare.dedup.minhash import choose_banding
from phalanx.data.prepare.recipe import VERSION, DeduplicateSettings, digest
from phalanx.data.prepare.work import (
    REMOVED_FOLDER,
    REMOVED_NAME,
    FindBuckets,
    GroupLayout,
    VerifyPairs,
    WorkFolder,
    WorkUnit,
)

MOST_SORTED = 1 << 24  # keys that a unit sorts at once, some 600 MB
VERIFIED_TOGETHER = 1 << 19  # documents whose candidates are one unit

RunUnits = Callable[[str, list[WorkUnit]], None]  # name of the phase, its units


class Removed:
    """Which documents are duplicates, as numbers over all files."""

    def __init__(self, folder: Path, key: str) -> None:
        self.key = key
        self._folder = folder

    @property
    def exact(self) -> int:
        """How many have the content of an earlier one."""
        return int(np.load(self._folder / "exact.npy", allow_pickle=False).shape[1])

    @property
    def near(self) -> int:
        """How many are only similar to one."""
        return int(np.load(self._folder / "near.npy", allow_pickle=False).shape[1])

    def first(self, name: str, count: int) -> list[tuple[int, int]]:
        """Some (number, number of the one that stays): name is exact or near."""
        stored = np.load(self._folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        return [(int(number), int(stays)) for number, stays in stored[:, :count].T]

    @property
    def numbers(self) -> NDArray[np.int64]:
        """All of them, sorted."""
        numbers: NDArray[np.int64] = np.load(
            self._folder / REMOVED_NAME, mmap_mode="r", allow_pickle=False
        )[0]
        return numbers


def find_duplicates(
    work: WorkFolder,
    layout: tuple[GroupLayout, ...],
    settings: DeduplicateSettings | None,
    run: RunUnits,
) -> Removed:
    """Every document that another, earlier one makes superfluous."""
    key = digest((VERSION, layout, settings))
    folder = work.result(REMOVED_FOLDER, key)
    if not folder.is_dir():
        exact, near = np.empty((2, 0), np.int64), np.empty((2, 0), np.int64)
        documents = sum(file.documents for file in layout)
        exact_units: list[WorkUnit] = []
        if settings is not None and settings.exact and documents:
            exact_units = _exact(layout, documents)
            run("exact", exact_units)
            exact = _gathered(work, exact_units)[::-1]
        if settings is not None and settings.near and documents:
            buckets = _bands(layout, documents, settings, [unit.key for unit in exact_units])
            run("candidates", buckets)
            pairs = _verifying(documents, settings, [unit.key for unit in buckets])
            run("verify", pairs)
            near = copies(_gathered(work, pairs))
        with work.commit(folder) as out:
            np.save(out / "exact.npy", _sorted(exact))
            np.save(out / "near.npy", _sorted(near))
            np.save(out / REMOVED_NAME, _sorted(np.concatenate((exact, near), axis=1)))
    return Removed(folder, key)


def _sorted(pairs: Pairs) -> Pairs:
    return pairs[:, np.argsort(pairs[0], kind="stable")]


def _gathered(work: WorkFolder, units: list[WorkUnit]) -> Pairs:
    return np.concatenate(
        [np.load(work.of(unit) / PAIRS_NAME, allow_pickle=False) for unit in units], axis=1
    )


def _exact(layout: tuple[GroupLayout, ...], documents: int) -> list[WorkUnit]:
    partitions = choose_partitions(documents, MOST_SORTED)
    return [
        FindBuckets(digest((VERSION, layout, -1, at, partitions)), -1, at, partitions)
        for at in range(partitions)
    ]


def _bands(
    layout: tuple[GroupLayout, ...],
    documents: int,
    settings: DeduplicateSettings,
    without: list[str],
) -> list[WorkUnit]:
    partitions = choose_partitions(documents, MOST_SORTED)
    bands = choose_banding(settings.jaccard, settings.recall).bands
    return [
        FindBuckets(
            digest((VERSION, layout, band, at, partitions, without)),
            band,
            at,
            partitions,
            tuple(without),
        )
        for band in range(bands)
        for at in range(partitions)
    ]


def _verifying(documents: int, settings: DeduplicateSettings, buckets: list[str]) -> list[WorkUnit]:
    return [
        VerifyPairs(
            digest((VERSION, first, settings.jaccard, buckets)),
            first,
            first + VERIFIED_TOGETHER,
            tuple(buckets),
            settings.jaccard,
        )
        for first in range(0, documents, VERIFIED_TOGETHER)
    ]
