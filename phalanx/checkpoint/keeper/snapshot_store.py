"""The snapshots in a keeper's memory: of its own node's ranks, and replicas of another node's."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import numpy as np

from phalanx.checkpoint.format.direct import WRITE_BYTES, aligned, chunk_sums
from phalanx.checkpoint.format.shard import Sidecar
from phalanx.checkpoint.keeper.messages import Header, header_of
from phalanx.checkpoint.write.commit import SaveOrder
from phalanx.hardware import available_memory

THREADED_BYTES = 256 << 20  # from here on checksums are computed by half of the cores
MEMORY_SHARE = 0.9  # of the memory that is free; more would have the kernel kill somebody


class WorkerGoneError(Exception):
    """A worker ended while it filled a buffer."""


class HeldSnapshot:
    """One snapshot, being filled or whole."""

    def __init__(self, order: SaveOrder, memory: memoryview, *, replica: bool) -> None:
        self.order, self.memory, self.replica = order, memory, replica
        self.sidecar: Sidecar | None = None  # with checksums, once they are known
        self.safe = False  # at its buddy too, where there is one
        self.condemned = False  # its bytes are not what was sealed: nobody is offered them again
        self._filled = 0
        self._abandoned = False
        self._changed = threading.Condition()

    @property
    def sealed(self) -> bool:
        """Whether it is whole and can be proved."""
        return self.sidecar is not None and not self.condemned

    def fill(self, count: int) -> None:
        """So many bytes are there."""
        with self._changed:
            self._filled = count
            self._changed.notify_all()

    def abandon(self) -> None:
        """Nobody will fill it any more."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def seal(self, sums: bytes) -> Sidecar:
        """The whole is there and these are its checksums."""
        self.sidecar = msgspec.structs.replace(self.order.sidecar, sums=sums)
        return self.sidecar

    def views(self) -> Iterator[memoryview]:
        """Its bytes as pages for writing, each when it is there."""
        real = self.order.sidecar.shard_bytes
        size = aligned(real)
        for start in range(0, size, WRITE_BYTES):
            end = min(start + WRITE_BYTES, size)
            with self._changed:
                while self._filled < min(end, real) and not self._abandoned:
                    self._changed.wait()
                if self._filled < min(end, real):
                    raise WorkerGoneError("the worker ended before its snapshot was whole")
            yield self.memory[start:end]

    def header(self) -> Header:
        """What others are told about it."""
        return header_of(self.order, self.replica)


