"""Optimizer state in a file on the node's NVMe, which passes through the device for its update.

Stretches of it are read ahead into buffers of host memory, cross to the device, are updated, and
go the same way back while the next ones come.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.train.optim.away.host_state import PassingState, StagingBuffer
from phalanx.train.optim.away.state_file import PAGE, StateFile, paged

STRETCH = 8 << 20  # elements that travel together; each part of as many is whole pages
BUFFERS = 6  # of host memory: some are read, one is updated, some are written
ON_DEVICE = 3


class NvmeState:
    """One file, handed out once, and the way of its contents to the device."""

    def __init__(self, size: int, device: torch.device, folder: Path) -> None:
        self.file = StateFile(folder, size)
        self._block = torch.frombuffer(self.file.map, dtype=torch.uint8)
        self._taken = 0
        self._buffers: list[_HostBuffer] = []
        self._link = _DeviceStreams(device) if device.type == "cuda" else None
        self._mapped = True  # somebody may have written through the mapping

    @staticmethod
    def rounded(size: int) -> int:
        """Bytes that are set aside for so many."""
        return paged(size)

    def take_in(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor that lives here."""
        size = tensor.numel() * tensor.element_size()
        home = self._block[self._taken : self._taken + size].view(tensor.dtype).view(tensor.shape)
        self._taken += paged(size)
        return home.copy_(tensor) if bool(tensor.any()) else home  # the file begins with zeros

    def begin(self) -> None:
        """A step's updates begin: what the last one wrote must have arrived first."""
        self._finish()
        if self._mapped:
            self.file.flush()
            self._mapped = False

    def passing(self, groups: Sequence[tuple[Tensor, ...]]) -> Iterator[PassingState]:
        """Stretches of groups of tensors, once a step.

        Shorter tensors of a group have one element for several of its first.
        """
        stretches = [each for number, homes in enumerate(groups) for each in _cut(number, homes)]
        self._make_buffers(stretches)
        coming: deque[_HostBuffer] = deque()
        ahead = iter(stretches)
        try:
            for stretch in stretches:
                while len(coming) < len(self._buffers) // 2 + 1:
                    if (following := next(ahead, None)) is None:
                        break
                    coming.append(self._read(following))
                buffer = coming.popleft()
                parts = buffer.read()
                copies = parts if self._link is None else self._link.bring(parts)
                yield PassingState(stretch.group, stretch.first, stretch.past, copies)
                buffer.write(None if self._link is None else self._link.take_back(copies, parts))
        except BaseException:  # the step is given up: nothing may move behind whoever cleans up
            for buffer in self._buffers:
                buffer.wait()
            raise

    def settle(self) -> None:
        """The file has what was last written, and may be used through its mapping."""
        self._finish()
        self._mapped = True

    def _finish(self) -> None:
        for buffer in self._buffers:
            buffer.finish()

    def _read(self, stretch: _Stretch) -> _HostBuffer:
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)  # the least recently used is next
        buffer.begin_read(stretch)
        return buffer

    def _make_buffers(self, stretches: list[_Stretch]) -> None:
        need = max((sum(paged(part.bytes) for part in each.parts) for each in stretches), default=0)
        if self._buffers and self._buffers[0].size >= need:
            return
        count = min(BUFFERS, max(2, len(stretches)))
        pinned = self._link is not None
        self._buffers = [_HostBuffer(self.file, need, pinned) for _ in range(count)]


class _Part(NamedTuple):
    """Of one tensor of a stretch."""

    offset: int  # in the file
    bytes: int
    dtype: torch.dtype


class _Stretch(NamedTuple):
    group: int
    first: int
    past: int
    parts: list[_Part]


def _cut(number: int, homes: tuple[Tensor, ...]) -> Iterator[_Stretch]:
    """A group's stretches, in order."""
    size = homes[0].numel()
    for first in range(0, size, STRETCH):
        past = min(first + STRETCH, size)
        parts = []
        for home in homes:
            each = size // max(home.numel(), 1)
            width = home.element_size()
            offset = int(home.storage_offset()) * width + first // each * width
            assert offset % PAGE == 0
            parts.append(_Part(offset, -(-(past - first) // each) * width, home.dtype))
        yield _Stretch(number, first, past, parts)


@dataclass
class _HostBuffer:
    """Pages of host memory for one stretch, and what moves between them and the file."""

    file: StateFile
    size: int
    pinned: bool
    moving: list[Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        memory = mmap.mmap(-1, max(self.size, PAGE))
        self._memory = memoryview(memory)
        self._tensor = torch.frombuffer(memory, dtype=torch.uint8)
        if self.pinned:
            driver, address = torch.cuda.cudart(), self._tensor.data_ptr()
            torch.cuda.check_error(driver.cudaHostRegister(address, len(memory), 0))
            weakref.finalize(self._tensor, driver.cudaHostUnregister, address)
        self._stretch: _Stretch | None = None

    def begin_read(self, stretch: _Stretch) -> None:
        """What was in here before must be in the file."""
        self.finish()
        self._stretch = stretch
        self.moving = [
            self.file.read(self._pages(*each), each[1].offset) for each in self._places()
        ]

    def read(self) -> list[Tensor]:
        """The parts, once they are here."""
        self.finish()
        return [
            self._tensor[start : start + part.bytes].view(part.dtype)
            for start, part in self._places()
        ]

    def write(self, after: torch.cuda.Event | None) -> None:
        """Have the parts go back, ``after`` they came from the device."""
        self.moving = [
            self.file.write(self._pages(*each), each[1].offset, after) for each in self._places()
        ]

    def wait(self) -> list[BaseException]:
        """Nothing moves any more; returns what went wrong."""
        moving, self.moving = self.moving, []
        return [error for each in moving if (error := each.exception()) is not None]

    def finish(self) -> None:
        """The same; raises what went wrong."""
        for failure in self.wait():
            raise failure

    def _places(self) -> Iterator[tuple[int, _Part]]:
        assert self._stretch is not None
        start = 0
        for part in self._stretch.parts:
            yield start, part
            start += paged(part.bytes)

    def _pages(self, start: int, part: _Part) -> memoryview:
        return self._memory[start : start + paged(part.bytes)]


class _DeviceStreams:
    """Between host memory and the device: one stream to it, one from it."""

    def __init__(self, device: torch.device) -> None:
        self._arriving, self._leaving = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._staging = deque(StagingBuffer(device) for _ in range(ON_DEVICE))
        self._in_use = self._staging[0]

    def bring(self, parts: list[Tensor]) -> list[Tensor]:
        """Copies on the device; the current stream waits for them."""
        staging = self._in_use = self._staging[0]
        self._staging.rotate(-1)
        copies = staging.like(parts, STRETCH)
        with torch.cuda.stream(self._arriving):
            staging.free.wait()
            for copy, part in zip(copies, parts, strict=True):
                copy.copy_(part, non_blocking=True)
        # Not wait_stream: no peer is waited for.
        self._arriving.record_event().wait(torch.cuda.current_stream())
        return copies

    def take_back(self, copies: list[Tensor], parts: list[Tensor]) -> torch.cuda.Event:
        """The same in the other direction; the event says when."""
        self._leaving.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._leaving):
            for copy, part in zip(copies, parts, strict=True):
                part.copy_(copy, non_blocking=True)
            self._in_use.free.record(self._leaving)
        arrived = torch.cuda.Event(blocking=True)
        arrived.record(self._leaving)
        return arrived
