"""The keeper: one process a node that owns the memory of snapshots and writes them to disk.

It outlives the workers: what they handed over is written and committed even if they are killed
a moment later. When they are gone and nothing is left to do it ends, at the latest after a lease.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.commit import Order, try_commit, write_shard
from phalanx.checkpoint.direct import WRITE_BYTES, aligned
from phalanx.checkpoint.folder import scan
from phalanx.checkpoint.manifest import MANIFEST_FILE, CheckpointError
from phalanx.checkpoint.wire import (
    Committed,
    Durable,
    Failed,
    Flush,
    FromKeeper,
    Hello,
    Refused,
    Superseded,
    Welcome,
    receive_from_worker,
    send,
)

POLL_SECONDS = 0.1  # for the manifest, while other ranks still write
LISTING_SECONDS = 5.0  # a listing of all sidecars is dearer than a look at one name
MEMORY_SHARE = 0.9  # of the memory that is free; more would have the kernel kill somebody

log = logging.getLogger(__name__)


class Keeper:
    """Serves the workers of one node."""

    def __init__(self, listener: socket.socket, lease_seconds: float) -> None:
        self._listener = listener
        self._lease_seconds = lease_seconds
        self._lock = threading.Lock()
        self._clients = 0
        self._busy = 0  # flushes handed over and not finished
        self._pending: list[tuple[Client, Order]] = []
        self._served = False
        self._idle_since = time.monotonic()

    def serve(self) -> None:
        """Until the workers are gone and their work is done, or the lease has run out."""
        threading.Thread(target=self._watch_commits, daemon=True).start()
        self._listener.settimeout(POLL_SECONDS)
        while not self._done():
            with suppress(TimeoutError):
                connection, _ = self._listener.accept()
                connection.settimeout(None)
                with self._lock:
                    self._clients += 1
                    self._served = True
                Client(self, connection).start()

    def _done(self) -> bool:
        with self._lock:
            if self._clients or self._busy:
                self._idle_since = time.monotonic()
                return False
            waited = time.monotonic() - self._idle_since
            nothing_left = self._served and not self._pending
            return nothing_left or waited > self._lease_seconds

    def took(self) -> None:
        """A flush was handed over."""
        with self._lock:
            self._busy += 1

    def finished(self, client: Client, order: Order, committed: bool) -> None:
        """A flush is over; where others still write, its commit is watched for."""
        with self._lock:
            self._busy -= 1
            if not committed:
                self._pending.append((client, order))

    def failed(self) -> None:
        """A flush is over and nothing came of it."""
        with self._lock:
            self._busy -= 1

    def left(self) -> None:
        """A worker is gone and its queue is empty."""
        with self._lock:
            self._clients -= 1

    def _watch_commits(self) -> None:
        listed = time.monotonic()
        while True:
            time.sleep(POLL_SECONDS)
            with self._lock:
                pending = list(self._pending)
            list_now = time.monotonic() - listed > LISTING_SECONDS
            listed = time.monotonic() if list_now else listed
            for client, order in pending:
                if self._resolve(client, order, list_now):
                    with self._lock:
                        self._pending.remove((client, order))

    def _resolve(self, client: Client, order: Order, list_now: bool) -> bool:
        """Tell the worker if its checkpoint became complete, or never will."""
        path, step = Path(order.path), order.draft.step
        try:
            if not path.exists():
                newer = any(f.step > step and f.complete for f in scan(path.parent))
                gone = Failed(-1, step, order.path, "its folder is gone")
                client.tell(Superseded(step) if newer else gone)
                return True
            if (list_now or (path / MANIFEST_FILE).exists()) and try_commit(order):
                client.tell(Committed(step, order.path))
                return True
        except (OSError, CheckpointError) as error:
            client.tell(Failed(-1, step, order.path, problem_of(error)))
            return True
        return False


class Client:
    """One worker: a thread listens to it, another writes what it hands over."""

    def __init__(self, keeper: Keeper, connection: socket.socket) -> None:
        self._keeper, self._connection = keeper, connection
        self._work: queue.Queue[Flush | None] = queue.Queue()
        self._memory: memoryview | None = None
        self._slot_bytes = 0
        self._telling = threading.Lock()

    def start(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._write, daemon=True).start()

    def tell(self, message: FromKeeper, *files: int) -> None:
        """Send; a worker that is gone need not know."""
        with self._telling, suppress(OSError):
            send(self._connection, message, *files)

    def _listen(self) -> None:
        try:
            while True:
                message = receive_from_worker(self._connection)
                match message:
                    case Hello():
                        self._allocate(message)
                    case Flush():
                        self._keeper.took()
                        self._work.put(message)
                    case _:  # Bye, or the end of a worker that was killed
                        return
        finally:  # also after words that nobody understands
            self._work.put(None)

    def _allocate(self, hello: Hello) -> None:
        size = hello.slots * aligned(hello.slot_bytes)
        problem = refuse_memory(size)
        if not problem:
            try:
                file = os.memfd_create("phalanx-snapshot", os.MFD_CLOEXEC)
                os.ftruncate(file, size)
                self._memory = memoryview(mmap.mmap(file, size))
            except OSError as error:
                problem = f"{size / 1e9:.1f} GB of shared memory: {error.strerror}"
        if problem:
            self.tell(Refused(problem))
            return
        self._slot_bytes = aligned(hello.slot_bytes)
        self.tell(Welcome(), file)
        os.close(file)  # both mappings keep the memory

    def _write(self) -> None:
        while (flush := self._work.get()) is not None:
            order, began, slot = flush.order, time.monotonic(), flush.slot
            step = order.draft.step
            try:
                write_shard(order, self._views(flush))
                self.tell(Durable(slot, step, time.monotonic() - began))
                slot = -1  # given back: what fails from here on is the commit
                committed = try_commit(order)
                if committed:
                    self.tell(Committed(step, order.path))
                self._keeper.finished(self, order, committed)
            except Exception as error:  # a full disk must not end the keeper
                log.error("step %d is not saved: %s", step, error)
                self.tell(Failed(slot, step, order.path, problem_of(error)))
                self._keeper.failed()
        self._keeper.left()

    def _views(self, flush: Flush) -> Iterator[memoryview]:
        assert self._memory is not None
        start = flush.slot * self._slot_bytes
        slot = self._memory[start : start + self._slot_bytes]
        size = aligned(flush.order.sidecar.shard_bytes)
        for i in range(0, size, WRITE_BYTES):
            yield slot[i : min(i + WRITE_BYTES, size)]


def problem_of(error: Exception) -> str:
    """One line for the worker."""
    if isinstance(error, CheckpointError):
        return "; ".join(error.problems)
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def refuse_memory(size: int) -> str:
    """Why this much memory should not be taken, or nothing."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
                if size > MEMORY_SHARE * free:
                    return f"snapshots take {size / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
    return ""


def main() -> None:
    """Entry point of the process that a worker starts."""
    parser = argparse.ArgumentParser(prog="phalanx.checkpoint.keeper")
    parser.add_argument("--listener", type=int, required=True, help="descriptor of the socket")
    parser.add_argument("--lease", type=float, required=True, help="seconds")
    options = parser.parse_args()
    # A scheduler that ends the job signals everybody; what was handed over is written first.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listener = socket.socket(fileno=options.listener)
    Keeper(listener, options.lease).serve()


if __name__ == "__main__":
    main()