class IncomingReplica(HeldSnapshot):
    """A replica on its way here. Its sender may stand still and go on when others hold its memory:
    whoever takes that hangs up on it first.
    """

    def __init__(
        self, order: SaveOrder, memory: memoryview, hang_up: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(order, memory, replica=True)
        self._hang_up = hang_up
        self.unwanted = False
        self._over = threading.Event()  # nobody writes into its memory any more

    @property
    def on_its_way(self) -> bool:
        """Whether somebody may still write into its memory."""
        return not self._over.is_set()

    def seal(self, sums: bytes) -> Sidecar:
        """The whole has arrived and is proved."""
        sidecar = super().seal(sums)
        self._over.set()
        return sidecar

    def abandon(self) -> None:
        """The rest of it will not come."""
        super().abandon()
        self._over.set()

    def give_way(self) -> None:
        """Returns when nobody writes into its memory any more."""
        self.unwanted = True
        self._hang_up()
        self._over.wait()


class Region:
    """Shared memory of one rank, in buffers; what lies in them survives the worker."""

    def __init__(self, buffer_bytes: int, buffers: int) -> None:
        self.buffer_bytes, self.buffers = aligned(buffer_bytes), buffers
        size = self.buffer_bytes * buffers
        if problem := refuse_memory(size):
            raise MemoryError(problem)
        self.file = os.memfd_create("phalanx-snapshot", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.file, size)
            self._memory = memoryview(mmap.mmap(self.file, size))
        except (OSError, ValueError, OverflowError) as error:
            os.close(self.file)
            raise MemoryError(f"{size / 1e9:.1f} GB of shared memory: {error}") from error
        self.held: dict[int, HeldSnapshot] = {}
        self.incoming: dict[int, IncomingReplica] = {}  # the last one of each buffer
        self.writing: dict[int, int] = {}  # buffers that are being written to disk: how often

    def begin(self, buffer: int, order: SaveOrder) -> HeldSnapshot:
        """A buffer is filled anew; what was in it is gone."""
        held = self.held[buffer] = HeldSnapshot(order, self._buffer(buffer), replica=False)
        return held

    def receive(
        self, buffer: int, order: SaveOrder, hang_up: Callable[[], None]
    ) -> IncomingReplica:
        """The same for a replica that comes over the network."""
        incoming = IncomingReplica(order, self._buffer(buffer), hang_up)
        self.held[buffer] = self.incoming[buffer] = incoming
        return incoming

    def _buffer(self, buffer: int) -> memoryview:
        start = buffer * self.buffer_bytes
        return self._memory[start : start + self.buffer_bytes]

    def go_back(self, generation: int, step: int) -> None:
        """A generation comes to a step again: it restored twice, its later ones never happened."""
        for buffer, held in list(self.held.items()):
            draft = held.order.draft
            if draft.generation == generation and draft.step > step:
                del self.held[buffer]

    def in_order_of_use(self, generation: int = -1, step: int = -1) -> list[int]:
        """Buffers, those without a sealed snapshot first, the newest sealed one last.

        With the ``step`` that a ``generation`` continues from, later steps of older ones are worth
        nothing: they never happened.
        """

        def age(buffer: int) -> tuple[bool, int, int, int]:
            snapshot = self.held.get(buffer)
            if snapshot is None or not snapshot.sealed:
                return (buffer in self.writing, 0, 0, 0)
            draft = snapshot.order.draft
            dead = 0 <= step < draft.step and (generation < 0 or draft.generation < generation)
            return (buffer in self.writing, 0 if dead else 1, draft.generation, draft.step)

        return sorted(range(self.buffers), key=age)

    def fits(self, buffer_bytes: int, buffers: int) -> bool:
        return self.buffer_bytes == aligned(buffer_bytes) and self.buffers == buffers


class SnapshotStore:
    """All snapshots of a keeper."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fence = 0  # replicas of older generations are not taken
        self._own: dict[int, Region] = {}
        self._replicas: dict[int, Region] = {}

    def own(self, rank: int, buffer_bytes: int, buffers: int) -> Region:
        """The memory of a rank of this node, taken over from its last worker if it fits."""
        with self._lock:
            return self._region(self._own, rank, buffer_bytes, buffers)

    def fence(self, generation: int) -> None:
        """Replicas of older generations come too late."""
        self._fence = max(self._fence, generation)

    def takes(self, order: SaveOrder) -> bool:
        """Whether a replica may take the place of an older one."""
        return order.draft.generation >= self._fence

    def receive(
        self, order: SaveOrder, hang_up: Callable[[], None] = lambda: None
    ) -> IncomingReplica:
        """Room for a replica; the newest sealed one of the same rank stays until this is sealed.

        ``hang_up`` ends its connection. MemoryError where there is no room for it.
        """
        side, draft = order.sidecar, order.draft
        while True:
            with self._lock:
                region = self._region(self._replicas, side.rank, side.shard_bytes, 2)
                region.go_back(draft.generation, draft.step)
                buffer = region.in_order_of_use(draft.generation, draft.step)[0]
                before = region.incoming.get(buffer)
                if before is None or not before.on_its_way:
                    return region.receive(buffer, order, hang_up)
            if before.order.draft.generation > draft.generation:
                raise MemoryError("a replica of a newer generation is on its way")
            before.give_way()

    def sealed(self) -> list[HeldSnapshot]:
        """Every snapshot that may be restored."""
        return [held for held in self._all() if held.sealed]

    def condemned(self) -> list[HeldSnapshot]:
        """Snapshots that turned out not to be what was sealed."""
        return [held for held in self._all() if held.condemned]

    def condemn(self, rank: int, session: str, step: int) -> bool:
        """Prove a rank's snapshots of a step again; whether any failed, which nobody gets now."""
        bad = False
        for snapshot in self.sealed():
            draft, side = snapshot.order.draft, snapshot.sidecar
            this = (snapshot.order.sidecar.rank, draft.session, draft.step)
            if (
                this == (rank, session, step)
                and side is not None
                and sums_of(snapshot) != side.sums
            ):
                snapshot.condemned = bad = True
        return bad

    def _all(self) -> list[HeldSnapshot]:
        with self._lock:
            regions = [*self._own.values(), *self._replicas.values()]
        return [held for region in regions for held in list(region.held.values())]

    def find(self, rank: int, session: str, step: int) -> HeldSnapshot | None:
        """A certain snapshot, the own one first."""
        for snapshot in self.sealed():
            header = snapshot.order.draft
            if (snapshot.order.sidecar.rank, header.session, header.step) == (rank, session, step):
                return snapshot
        return None

    def _region(
        self, regions: dict[int, Region], rank: int, buffer_bytes: int, buffers: int
    ) -> Region:
        region = regions.get(rank)
        if region is None or not region.fits(buffer_bytes, buffers):
            regions.pop(rank, None)
            region = regions[rank] = Region(buffer_bytes, buffers)
        return region


def refuse_memory(size: int) -> str:
    """Why this much memory should not be taken, or nothing."""
    with suppress(OSError):
        if size > MEMORY_SHARE * (free := available_memory()):
            return f"snapshots take {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
    return ""


def sums_of(snapshot: HeldSnapshot) -> bytes:
    """Checksums of a snapshot that stays in memory; training may wait for those of a large one."""
    size = snapshot.order.sidecar.shard_bytes

    def sums(numbered: tuple[int, memoryview]) -> list[int]:
        number, view = numbered
        return chunk_sums(view[: size - number * WRITE_BYTES])

    views = enumerate(snapshot.views())
    if size < THREADED_BYTES:
        checksums = [sums(view) for view in views]
    else:
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2)) as pool:
            checksums = list(pool.map(sums, views))
    return np.fromiter(itertools.chain(*checksums), "<u4").tobytes()
