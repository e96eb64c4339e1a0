"""Which rank orthogonalises which logical matrices: even work, and all ranks agree unasked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from phalanx.train.optim.muon.matrices import (
    MatrixBlock,
    MatrixLayout,
    MatrixStack,
    logical_matrices,
)

BUCKET_ELEMENTS = 32 << 20  # of a rank that travel together at most, where it is more than a matrix


class MatrixShare(NamedTuple):
    """Some matrices and the rank that orthogonalises them."""

    matrices: MatrixStack
    owner: int
    gathered: bool  # the owner has only a part of them
    returned: bool  # others have a part of them, too


class OwnedMatrix(Struct, frozen=True, kw_only=True):
    """A line of the record: logical matrices of a parameter, and the rank they are given to."""

    parameter: str
    rows: tuple[int, int]  # of each period of the parameter
    matrices: tuple[int, int]  # of its stack
    shape: tuple[int, int]
    rank: int


class PartitionRecord(Struct, frozen=True, kw_only=True):
    """The whole partition of a pipeline stage's matrices."""

    ranks: tuple[int, ...]  # of the job, in the order in which ``matrices`` count them
    work: tuple[float, ...]  # share of each in the work
    matrices: tuple[OwnedMatrix, ...]

    @property
    def summary(self) -> str:
        """In a line."""
        count = sum(past - first for first, past in (each.matrices for each in self.matrices))
        work = ", ".join(f"{share:.0%}" for share in self.work[:8])
        more = f" and {len(self.work) - 8} more" if len(self.work) > 8 else ""
        return f"Muon orthogonalises {count} matrices; work of each rank: {work}{more}"


def share_out(
    layouts: Sequence[MatrixLayout],
    fused: Sequence[tuple[int, ...]],
    trained: Sequence[int],
    ranks: int,
) -> list[MatrixShare]:
    """All matrices of the parameters ``trained``, the most work first; equal shapes are neighbours.

    Matrices that some ranks have whole go to one of them, the others to whoever has least to do.
    """
    stacks = [
        matrices
        for number in trained
        for matrices in logical_matrices(number, layouts[number], fused[number], ranks)
    ]
    stacks.sort(key=lambda one: (-one.flops, one.rows, one.columns, one))
    boxes = _boxes(stacks, layouts)
    holders = [
        [rank for rank, box in enumerate(spread) if box == one.whole]
        for one, spread in zip(stacks, boxes, strict=True)
    ]
    work, owners = [0] * ranks, [0] * len(stacks)
    # Those with a choice come last, and even out what the others left.
    for at in sorted(range(len(stacks)), key=lambda at: len(holders[at]) in (0, ranks)):
        owner = min(holders[at] or range(ranks), key=work.__getitem__)
        owners[at] = owner
        work[owner] += stacks[at].flops
    shares = [_share(*each) for each in zip(stacks, owners, boxes, strict=True)]
    return sorted(shares, key=lambda share: (share.gathered, share.returned), reverse=True)


def buckets(shares: Sequence[MatrixShare], ranks: int) -> Iterator[list[MatrixShare]]:
    """Runs of shares that travel alike."""
    bucket: list[MatrixShare] = []
    size = 0
    for share in shares:
        elements = share.matrices.whole.numel
        alike = not bucket or bucket[0][2:] == share[2:]
        # Fewer matrices than ranks would leave some without work while others compute.
        full = len(bucket) >= ranks and size + elements > BUCKET_ELEMENTS * ranks
        if bucket and (full or not alike):
            yield bucket
            bucket, size = [], 0
        bucket.append(share)
        size += elements
    if bucket:
        yield bucket


def record(
    shares: Sequence[MatrixShare], names: Sequence[str], ranks: Sequence[int]
) -> PartitionRecord:
    """For people."""
    work = [0] * len(ranks)
    for share in shares:
        work[share.owner] += share.matrices.flops
    whole = max(1, sum(work))
    return PartitionRecord(
        ranks=tuple(ranks),
        work=tuple(each / whole for each in work),
        matrices=tuple(
            OwnedMatrix(
                parameter=names[share.matrices.weight],
                rows=share.matrices.part,
                matrices=share.matrices.stack,
                shape=(share.matrices.rows, share.matrices.columns),
                rank=share.owner,
            )
            for share in shares
        ),
    )


def _boxes(
    stacks: Sequence[MatrixStack], layouts: Sequence[MatrixLayout]
) -> list[list[MatrixBlock | None]]:
    """What each rank has of them; the same is found once."""
    known: dict[tuple[MatrixLayout, MatrixStack], list[MatrixBlock | None]] = {}
    found = []
    for one in stacks:
        layout = layouts[one.weight]
        key = (layout, one._replace(weight=0))
        if key not in known:
            known[key] = [one.overlap(block) for block in layout.blocks]
        found.append(known[key])
    return found


def _share(matrices: MatrixStack, owner: int, boxes: Sequence[MatrixBlock | None]) -> MatrixShare:
    others = any(box is not None for rank, box in enumerate(boxes) if rank != owner)
    return MatrixShare(matrices, owner, gathered=boxes[owner] != matrices.whole, returned=others)
