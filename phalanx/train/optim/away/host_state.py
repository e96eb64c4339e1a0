"""Optimizer state in pinned host memory, which passes through the device for its update.

Stretches of it arrive on one stream, are updated on the one that computes and leave on a third:
the link is used in both directions at once, and the host only gives orders.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.config import ConfigError
from phalanx.hardware import available_memory

STRETCH = 32 << 20  # elements that travel together
BUFFERS = 3  # on the device: one arrives, one is updated, one leaves
ALIGNMENT = 64  # bytes
SPARE_BYTES = 4 << 30  # of host memory that nobody may pin


class PassingState(NamedTuple):
    """A stretch of state on the device; what is done to it until the next is asked for stays."""

    group: int
    first: int
    past: int
    copies: list[Tensor]


class HostState:
    """One block of pinned memory, handed out once, and the way of its contents to the device."""

    def __init__(self, size: int, device: torch.device, available: int) -> None:
        if size > available - SPARE_BYTES:
            needs = f"needs {size / 1e9:.1f} GB of host memory"
            rule = f"{needs}, and {max(0, available - SPARE_BYTES) / 1e9:.1f} GB can be pinned here"
            fix = 'set optimizer.state = "int8" or "bfloat16", or use more ranks on more nodes'
            raise ConfigError("memory.offload", "optimizer", rule, fix)
        self._block = _pinned(size)
        self._taken = 0
        self._arriving, self._leaving = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._buffers = [StagingBuffer(device) for _ in range(BUFFERS)]
        self._next = 0

    @staticmethod
    def rounded(size: int) -> int:
        """Bytes that are set aside for so many."""
        return rounded(size)

    def take_in(self, tensor: Tensor) -> Tensor:
        """A copy of a tensor that lives here."""
        size = tensor.numel() * tensor.element_size()
        home = self._block[self._taken : self._taken + size].view(tensor.dtype).view(tensor.shape)
        self._taken += rounded(size)
        return home.copy_(tensor)

    def begin(self) -> None:
        """A step's updates begin: what the last one wrote must have arrived first."""
        self._arriving.wait_stream(self._leaving)
        self._arriving.wait_stream(torch.cuda.current_stream())

    def passing(
        self, groups: Sequence[tuple[Tensor, ...]], *, whole: bool = False
    ) -> Iterator[PassingState]:
        """Stretches of groups of tensors; ``whole``: each group at once.

        Shorter tensors of a group have one element for several of its first.
        """
        for number, homes in enumerate(groups):
            stretch = homes[0].numel() if whole else STRETCH
            for first, past, copies in self._passing(homes, stretch):
                yield PassingState(number, first, past, copies)

    def _passing(
        self, homes: tuple[Tensor, ...], stretch: int
    ) -> Iterator[tuple[int, int, list[Tensor]]]:
        flat = [home.view(-1) for home in homes]
        size = flat[0].numel()
        each = [size // max(home.numel(), 1) for home in flat]
        current = torch.cuda.current_stream()
        for first in range(0, size, max(stretch, 1)):
            past = min(first + stretch, size)
            buffer = self._buffers[self._next]
            self._next = (self._next + 1) % BUFFERS
            parts = [home[first // n : past // n] for home, n in zip(flat, each, strict=True)]
            with torch.cuda.stream(self._arriving):
                self._arriving.wait_event(buffer.free)
                copies = buffer.like(parts)
                for copy, part in zip(copies, parts, strict=True):
                    copy.copy_(part, non_blocking=True)
            self._arriving.record_event().wait(current)  # not wait_stream: no peer is waited for
            yield first, past, copies
            self._leaving.wait_stream(current)
            with torch.cuda.stream(self._leaving):
                for copy, part in zip(copies, parts, strict=True):
                    part.copy_(copy, non_blocking=True)
                buffer.free.record(self._leaving)

    def settle(self) -> None:
        """Returns when the host has what was last written."""
        self._leaving.synchronize()


class StagingBuffer:
    """Memory on the device for one stretch, made when the first passes."""

    def __init__(self, device: torch.device) -> None:
        self.free = torch.cuda.Event()
        self._device = device
        self._memory: Tensor | None = None

    def like(self, parts: list[Tensor], stretch: int = STRETCH) -> list[Tensor]:
        """Tensors of the same kinds and sizes, of this memory; none has more elements later."""
        sizes = [part.numel() * part.element_size() for part in parts]
        need = sum(rounded(size) for size in sizes)
        if self._memory is None or self._memory.numel() < need:
            most = need * stretch // parts[0].numel()  # later ones may be longer
            self._memory = torch.empty(max(need, most), dtype=torch.uint8, device=self._device)
        found, start = [], 0
        for part, size in zip(parts, sizes, strict=True):
            found.append(self._memory[start : start + size].view(part.dtype))
            start += rounded(size)
        return found


def host_share() -> int:
    """Bytes of this machine's memory for each of the ranks that may share it."""
    ranks = min(dist.get_world_size(), torch.cuda.device_count()) if dist.is_initialized() else 1
    return available_memory() // ranks


def rounded(size: int) -> int:
    """Bytes that are set aside for so many."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pinned(size: int) -> Tensor:
    """Zeros that the device reads and writes by itself.

    Registered by us: torch's own allocator would round the size up to a power of two.
    """
    block = torch.zeros(max(size, ALIGNMENT), dtype=torch.uint8)  # by all threads: pages exist
    driver, address = torch.cuda.cudart(), block.data_ptr()
    torch.cuda.check_error(driver.cudaHostRegister(address, block.numel(), 0))
    weakref.finalize(block, driver.cudaHostUnregister, address)
    return block
