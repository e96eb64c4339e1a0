"""Files of tokens on a local or parallel file system, mapped into memory on first use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.corpus.manifest import ACCESS_FIX, REDO_FIX
from phalanx.data.errors import DataError


class MappedFiles:
    """Files of one type, each of a known number of tokens; a file is checked when first used."""

    def __init__(
        self,
        path: Callable[[int], Path],
        tokens: Sequence[int],
        stored_type: np.dtype[Any],
    ) -> None:
        self._path = path  # a path object for each of 60,000 files would take as long as the rest
        self.stored_type = stored_type
        self._tokens = tokens
        self._maps: dict[int, NDArray[Any]] = {}

    def read(self, number: int, first: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with the tokens of file ``number`` from its token ``first`` on."""
        content = self._maps.get(number)
        if content is None:
            content = self.content(number)
        out[:] = content[first : first + len(out)]

    def content(self, number: int) -> NDArray[Any]:
        """All tokens of a file."""
        if number not in self._maps:
            self.check_size(number)
            # The bare array: a memmap's slices cost several times as much.
            mapped = np.memmap(self._path(number), dtype=self.stored_type, mode="r")
            self._maps[number] = np.asarray(mapped)
        return self._maps[number]

    def check_size(self, number: int) -> None:
        """Refuse a file that is missing, unreadable or of another size than the corpus says."""
        path, expected = self._path(number), self._tokens[number] * self.stored_type.itemsize
        try:
            actual = path.stat().st_size
        except FileNotFoundError:
            rule = "is part of the corpus but missing"
            raise DataError("data.path", path, rule, REDO_FIX) from None
        if actual != expected:
            what = "truncated" if actual < expected else "too long"
            if actual in (expected // 2, expected * 2):  # the size of uint16 for uint32, or reverse
                what = f"no file of {self.stored_type.name} tokens: wrong dtype, or {what}"
            rule = f"is {what}: {actual} bytes, where the corpus says {expected}"
            raise DataError("data.path", path, rule, REDO_FIX)
        if not os.access(path, os.R_OK):
            raise DataError("data.path", path, "may not be read by this user", ACCESS_FIX)


def map_bytes(path: Path) -> NDArray[np.uint8]:
    """The bytes of a small file, mapped; an empty file is an empty array."""
    try:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except FileNotFoundError:
        rule = "is part of the corpus but missing"
        raise DataError("data.path", path, rule, REDO_FIX) from None
