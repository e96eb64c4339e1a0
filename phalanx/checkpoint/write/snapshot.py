"""From tensors to the bytes of this rank's shard file, in memory or streamed through a bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.checkpoint.format.describe import DTYPES, Description, local_part
from phalanx.checkpoint.format.direct import WRITE_BYTES, WRITERS, aligned_buffer
from phalanx.checkpoint.format.geometry import Geometry, RankGroup, TensorPiece
from phalanx.checkpoint.format.shard import build_header

TOLD_BYTES = 16 << 20  # copied between two words to the keeper, which writes what is there


class ShardSnapshot:
    """The layout of this rank's shard, computed once; the same for every save of a run."""

    def __init__(self, description: Description, group: RankGroup) -> None:
        self.pieces = Geometry(description.table, group).written_by(description.stand)
        self.header = build_header(self.pieces, {"table": description.digest})
        self.bytes = len(self.header) + sum(piece.bytes for piece in self.pieces)
        self._turns = list(self._take_turns())
        self._seen: list[tuple[Tensor, int]] = []
        self._parts: list[Tensor] = []

    def buffers(self, buffer: Tensor) -> list[Tensor]:
        """Where in ``buffer`` (bytes) each piece goes; its header is written right away."""
        start = len(self.header)
        buffer[:start] = torch.frombuffer(bytearray(self.header), dtype=torch.uint8)
        views = []
        for piece in self.pieces:
            view = buffer[start : start + piece.bytes]
            views.append(view.view(DTYPES[piece.dtype]).view(piece.box.sizes))
            start += piece.bytes
        return views

    def copy_into(
        self, buffers: list[Tensor], tensors: dict[str, Tensor], filled: Callable[[int], None]
    ) -> None:
        """Fill the rooms of a buffer; on CUDA only the copies are started.

        ``filled`` is told now and then how many bytes have been filled, or begun to be.
        """
        parts = self._parts_of(tensors)
        for first, past, bytes_before in self._turns:
            if first:  # the end is told by the seal
                filled(bytes_before)
            torch._foreach_copy_(buffers[first:past], parts[first:past], non_blocking=True)

    def _take_turns(self) -> Iterator[tuple[int, int, int]]:
        """Runs of pieces of at least TOLD_BYTES together, and how much lies before each."""
        first, start = 0, len(self.header)
        size = 0
        for number, piece in enumerate(self.pieces, 1):
            size += piece.bytes
            if size >= TOLD_BYTES or number == len(self.pieces):
                yield first, number, start
                first, start, size = number, start + size, 0

    def _parts_of(self, tensors: dict[str, Tensor]) -> list[Tensor]:
        """What is copied from; found once, and again where a tensor has other memory."""
        held = [tensors[piece.name] for piece in self.pieces]
        seen = [(tensor, _address(tensor)) for tensor in held]
        if len(seen) != len(self._seen) or any(
            tensor is not before or address != then
            for (tensor, address), (before, then) in zip(seen, self._seen, strict=True)
        ):
            self._parts = [_part(piece, tensors) for piece in self.pieces]
            self._seen = seen
        return self._parts

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


def _part(piece: TensorPiece, tensors: dict[str, Tensor]) -> Tensor:
    return local_part(tensors[piece.name])[piece.local.slices]


def _address(tensor: Tensor) -> int:
    block = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return block.data_ptr()
