"""From tensors to the bytes of this rank's shard file, in memory or streamed through a bucket."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from phalanx.checkpoint.describe import Description, local_part
from phalanx.checkpoint.direct import WRITE_BYTES, aligned_buffer
from phalanx.checkpoint.geometry import Geometry, Group, Piece
from phalanx.checkpoint.shard import build_header


class Snapshot:
    """The layout of this rank's shard, computed once; the same for every save of a run."""

    def __init__(self, description: Description, group: Group) -> None:
        self.pieces = Geometry(description.table, group).written_by(description.stand)
        self.header = build_header(self.pieces, {"table": description.digest})
        self.bytes = len(self.header) + sum(piece.bytes for piece in self.pieces)

    def copy_into(self, buffer: Tensor, tensors: dict[str, Tensor]) -> None:
        """Fill ``buffer`` (bytes) with the file's content; on CUDA only the copies are started."""
        start = len(self.header)
        buffer[:start] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for piece in self.pieces:
            source = _part(piece, tensors)
            room = buffer[start : start + piece.bytes].view(source.dtype)
            room.view(source.shape).copy_(source, non_blocking=True)
            start += piece.bytes

    def stream(self, tensors: dict[str, Tensor]) -> Iterator[memoryview]:
        """The file's content through one bucket of WRITE_BYTES, which is used again and again."""
        memory = aligned_buffer(WRITE_BYTES)
        bucket = torch.frombuffer(memory, dtype=torch.uint8)
        used = 0
        for content in self._contents(tensors):
            done = 0
            while done < content.numel():
                count = min(content.numel() - done, WRITE_BYTES - used)
                bucket[used : used + count].copy_(content[done : done + count])
                done, used = done + count, used + count
                if used == WRITE_BYTES:
                    yield memory
                    used = 0
        if used:
            yield memory

    def _contents(self, tensors: dict[str, Tensor]) -> Iterator[Tensor]:
        yield torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        for piece in self.pieces:
            yield _part(piece, tensors).contiguous().view(-1).view(torch.uint8)


def _part(piece: Piece, tensors: dict[str, Tensor]) -> Tensor:
    return local_part(tensors[piece.name])[piece.local.slices]
