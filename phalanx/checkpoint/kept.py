"""The worker's side of the keeper: shared memory, hand-over, and what became of each save."""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from phalanx.checkpoint.commit import Order
from phalanx.checkpoint.direct import aligned
from phalanx.checkpoint.wire import (
    Bye,
    Committed,
    Durable,
    Failed,
    Flush,
    FromKeeper,
    Hello,
    KeeperStream,
    Refused,
    Superseded,
    send,
)

POPULATE_WRITE = 23  # madvise: have the kernel make the pages now, not at the first save


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a save."""

    step: int
    path: str
    problem: str = ""  # empty: the checkpoint is complete


class NoKeeperError(Exception):
    """There is no keeper, or it has no memory for this worker."""


def start_keeper(lease_seconds: float) -> tuple[str, subprocess.Popen[bytes]]:
    """Start this node's keeper; the address that its workers connect to, and the process."""
    folder = Path(tempfile.mkdtemp(prefix="phalanx-keeper-"))  # nobody else may enter it
    address = str(folder / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(128)
        command = [sys.executable, "-m", "phalanx.checkpoint.keeper"]
        command += ["--listener", str(listener.fileno()), "--lease", str(lease_seconds)]
        process = subprocess.Popen(
            command,
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # what ends the worker's group must not end the keeper
        )
    return address, process


def forget_address(address: str) -> None:
    """Everybody is connected: nothing of the socket needs to stay on disk."""
    shutil.rmtree(Path(address).parent, ignore_errors=True)


class Kept:
    """A worker's connection to its keeper."""

    def __init__(self, address: str, rank: int, slot_bytes: int, slots: int, cuda: bool) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(address)
        self._stream = KeeperStream(self._connection)
        send(self._connection, Hello(rank, slot_bytes, slots))
        answer, files = self._stream.welcome()
        if isinstance(answer, Refused) or not files:
            self._connection.close()
            problem = answer.problem if isinstance(answer, Refused) else "the keeper ended"
            raise NoKeeperError(problem)
        size = slots * aligned(slot_bytes)
        self._map = mmap.mmap(files[0], size)
        os.close(files[0])
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._slots = list(whole.split(aligned(slot_bytes)))
        _make_resident(self._map, whole, cuda)
        self._free = list(range(slots))
        self._outcomes: list[Outcome] = []
        self._handed: list[int] = []  # steps without an outcome so far
        self.flush_seconds = 0.0  # of the last shard that became durable

    @property
    def waiting(self) -> bool:
        """Whether something handed over is neither complete nor failed."""
        return bool(self._handed)

    def slot(self) -> tuple[int, Tensor]:
        """Memory for a snapshot; waits where all of it is still being written."""
        while not self._free:
            self._take(self._stream.read(None))
        return self._free[0], self._slots[self._free[0]]

    def hand_over(self, slot: int, order: Order) -> None:
        """The slot is full: from now on the keeper sees to it."""
        self._free.remove(slot)
        self._handed.append(order.draft.step)
        send(self._connection, Flush(slot, order))

    def outcomes(self, timeout_seconds: float | None = 0.0) -> list[Outcome]:
        """What became known since the last call."""
        if self._handed:
            self._take(self._stream.read(timeout_seconds))
        found, self._outcomes = self._outcomes, []
        return found

    def wait_durable(self) -> None:
        """Until every shard that was handed over is on disk or has failed."""
        while len(self._free) < len(self._slots):
            self._take(self._stream.read(None))

    def close(self) -> None:
        """Leave; the keeper finishes what it was given."""
        try:
            send(self._connection, Bye())
        except OSError:  # it is gone already
            pass
        finally:
            self._connection.close()

    def _take(self, messages: list[FromKeeper]) -> None:
        for message in messages:
            match message:
                case Durable():
                    self._free.append(message.slot)
                    self.flush_seconds = message.seconds
                case Committed():
                    self._resolve(Outcome(step=message.step, path=message.path))
                case Superseded():
                    self._handed.remove(message.step)
                case Failed():
                    if message.slot >= 0:
                        self._free.append(message.slot)
                    failed = Outcome(step=message.step, path=message.path, problem=message.problem)
                    self._resolve(failed)

    def _resolve(self, outcome: Outcome) -> None:
        self._handed.remove(outcome.step)
        self._outcomes.append(outcome)


def _make_resident(memory: mmap.mmap, whole: Tensor, cuda: bool) -> None:
    """Make every page now, so that the first save is as fast as the next ones."""
    try:
        memory.madvise(POPULATE_WRITE)
    except OSError:  # an older kernel
        whole.zero_()
    if cuda:
        pin = torch.cuda.cudart().cudaHostRegister
        code = pin(whole.data_ptr(), whole.numel(), 0)
        if int(code) != 0:
            raise NoKeeperError(f"the shared memory cannot be pinned: CUDA error {int(code)}")
