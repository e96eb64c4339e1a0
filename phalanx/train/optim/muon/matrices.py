"""The logical matrices of parameters, and which part of them the block of a rank has.

Every parameter is seen as a stack of matrices: one, or as many as there are experts. Several
logical matrices may be stored as one, each with some rows of every period (queries, keys and
values of a head; gate and up).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.train.optim.muon.newton_schulz import flops

Bounds = tuple[int, int]


class MatrixBlock(NamedTuple):
    """A box of a stack of matrices."""

    stack: Bounds
    rows: Bounds
    columns: Bounds

    @property
    def shape(self) -> tuple[int, int, int]:
        stack, rows, columns = (past - first for first, past in self)
        return stack, rows, columns

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        stack, rows, columns = (slice(*bounds) for bounds in self)
        return stack, rows, columns


class MatrixLayout:
    """Which block of a parameter each rank of a group has; ranks count by their place in it."""

    def __init__(self, parameter: Tensor, ranks: Sequence[int]) -> None:
        *leading, rows, columns = parameter.shape
        self._leading = list(leading) or [1]
        self._sizes: tuple[int, ...]
        self._dims: tuple[int | None, ...]  # that each axis of the mesh cuts; None: it has copies
        self._places: list[tuple[int, ...]]  # of each rank in the mesh
        self.shape = (math.prod(leading), rows, columns)
        if not isinstance(parameter, DTensor):  # whole everywhere
            self._sizes, self._dims = (len(ranks),), (None,)
            self._places = [(place,) for place in range(len(ranks))]
            return
        mesh = parameter.device_mesh
        self._sizes = tuple(mesh.shape)
        self._dims = tuple(_matrix_dim(each, parameter.ndim) for each in parameter.placements)
        indices = product(*(range(size) for size in mesh.shape))
        by_rank = dict(zip(mesh.mesh.flatten().tolist(), indices, strict=True))
        self._places = [by_rank[rank] for rank in ranks]

    @cached_property
    def blocks(self) -> list[MatrixBlock]:
        """By rank."""
        return [self._block(place) for place in self._places]

    def _block(self, place: tuple[int, ...]) -> MatrixBlock:
        """Inner axes of the mesh cut first."""
        bounds = [(0, self._leading[0]), (0, self.shape[1]), (0, self.shape[2])]
        for axis in reversed(range(len(self._sizes))):
            if (dim := self._dims[axis]) is not None:
                bounds[dim] = _chunk(bounds[dim], self._sizes[axis], place[axis])
        each = math.prod(self._leading[1:])
        first, past = bounds[0]
        return MatrixBlock((first * each, past * each), bounds[1], bounds[2])

    def copy(self, rank: int) -> tuple[int, ...]:
        """Which of the whole copies of the parameter a rank's block is part of."""
        return tuple(
            index for index, dim in zip(self._places[rank], self._dims, strict=True) if dim is None
        )


class MatrixStack(NamedTuple):
    """Logical matrices of one shape that are orthogonalised by one rank."""

    weight: int  # number of the parameter
    stack: Bounds  # of it
    part: Bounds  # rows of each period
    period: int
    rows: int  # of a matrix
    columns: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.stack[1] - self.stack[0], self.rows, self.columns

    @property
    def whole(self) -> MatrixBlock:
        """All of it, counted within it."""
        return MatrixBlock((0, self.shape[0]), (0, self.rows), (0, self.columns))

    @property
    def flops(self) -> int:
        return self.shape[0] * flops(self.rows, self.columns)

    def overlap(self, block: MatrixBlock) -> MatrixBlock | None:
        """What a block of the parameter has of it, counted within it."""
        first, past = self.stack
        stack = (max(first, block.stack[0]) - first, min(past, block.stack[1]) - first)
        rows = (self._rows_before(block.rows[0]), self._rows_before(block.rows[1]))
        found = MatrixBlock(stack, rows, block.columns)
        return found if all(first < past for first, past in found) else None

    def _rows_before(self, row: int) -> int:
        periods, rest = divmod(row, self.period)
        first, past = self.part
        return periods * (past - first) + min(max(rest - first, 0), past - first)

    def rows_in(self, bounds: Bounds) -> slice | Tensor:
        """Rows of a block that are its own, counted within the block."""
        rows = torch.arange(*bounds)
        inside = (rows % self.period >= self.part[0]) & (rows % self.period < self.part[1])
        found = inside.nonzero().flatten()
        first, past = int(found[0]), int(found[-1]) + 1
        return slice(first, past) if past - first == len(found) else found


class BlockPiece:
    """What this rank's block of a parameter has of some logical matrices."""

    def __init__(
        self, matrices: MatrixStack, block: MatrixBlock, box: MatrixBlock, device: torch.device
    ):
        self.box = box  # within the matrices
        self.is_block = box.shape == block.shape  # there is nothing else in the block
        first = matrices.stack[0] - block.stack[0]
        self._stack = slice(box.stack[0] + first, box.stack[1] + first)
        rows = matrices.rows_in(block.rows)
        self._rows = rows if isinstance(rows, slice) else rows.to(device)

    def take(self, block: Tensor) -> Tensor:
        """Of a block [stack, rows, columns]; a view where that is possible."""
        matrices = block[self._stack]
        if isinstance(self._rows, slice):
            return matrices[:, self._rows]
        return matrices.index_select(1, self._rows)

    def put(self, block: Tensor, value: Tensor) -> None:
        """Into a block."""
        matrices = block[self._stack]
        if isinstance(self._rows, slice):
            matrices[:, self._rows] = value
        else:
            matrices.index_copy_(1, self._rows, value)


def logical_matrices(
    weight: int, layout: MatrixLayout, fused: tuple[int, ...], ranks: int
) -> list[MatrixStack]:
    """All of a parameter, as stacks that ranks have whole, or that may be shared out."""
    stack, rows, columns = layout.shape
    stacks = sorted({block.stack for block in layout.blocks})
    if stacks == [(0, stack)]:
        stacks = [_chunk((0, stack), ranks, rank) for rank in range(ranks)]
    period = sum(fused) or rows
    found, first = [], 0
    for part in fused or (rows,):
        here, each = (first, first + part), rows // period * part
        bounds = [one for one in stacks if one[0] < one[1]]
        found += [MatrixStack(weight, one, here, period, each, columns) for one in bounds]
        first += part
    return found


def _chunk(bounds: Bounds, count: int, index: int) -> Bounds:
    """One of ``count`` parts, as `torch.chunk` has them: the last ones may be shorter, or empty."""
    first, past = bounds
    each = -(-(past - first) // count)
    return min(past, first + each * index), min(past, first + each * (index + 1))


def _matrix_dim(placement: object, ndim: int) -> int | None:
    """Which dim of stack, rows and columns an axis cuts; None: it has copies."""
    dim = getattr(placement, "dim", None)
    if dim is None:
        return None
    if dim >= ndim - 2:
        return int(dim) - ndim + 3
    assert dim == 0, "an axis cuts a dim between the first and the matrices"
    return 0
