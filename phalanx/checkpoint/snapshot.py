"""From tensors to the bytes of this rank's shard file, in memory or streamed through a bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from phalanx.checkpoint.describe import Description, local_part
from phalanx.checkpoint.direct import WRITE_BYTES, WRITERS, aligned_buffer
from phalanx.checkpoint.geometry import Geometry, Group, Piece
from phalanx.checkpoint.shard import build_header

TOLD_BYTES = 16 << 20  # copied between two words to the keeper, which writes what is there


class Snapshot:
    """The layout of this rank's shard, computed once; the same for every save of a run."""

    def __init__(self, description: Description, group: Group) -> None:
        self.pieces = Geometry(description.table, group).written_by(description.stand)
        self.header = build_header(self.pieces, {"table": description.digest})
        self.bytes = len(self.header) + sum(piece.bytes for piece in self.pieces)

    def copy_into(
        self, buffer: Tensor, tensors: dict[str, Tensor], filled: Callable[[int], None]
    ) -> None:
        """Fill ``buffer`` (bytes) with the file's content; on CUDA only the copies are started.

        ``filled`` is told now and then how many bytes have been filled, or begun to be.
        """
        start = told = len(self.header)
        buffer[:start] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for piece in self.pieces:
            source = _part(piece, tensors)
            room = buffer[start : start + piece.bytes].view(source.dtype)
            room.view(source.shape).copy_(source, non_blocking=True)
            start += piece.bytes
            if start - told >= TOLD_BYTES and start < self.bytes:  # the end is told by the seal
                filled(start)
                told = start

    def stream(self, tensors: dict[str, Tensor]) -> Iterator[memoryview]:
        """The file's content through a few buckets of WRITE_BYTES, used again and again."""
        memories = itertools.cycle([aligned_buffer(WRITE_BYTES) for _ in range(WRITERS + 1)])
        memory = next(memories)
        used = 0
        for content in self._contents(tensors):
            done = 0
            while done < content.numel():
                count = min(content.numel() - done, WRITE_BYTES - used)
                bucket = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=used)
                bucket.copy_(content[done : done + count])
                done, used = done + count, used + count
                if used == WRITE_BYTES:
                    yield memory
                    memory, used = next(memories), 0
        if used:
            yield memory

    def _contents(self, tensors: dict[str, Tensor]) -> Iterator[Tensor]:
        yield torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for piece in self.pieces:
            yield _part(piece, tensors).contiguous().view(-1).view(torch.uint8)


def _part(piece: Piece, tensors: dict[str, Tensor]) -> Tensor:
    return local_part(tensors[piece.name])[piece.local.slices]
