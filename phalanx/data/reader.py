"""Reads samples of a run by their numbers: any rank, any range, whatever was read before."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data.corpus.source import (
    SampleSource,
    Split,
    held_out_part,
    open_sources,
    without_idle_sources,
)
from phalanx.data.errors import DataError
from phalanx.data.order.draws import SampleDraws

log = logging.getLogger(__name__)

PAGE_SAMPLES = 4096  # located at once: numpy's overhead is shared by so many


class SampleReader:
    """Fills rows with the samples that sample numbers mean; holds only what it can recompute."""

    def __init__(
        self,
        data: Data,
        vocab: int,
        split: Split = "train",
        source: SampleSource | None = None,
    ) -> None:
        self.sources: Mapping[str, SampleSource] = (
            open_sources(data, vocab, split)
            if source is None
            else {"corpus": held_out_part(source, data, split)}
        )
        self.draws = SampleDraws(without_idle_sources(data), split, self.sources)
        self.sequence = data.sequence
        self._weightless = data.on_damage == "weightless"
        self._sources = tuple(self.sources.values())
        self._vocab = min(source.vocab for source in self._sources)
        self._masked = any(source.silent([]) is not None for source in self._sources)
        self._pages: dict[int, tuple[list[int], list[int]]] = {}
        self._pages_ahead = _pages_ahead(data)
        self._announced = 0  # pages before this one have been announced to their sources

    @property
    def samples(self) -> int:
        """Samples in one epoch of all sources together."""
        return sum(source.samples for source in self._sources)

    def batch(
        self, first_sample: int, count: int, dp_rank: int = 0, dp_size: int = 1
    ) -> NDArray[np.int64]:
        """Windows [share, sequence + 1] of one rank's share of samples [first, first + count).

        Shares are contiguous, in the order of ranks, and differ by one sample at most.
        """
        begin, end = dp_rank * count // dp_size, (dp_rank + 1) * count // dp_size
        windows = np.empty((end - begin, self.sequence + 1), np.int64)
        self.read(range(first_sample + begin, first_sample + end), windows)
        return windows

    def read(self, numbers: range | NDArray[np.int64], out: NDArray[np.int64]) -> list[int]:
        """Fill ``out`` [samples, sequence + 1]; returns the rows whose samples are damaged.

        These stay zero, and are only returned where ``data.on_damage`` lets them carry no weight.
        """
        which, indices = self.locate(numbers)
        try:
            if len(self._sources) == 1:
                self._sources[0].read(indices, out)
            else:
                for number, source in enumerate(self._sources):
                    rows = [row for row, found in enumerate(which) if found == number]
                    source.read([indices[row] for row in rows], [out[row] for row in rows])
            if len(out) == 0 or int(out.max()) < self._vocab:
                return []
        except DataError:
            if not self._weightless:
                raise
        # Rare: find out which samples are damaged, one by one.
        return [
            row
            for row, (source, index) in enumerate(zip(which, indices, strict=True))
            if not self._read_carefully(source, index, int(numbers[row]), out[row])
        ]

    def silent(self, numbers: range | NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Labels [samples, sequence] that their corpora give no weight; None where none does."""
        if not self._masked:
            return None
        which, indices = self.locate(numbers)
        mask = np.zeros((len(which), self.sequence), np.bool_)
        for number, source in enumerate(self._sources):
            rows = [row for row, at in enumerate(which) if at == number]
            silent = source.silent([indices[row] for row in rows])
            if silent is not None:
                mask[rows] = silent
        return mask

    def locate(self, numbers: range | NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Number of the source, and sample of it, that each sample number means."""
        if self._pages_ahead and len(numbers):
            self._announce(int(numbers[0]) // PAGE_SAMPLES)
        if not isinstance(numbers, range):
            located = self.draws.locate(numbers) if len(numbers) else (numbers, numbers)
            return located[0].tolist(), located[1].tolist()
        page, begin = divmod(numbers.start, PAGE_SAMPLES)
        which, indices = self._page(page)
        window = which[begin : begin + len(numbers)], indices[begin : begin + len(numbers)]
        if len(window[0]) < len(numbers):  # it goes on in the next page
            rest = self.locate(numbers[len(window[0]) :])
            window = window[0] + rest[0], window[1] + rest[1]
        return window

    def _page(self, page: int) -> tuple[list[int], list[int]]:
        if page not in self._pages:
            numbers = np.arange(page * PAGE_SAMPLES, (page + 1) * PAGE_SAMPLES)
            which, indices = self.draws.locate(numbers)
            if len(self._pages) >= self._pages_ahead + 4:
                del self._pages[next(iter(self._pages))]
            self._pages[page] = which.tolist(), indices.tolist()
        return self._pages[page]

    def _announce(self, page: int) -> None:
        """Tell the sources what will be read until a window from here."""
        past = page + self._pages_ahead
        if not page < self._announced <= past:
            self._announced = page  # the run begins, or went elsewhere
        while self._announced < past:
            which, indices = (np.array(part) for part in self._page(self._announced))
            for number, source in enumerate(self._sources):
                source.expect(indices[which == number])
            self._announced += 1

    def _read_carefully(self, which: int, index: int, number: int, row: NDArray[np.int64]) -> bool:
        source = self._sources[which]
        try:
            source.read([index], [row])
            self._refuse_foreign_tokens(source, index, row)
        except DataError as error:
            if not self._weightless:
                raise
            log.warning(
                "sample %d (%d of %s) is damaged and carries no weight: %s",
                number,
                index,
                self.draws.names[which],
                error,
            )
            row[:] = 0
            return False
        return True

    def _refuse_foreign_tokens(
        self, source: SampleSource, index: int, row: NDArray[np.int64]
    ) -> None:
        most = int(row.max())
        if most < source.vocab:
            return
        place = source.place(index)
        where = f"{place.file} near block {place.block}" if place else "generated"
        raise DataError(
            "data.path",
            where,
            f"sample {index} holds token {most}, outside the vocabulary of {source.vocab}",
            "the file is damaged: find out with `phalanx data verify`",
        )


def _pages_ahead(data: Data) -> int:
    """Pages that sources hear of early: none, or a window and what is left of the current one."""
    if not any("://" in path for path in (data.path, *(s.path for s in data.blend.values()))):
        return 0
    return 1 + -(-data.block_tokens * data.window_blocks // (data.sequence * PAGE_SAMPLES))
