"""The worker's side of the keeper: shared memory, hand-over, and what became of each save."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from phalanx.checkpoint.format.direct import aligned
from phalanx.checkpoint.keeper.messages import (
    Acknowledged,
    Archived,
    Bye,
    Committed,
    Durable,
    Failed,
    Filled,
    FlushBuffer,
    FromKeeper,
    Hello,
    MemoryGranted,
    Pair,
    Refused,
    Replicated,
    SaveOutcome,
    Superseded,
    Trouble,
)
from phalanx.checkpoint.keeper.wire import KeeperStream, send
from phalanx.checkpoint.write.commit import SaveOrder
from phalanx.checkpoint.write.deadline import SnapshotDeadline

POPULATE_WRITE = 23  # madvise: have the kernel make the pages now, not at the first save
POPULATE_BYTES = 256 << 20  # by one thread at a time
POPULATE_THREADS = 8


class NoKeeperError(Exception):
    """The keeper has no memory for this worker."""


class KeeperClient:
    """A worker's connection to its keeper."""

    def __init__(
        self,
        address: str,
        rank: int,
        buffer_bytes: int,
        buffers: int,
        cuda: bool,
        lock: int = -1,
        step: int = -1,
    ) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(address)
        self._stream = KeeperStream(self._connection)
        send(
            self._connection,
            Hello(rank, buffer_bytes, buffers, step),
            *([lock] if lock >= 0 else []),
        )
        answer, files = self._stream.welcome()
        if not isinstance(answer, MemoryGranted) or not files:
            self._connection.close()
            if isinstance(answer, Refused):
                raise NoKeeperError(answer.problem)
            raise ConnectionError("the keeper ended")
        size = buffers * aligned(buffer_bytes)
        self._map = mmap.mmap(files[0], size)
        os.close(files[0])
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._buffers = list(whole.split(aligned(buffer_bytes)))
        _make_resident(whole)
        # CUDA remembers the addresses of pinned memory: what is mapped there next would be taken
        # for it.
        self._unpin = weakref.finalize(self, _unpin, _pin(whole) if cuda else 0)
        self._unpin.atexit = False
        self.port = answer.port
        self.token = b"" if answer.shared else answer.token  # as the other ranks are told
        # First in, first out: with two buffers the newest sealed snapshot is never the one filled.
        self._free = answer.buffers
        self._newest: list[int] = []  # buffers of the two last prompt snapshots
        self._unacknowledged: dict[int, float] = {}  # their steps, and when they were handed over
        self._deadline = SnapshotDeadline(buffer_bytes)
        self._left_out = False  # the newest step has no snapshot: its keeper did not answer
        self._outcomes: list[SaveOutcome] = []
        self._handed: dict[int, str] = {}  # steps to be written without an outcome, and where
        self.archiving: list[int] = []  # steps that are copied to the second tier
        self.unarchived: dict[int, str] = {}  # steps whose copy was given up, and why
        self.troubles: list[str] = []  # to be told; no checkpoint is lost by them
        self.flush_seconds = 0.0  # of the last snapshot that was given back
        self.replicated_step = -1  # the newest that another node holds too

    @property
    def waiting(self) -> bool:
        """Whether something handed over is neither complete nor failed."""
        return bool(self._handed)

    def pair(self, host: str, port: int, token: bytes, *, spare: bool = False) -> None:
        """Have the keeper send a replica of every snapshot to another one."""
        send(self._connection, Pair(host, port, token, spare))

    def buffer(self) -> tuple[int, Tensor]:
        """Memory for a snapshot; waits where all of it is still being written."""
        while not self._free:
            self._take(self._stream.read(None))
        return self._free[0], self._buffers[self._free[0]]

    def prompt_buffer(self, *, for_disk: bool, patient: bool) -> tuple[int, Tensor] | None:
        """Memory for a snapshot that does not cost either of the two newest.

        Other ranks may be one step behind or have lost their newest, so both may be needed. None
        where everything else is still being written to disk (unless this one is ``for_disk``
        too), or (unless ``patient``) where the last snapshot is late.
        """
        while True:
            if not self.wait_acknowledged(patient=patient):
                self._left_out = True
                return None
            usable = [buffer for buffer in self._free if buffer not in self._newest]
            if usable:
                return usable[0], self._buffers[usable[0]]
            if not for_disk:
                return None
            self._take(self._stream.read(None))

    def wait_acknowledged(self, *, patient: bool = True) -> bool:
        """Until every prompt snapshot is sealed, here and at the buddy.

        False, unless ``patient``, where that takes longer than the snapshot deadline.
        """
        while self._unacknowledged:
            left = None if patient else max(0.0, self._seconds_left())
            messages = self._stream.read(left)
            if not messages and left is not None and self._seconds_left() <= 0:
                return False
            self._take(messages)
        return True

    def catch_up(self) -> None:
        """After a step without a snapshot the next one is waited for, as long as its deadline.

        Others may be two steps further than the last one that this rank has made safe, and hold
        three: they must not get further before another one is.
        """
        self._left_out = not self.wait_acknowledged(patient=False)

    @property
    def behind(self) -> bool:
        """Whether a step was left out and none has been made safe since."""
        return self._left_out

    @property
    def late(self) -> bool:
        """Whether the keeper, or its buddy's, has not answered within the snapshot deadline."""
        return bool(self._unacknowledged) and self._seconds_left() <= 0

    @property
    def deadline_seconds(self) -> float:
        """What a snapshot may take until training goes on without it."""
        return self._deadline.seconds

    def _seconds_left(self) -> float:
        since = min(self._unacknowledged.values())
        return since + self._deadline.seconds - time.monotonic()

    def hand_over(self, buffer: int, order: SaveOrder) -> None:
        """The buffer is about to be filled: from now on the keeper sees to it."""
        send(self._connection, FlushBuffer(buffer, order))
        self._free.remove(buffer)
        if order.write:
            self._handed[order.draft.step] = order.path
        if order.prompt:
            self._newest = [*self._newest[-1:], buffer]
            self._unacknowledged[order.draft.step] = time.monotonic()
        if order.archive is not None:
            self.archiving.append(order.draft.step)

    def filled(self, buffer: int, count: int) -> None:
        """So many bytes of a buffer are there."""
        send(self._connection, Filled(buffer, count))

    def outcomes(self, timeout_seconds: float | None = 0.0) -> list[SaveOutcome]:
        """What became known since the last call."""
        if self._handed or self.archiving or len(self._free) < len(self._buffers):
            self._take(self._stream.read(timeout_seconds))
        found, self._outcomes = self._outcomes, []
        return found

    def give_up(self, order: SaveOrder, problem: str) -> None:
        """What was to be handed over is not."""
        if order.write:
            self._resolve(SaveOutcome(step=order.draft.step, path=order.path, problem=problem))

    def forget(self, step: int) -> None:
        """Whatever becomes of this step is told by somebody else."""
        self._handed.pop(step, None)

    def lost(self, problem: str) -> list[SaveOutcome]:
        """The keeper is gone: what it told before, and what it had not finished."""
        for step, path in list(self._handed.items()):
            self._resolve(SaveOutcome(step=step, path=path, problem=problem))
        found, self._outcomes = self._outcomes, []
        return found

    def wait_durable(self) -> None:
        """Until every shard that was handed over is on disk or has failed."""
        while len(self._free) < len(self._buffers):
            self._take(self._stream.read(None))

    def close(self) -> None:
        """Leave; the keeper finishes what it was given."""
        try:
            send(self._connection, Bye())
        except OSError:  # it is gone already
            pass
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Leave as a worker that was killed does: the keeper holds on to what it has."""
        self._connection.close()
        self._unpin()

    def _take(self, messages: list[FromKeeper]) -> None:
        for message in messages:
            match message:
                case Durable():
                    self._free.append(message.buffer)
                    self.flush_seconds = message.seconds
                case Committed():
                    self._resolve(message)
                case Superseded():
                    self._handed.pop(message.step, None)
                case Failed():
                    self._unacknowledged.pop(message.step, None)
                    if message.buffer >= 0:
                        self._free.append(message.buffer)
                        self.archiving = [s for s in self.archiving if s != message.step]
                    self._resolve(message)
                case Acknowledged():
                    since = self._unacknowledged.pop(message.step)
                    self._deadline.acknowledged(time.monotonic() - since)
                case Trouble():
                    self.troubles.append(f"step {message.step}: {message.problem}")
                case Archived():
                    self.archiving.remove(message.step)
                    if message.problem:
                        self.unarchived[message.step] = message.problem
                case Replicated():
                    self.replicated_step = message.step

    def _resolve(self, outcome: SaveOutcome) -> None:
        self._handed.pop(outcome.step, None)
        self._outcomes.append(outcome)


def _make_resident(whole: Tensor) -> None:
    """Make every page now, so that the first save is as fast as the next ones.

    By several threads: one clears pages at less than 2 GB/s.
    """
    advise = ctypes.CDLL(None, use_errno=True).madvise  # ctypes lets go of the interpreter
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def populate(first: int) -> bool:
        size = min(POPULATE_BYTES, whole.numel() - first)
        return int(advise(whole.data_ptr() + first, size, POPULATE_WRITE)) == 0

    threads = min(POPULATE_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        done = all(pool.map(populate, range(0, whole.numel(), POPULATE_BYTES)))
    if not done:  # an older kernel: touch each page, but keep what is there
        whole[:: mmap.PAGESIZE] += 0


def _pin(whole: Tensor) -> int:
    """Pin shared memory for copies from the device; returns its address."""
    code = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
    if int(code) != 0:
        raise NoKeeperError(f"the shared memory cannot be pinned: CUDA error {int(code)}")
    return whole.data_ptr()


def _unpin(address: int) -> None:
    if address:
        torch.cuda.cudart().cudaHostUnregister(address)
