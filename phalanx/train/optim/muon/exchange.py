"""Blocks of matrices on their way to the ranks that orthogonalise them, and the results back.

What a bucket of matrices sends goes packed: one all-to-all to the owners, and one back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.train.optim.muon.matrices import BlockPiece, MatrixBlock, MatrixLayout
from phalanx.train.optim.muon.partition import MatrixShare

Entry = TypeVar("Entry")


class Received(NamedTuple):
    """What this rank's block gets of a parameter's orthogonalised matrices."""

    share: MatrixShare
    piece: BlockPiece
    value: Tensor


class _Packet(NamedTuple):
    """An all-to-all that runs."""

    work: dist.Work | None
    sent: Tensor  # kept until it has arrived
    arrived: Tensor

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.arrived


class BlockExchange:
    """Of one bucket of shares, as one rank sees it."""

    def __init__(
        self,
        shares: Sequence[MatrixShare],
        layouts: Sequence[MatrixLayout],
        rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        ranks = group.size() if group is not None else 1
        self._group, self._rank = group, rank
        self._own = [share for share in shares if share.owner == rank]
        # By rank: pieces of this rank's blocks that it owns, and boxes of own matrices.
        self._owned: list[list[tuple[MatrixShare, BlockPiece]]] = [[] for _ in range(ranks)]
        self._sent: list[list[tuple[MatrixShare, BlockPiece]]] = [[] for _ in range(ranks)]
        self._held: list[list[tuple[int, MatrixBlock]]] = [[] for _ in range(ranks)]
        self._sources: list[list[tuple[int, MatrixBlock]]] = [[] for _ in range(ranks)]
        for share in shares:
            layout = layouts[share.matrices.weight]
            block = layout.blocks[rank]
            if (box := share.matrices.overlap(block)) is not None:
                piece = BlockPiece(share.matrices, block, box, device)
                self._owned[share.owner].append((share, piece))
                if layout.copy(rank) == layout.copy(share.owner):
                    self._sent[share.owner].append((share, piece))
        for number, share in enumerate(self._own):
            self._add_boxes(number, share, layouts[share.matrices.weight], ranks)
        self._gathers = any(share.gathered for share in shares)
        self._returns = any(share.returned for share in shares)

    def _add_boxes(self, number: int, share: MatrixShare, layout: MatrixLayout, ranks: int) -> None:
        """Where own matrices come from, and where they go."""
        for other in range(ranks):
            if (box := share.matrices.overlap(layout.blocks[other])) is not None:
                self._held[other].append((number, box))
                if layout.copy(other) == layout.copy(self._rank):
                    self._sources[other].append((number, box))

    def gather(self, blocks: Mapping[int, Tensor]) -> _Packet | None:
        """Send pieces of blocks [stack, rows, columns], by number of the parameter."""
        if not self._gathers:
            return None
        pieces = [
            [piece.take(blocks[share.matrices.weight]) for share, piece in each]
            for each in self._elsewhere(self._sent)
        ]
        sizes = [sum(box.numel for _, box in each) for each in self._elsewhere(self._sources)]
        return self._send(pieces, sizes, next(iter(blocks.values())))

    def gathered(self, packet: _Packet | None, blocks: Mapping[int, Tensor]) -> list[Tensor]:
        """Own matrices, whole; waits for what others send."""
        if packet is None:  # each is part of the own block
            return [
                piece.take(blocks[share.matrices.weight]) for share, piece in self._sent[self._rank]
            ]
        arrived = packet.wait()
        stacks = [arrived.new_empty(share.matrices.shape) for share in self._own]
        for number, box, value in _cut(arrived, self._others(self._sources)):
            stacks[number][box.slices] = value
        mine = zip(self._sources[self._rank], self._sent[self._rank], strict=True)
        for (number, box), (share, piece) in mine:
            stacks[number][box.slices] = piece.take(blocks[share.matrices.weight])
        return stacks

    def give_back(self, stacks: Sequence[Tensor], like: Tensor) -> _Packet | None:
        """Send own matrices to whoever has a part of them."""
        if not self._returns:
            return None
        held, owned = self._elsewhere(self._held), self._elsewhere(self._owned)
        pieces = [[stacks[number][box.slices] for number, box in each] for each in held]
        sizes = [sum(piece.box.numel for _, piece in each) for each in owned]
        return self._send(pieces, sizes, like)

    def returned(self, packet: _Packet | None, stacks: Sequence[Tensor]) -> list[Received]:
        """All that concerns the own blocks; waits for what others send."""
        mine = zip(self._owned[self._rank], self._held[self._rank], strict=True)
        found = [
            Received(share, piece, stacks[number][box.slices])
            for (share, piece), (number, box) in mine
        ]
        if packet is not None:
            owned = self._others(self._owned)
            boxes = [(at, piece.box) for at, (_, piece) in enumerate(owned)]
            values = _cut(packet.wait(), boxes)
            found += [Received(*owned[at], value) for at, _, value in values]
        return found

    def _elsewhere(self, by_rank: list[list[Entry]]) -> list[list[Entry]]:
        """What concerns other ranks; what a rank has for itself stays where it is."""
        return [[] if rank == self._rank else some for rank, some in enumerate(by_rank)]

    def _others(self, by_rank: list[list[Entry]]) -> list[Entry]:
        return [each for some in self._elsewhere(by_rank) for each in some]

    def _send(self, pieces: list[list[Tensor]], sizes: list[int], like: Tensor) -> _Packet:
        """One all-to-all."""
        flat = [piece.reshape(-1) for some in pieces for piece in some]
        sent = torch.cat(flat) if flat else like.new_empty(0)
        arrived = like.new_empty(sum(sizes))
        lengths = [sum(piece.numel() for piece in some) for some in pieces]
        work = dist.all_to_all_single(
            arrived, sent, sizes, lengths, group=self._group, async_op=True
        )
        return _Packet(work, sent, arrived)


def _cut(
    arrived: Tensor, boxes: Iterable[tuple[int, MatrixBlock]]
) -> Iterator[tuple[int, MatrixBlock, Tensor]]:
    """What arrived, box by box."""
    first = 0
    for number, box in boxes:
        yield number, box, arrived[first : first + box.numel].view(box.shape)
        first += box.numel
