"""Where the blocks of a distributed tensor lie: pure arithmetic over mesh and placements."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec

WHOLE = -1  # an axis that cuts no dim: its ranks hold copies


class TensorBlock(NamedTuple):
    """A box inside a tensor."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def meets(self, other: TensorBlock) -> TensorBlock | None:
        """The box that two boxes share."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(map(min, self._ends(), other._ends()))
        sizes = tuple(b - a for a, b in zip(low, high, strict=True))
        return TensorBlock(low, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: TensorBlock) -> TensorBlock:
        """This box as seen from the corner of one that contains it."""
        shifted = tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return TensorBlock(shifted, self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What selects this box from the whole."""
        return tuple(map(slice, self.offset, self._ends()))

    def rows(self, first: int, last: int) -> TensorBlock:
        """The part between two indices of ``row_dim``; a box of no dims is one row."""
        if not self.sizes:
            return self
        dim = row_dim(self.sizes)
        offset, sizes = list(self.offset), list(self.sizes)
        offset[dim] += first
        sizes[dim] = last - first
        return TensorBlock(tuple(offset), tuple(sizes))

    def _ends(self) -> Iterator[int]:
        return (a + n for a, n in zip(self.offset, self.sizes, strict=True))


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """How a mesh cuts a tensor."""

    sizes: tuple[int, ...]  # of the mesh's axes
    cuts: tuple[int, ...]  # the dim that each axis cuts, or WHOLE
    order: tuple[int, ...]  # the axes that cut, first to last
    ranks: tuple[tuple[int, int, int], ...]  # of the mesh, flat, less its first: runs

    @property
    def copies(self) -> int:
        """How many ranks of one mesh hold the same block."""
        whole = (n for n, cut in zip(self.sizes, self.cuts, strict=True) if cut == WHOLE)
        return math.prod(whole)

    def block(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> TensorBlock:
        """What the rank at a coordinate of the mesh holds."""
        offset, sizes = [0] * len(shape), list(shape)
        for axis in self.order:
            dim = self.cuts[axis]
            low, high = _piece(sizes[dim], self.sizes[axis], coordinate[axis])
            offset[dim] += low
            sizes[dim] = high - low
        return TensorBlock(tuple(offset), tuple(sizes))

    def blocks_meeting(
        self, shape: tuple[int, ...], wanted: TensorBlock
    ) -> Iterator[tuple[tuple[int, ...], TensorBlock]]:
        """The distinct blocks that share elements with ``wanted``, each at its first coordinate."""
        choices = []
        for dim, size in enumerate(shape):
            axes = tuple(axis for axis in self.order if self.cuts[axis] == dim)
            spans = _spans(size, tuple(self.sizes[axis] for axis in axes))
            low, high = wanted.offset[dim], wanted.offset[dim] + wanted.sizes[dim]
            first = bisect_right(spans.ends, low)
            last = bisect_left(spans.starts, high)
            choices.append([(axes, spans.coordinates[i]) for i in range(first, last)])
        for picked in itertools.product(*choices):
            coordinate = [0] * len(self.sizes)
            for axes, indices in picked:
                for axis, index in zip(axes, indices, strict=True):
                    coordinate[axis] = index
            at = tuple(coordinate)
            yield at, self.block(shape, at)

    def copy_index(self, coordinate: tuple[int, ...]) -> int:
        """Which of the mesh's copies of its block a coordinate is."""
        index = 0
        for at, size, cut in zip(coordinate, self.sizes, self.cuts, strict=True):
            index = index * size + at if cut == WHOLE else index
        return index

    def with_copy(self, coordinate: tuple[int, ...], index: int) -> tuple[int, ...]:
        """The coordinate that holds copy ``index`` of the block at ``coordinate``."""
        moved = list(coordinate)
        for axis in reversed(range(len(self.sizes))):
            if self.cuts[axis] == WHOLE:
                index, moved[axis] = divmod(index, self.sizes[axis])
        return tuple(moved)

    def flat(self, coordinate: tuple[int, ...]) -> int:
        """Position of a coordinate in the mesh's flat list of ranks."""
        index = 0
        for at, size in zip(coordinate, self.sizes, strict=True):
            index = index * size + at
        return index


def row_dim(sizes: tuple[int, ...]) -> int:
    """The outermost dim with more than one index: parts along it are contiguous in memory."""
    return next((dim for dim, size in enumerate(sizes) if size > 1), 0)


def cutting_order(
    sizes: tuple[int, ...], cuts: tuple[int, ...], after: tuple[int, ...]
) -> list[int]:
    """The order in which axes cut: left to right, but strided ones after others of their dim.

    ``after[axis]`` is the product of the sizes of the axes to its right that cut before it
    (1: none), which is what torch keeps for an FSDP shard of a tensor-parallel one.
    """
    order: list[int] = []
    for axis in reversed(range(len(sizes))):
        if cuts[axis] == WHOLE:
            continue
        insertion, product = 0, 1
        for i, other in enumerate(order):
            if product == after[axis]:
                break
            if cuts[other] == cuts[axis]:
                product *= sizes[other]
                insertion = i + 1
        if product != after[axis]:
            raise ValueError(f"axis {axis} is strided by {after[axis]}, which no axes make up")
        order.insert(insertion, axis)
    return order


class _Spans(NamedTuple):
    starts: list[int]
    ends: list[int]
    coordinates: list[tuple[int, ...]]


@lru_cache(maxsize=4096)
def _spans(size: int, axis_sizes: tuple[int, ...]) -> _Spans:
    """The non-empty intervals that successive cuts make of a dim, in order."""
    spans: list[tuple[int, int, tuple[int, ...]]] = [(0, size, ())]
    for axis_size in axis_sizes:
        spans = [
            (start + low, start + high, (*at, index))
            for start, end, at in spans
            for index in range(axis_size)
            for low, high in (_piece(end - start, axis_size, index),)
        ]
    kept = [span for span in spans if span[1] > span[0]]
    return _Spans([a for a, _, _ in kept], [b for _, b, _ in kept], [at for _, _, at in kept])


def _piece(size: int, count: int, index: int) -> tuple[int, int]:
    """Interval ``index`` of a dim cut into ``count``, the last ones shorter, as torch cuts."""
    step = -(-size // count)
    return min(index * step, size), min((index + 1) * step, size)
