"""Candidates that are similar enough, measured by their sketches, which are read where they lie."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.prepare.dedup.buckets import Pairs
from phalanx.data.prepare.dedup.minhash import Sketch, similarity

_OPEN_FILES = 128


class SketchFiles:
    """Sketches of all documents by number; ``folders`` hold those of consecutive documents."""

    def __init__(
        self, folders: Sequence[Path], documents: Sequence[int], names: tuple[str, str]
    ) -> None:
        self._folders = folders
        self._sketches, self._ends = names
        self._starts = [0, *accumulate(documents)]
        self._open: OrderedDict[int, tuple[NDArray[Any], NDArray[Any]]] = OrderedDict()

    def __getitem__(self, number: int) -> Sketch:
        file = bisect_right(self._starts, number) - 1
        sketches, ends = self._opened(file)
        at = number - self._starts[file]
        return np.asarray(sketches[int(ends[at - 1]) if at else 0 : int(ends[at])])

    def _opened(self, file: int) -> tuple[NDArray[Any], NDArray[Any]]:
        if file in self._open:
            self._open.move_to_end(file)
            return self._open[file]
        folder = self._folders[file]
        mapped = (
            np.memmap(folder / self._sketches, "<u4", "r"),
            np.load(folder / self._ends, mmap_mode="r", allow_pickle=False),
        )
        self._open[file] = mapped
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)
        return mapped


def similar_pairs(pairs: Pairs, sketches: SketchFiles, jaccard: float) -> Pairs:
    """Those of the pairs, sorted by their first, whose similarity is at least ``jaccard``."""
    wanted = np.zeros(pairs.shape[1], bool)
    last, one = -1, np.empty(0, np.uint32)
    for at, (first, second) in enumerate(pairs.T.tolist()):
        if first != last:
            last, one = first, sketches[first]
        wanted[at] = similarity(one, sketches[second]) >= jaccard
    return pairs[:, wanted]
