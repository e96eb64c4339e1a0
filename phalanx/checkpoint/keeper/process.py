"""The keeper: one process a node that owns the memory of snapshots and writes them to disk.

It outlives the workers: what they handed over is written and committed even if they are killed
a moment later, and the newest whole snapshots stay in memory for the next workers, or for those
of another node. Workers that end as planned end it too; otherwise it waits for a lease.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import socket
import threading
import time
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from phalanx.checkpoint.format.folder import scan
from phalanx.checkpoint.format.manifest import MANIFEST_FILE, CheckpointError
from phalanx.checkpoint.keeper.channel import (
    REPLICA_KEY,
    ReplicaOptions,
    Throttle,
    accept,
)
from phalanx.checkpoint.keeper.messages import Committed, Failed, Noted, Superseded
from phalanx.checkpoint.keeper.notices import Notices
from phalanx.checkpoint.keeper.open_saves import ABANDON, OpenSaves
from phalanx.checkpoint.keeper.peer import KeeperPeer
from phalanx.checkpoint.keeper.problems import failed
from phalanx.checkpoint.keeper.serving import WorkerPeer, start_thread
from phalanx.checkpoint.keeper.snapshot_store import HeldSnapshot, SnapshotStore
from phalanx.checkpoint.write.commit import SaveOrder, try_commit, withdraw
from phalanx.checkpoint.write.quota import QUOTA_FIX, refusal_of

POLL_SECONDS = 0.1  # for the manifest, while other ranks still write
LISTING_SECONDS = 5.0  # a listing of all sidecars is dearer than a look at one name
LAST_SECONDS = 2.0  # for other keepers, once its job is over
POOR_SECONDS = 1.0  # until a process that got no descriptor asks for one again
NICE = 19  # a fiftieth of a core where training leaves none idle

log = logging.getLogger(__name__)


class Keeper:
    """Serves the workers of one node, and the keepers that exchange replicas with it."""

    def __init__(
        self,
        listener: socket.socket,
        lease_seconds: float,
        tcp: socket.socket,
        options: ReplicaOptions,
        key: bytes = b"",
    ) -> None:
        self.snapshots, self.saves = SnapshotStore(), OpenSaves()
        self.options = options
        self.throttle = Throttle(options.bytes_per_second)
        self.token = key or secrets.token_bytes(32)
        self.shared = bool(key)  # all keepers of the job know it: nobody needs to be told
        self.local_root: Path | None = None  # on this node's disk, once somebody asks for it
        self.port = int(tcp.getsockname()[1])
        self._listener, self._tcp = listener, tcp
        self._lease_seconds = lease_seconds
        self._lock = threading.Lock()
        self._connections = 0
        self._workers = 0  # that have memory here, or had it and left work behind
        self._attached: list[WorkerPeer] = []  # those with memory here whose connection is open
        self._busy = 0  # flushes handed over and not finished
        self._pending: list[tuple[WorkerPeer, SaveOrder]] = []
        self._watchers: dict[WorkerPeer, Notices] = {}
        self.leaving = threading.Event()  # copies that fail are not tried again
        self.over = threading.Event()  # its job is: nothing more is written
        self._wanted = True  # somebody may come: the first worker, or one after a crash
        self._folder_lock = -1  # descriptor
        self._idle_since = time.monotonic()

    def serve(self) -> None:
        """Until the workers have ended as planned and their work is done, or for the lease."""
        for work in (self._watch_commits, self._accept_peers):
            threading.Thread(target=work, daemon=True).start()
        self._listener.settimeout(POLL_SECONDS)
        while not self._done():
            if self.over.is_set():
                self._abandon()
                return
            if (connection := next_connection(self._listener)) is not None:
                connection.settimeout(None)
                WorkerPeer(self, connection).start()

    def _done(self) -> bool:
        with self._lock:
            if self._connections or self._busy:
                self._idle_since = time.monotonic()
                return False
            self._unlock_folder()
            waited = time.monotonic() - self._idle_since
            return not (self._wanted or self._pending) or waited > self._lease_seconds

    def hold(self, lock: int) -> None:
        """Keep the folder locked while there is work for it."""
        with self._lock:
            self._unlock_folder()
            self._folder_lock = lock

    def _unlock_folder(self) -> None:
        if self._folder_lock >= 0:
            os.close(self._folder_lock)
            self._folder_lock = -1

    def connected(self) -> None:
        """Somebody of this node is there."""
        with self._lock:
            self._connections += 1

    def joined(self, worker: WorkerPeer) -> None:
        """A worker has memory here."""
        with self._lock:
            self._workers += 1
            self._attached.append(worker)

    def gone(self, worker: WorkerPeer) -> None:
        """A worker is gone, whatever of its snapshots is still to be written."""
        with self._lock:
            if worker in self._attached:
                self._attached.remove(worker)

    def live(self) -> bool:
        """Whether a job is at work: what is here is its own, and nobody else's to continue."""
        with self._lock:
            attached = list(self._attached)
        return any(worker.is_there() for worker in attached)

    def left(self, as_planned: bool) -> None:
        """A worker is gone and its queue is empty; snapshots are kept if it was not planned."""
        with self._lock:
            self._workers -= 1
            self._wanted = not as_planned or (self._wanted and self._workers > 0)

    def disconnected(self) -> None:
        """Somebody of this node is gone."""
        with self._lock:
            self._connections -= 1

    def release(self) -> None:
        """Whoever restored from here needs it no more; not said of a job that is at work."""
        live = self.live()
        with self._lock:
            self._wanted = self._wanted and live

    def watched(self, watcher: WorkerPeer) -> None:
        """Somebody wants to know what is safe: now, and from now on."""
        notices = Notices(watcher.tell, watcher.takes_more)
        with self._lock:  # nothing new comes between: the order of notes counts
            self._watchers[watcher] = notices
            known = [noted(h) for h in self.snapshots.sealed() if h.replica or h.safe]
            for note in sorted(known, key=lambda note: (note.generation, note.step)):
                notices.put(note)

    def unwatched(self, watcher: WorkerPeer) -> None:
        """A watcher is gone."""
        with self._lock:
            notices = self._watchers.pop(watcher, None)
        if notices is not None:
            notices.close()

    def note(self, snapshot: HeldSnapshot) -> None:
        """A snapshot is safe."""
        snapshot.safe = True
        with self._lock:
            watchers = list(self._watchers.values())
        for notices in watchers:
            notices.put(noted(snapshot))

    def took(self, *, prompt: bool = False) -> None:
        """A flush or a copy was begun."""
        if not prompt:
            yield_to_training()
        with self._lock:
            self._busy += 1

    def rested(self) -> None:
        """A copy to the second tier is over."""
        with self._lock:
            self._busy -= 1

    def finished(self, worker: WorkerPeer, order: SaveOrder, waits_for_others: bool) -> None:
        """A flush is over; where others still write, its commit is watched for."""
        self.saves.end(order)
        with self._lock:
            self._busy -= 1
            if waits_for_others:
                self._pending.append((worker, order))

    def _abandon(self) -> None:
        """End at once, for the job is over: a save that lacks a shard of ours goes with us, one
        that is complete is committed, and others' are theirs to take away.
        """
        self.saves.abandon()
        deadline = time.monotonic() + LAST_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                pending = list(self._pending)
            open_still = [each for each in pending if not self._resolve(*each, list_now=True)]
            if not (open_still or self.saves.commits()):
                break
            time.sleep(POLL_SECONDS)

    def _accept_peers(self) -> None:
        while True:
            if (connection := next_connection(self._tcp)) is not None:
                start_thread(partial(self._serve_peer, connection), connection.close)

    def _serve_peer(self, connection: socket.socket) -> None:
        host = "somebody"
        try:
            host = connection.getpeername()[0]
            stream = accept(connection, self.token, encrypt=self.options.encrypt)
            KeeperPeer(self, stream).serve()
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            log.warning("%s is turned away: %s", host, error)
        finally:
            connection.close()

    def _watch_commits(self) -> None:
        listed = time.monotonic()
        while True:
            time.sleep(POLL_SECONDS)
            with self._lock:
                pending = list(self._pending)
            list_now = time.monotonic() - listed > LISTING_SECONDS
            listed = time.monotonic() if list_now else listed
            for worker, order in pending:
                if self._resolve(worker, order, list_now):
                    with self._lock:
                        self._pending.remove((worker, order))

    def _resolve(self, worker: WorkerPeer, order: SaveOrder, list_now: bool) -> bool:
        """Tell the worker if its checkpoint became complete, or never will."""
        path, step = Path(order.path), order.draft.step
        try:
            if not path.exists():
                newer = any(f.step > step and f.complete for f in scan(path.parent))
                gone = Failed(step=step, path=order.path, problem="its folder is gone")
                worker.tell(Superseded(step) if newer else gone)
                return True
            if problem := refusal_of(order):
                withdraw(order)
                worker.tell(Failed(step=step, path=order.path, problem=problem, fix=QUOTA_FIX))
                return True
            if list_now or (path / MANIFEST_FILE).exists():
                done = Committed(step=step, path=order.path)
                return try_commit(order, lambda: worker.tell(done))
        except (OSError, CheckpointError) as error:
            worker.tell(failed(-1, order, error))
            return True
        return False


def next_connection(listener: socket.socket) -> socket.socket | None:
    """Whoever connects; None where nobody does in time, or this process cannot take it now.

    A process or machine without descriptors has some again later, and still what is in memory.
    """
    try:
        return listener.accept()[0]
    except TimeoutError:
        return None
    except OSError as error:
        log.warning("nobody can connect for now: %s", error)
        time.sleep(POOR_SECONDS)
        return None


def noted(snapshot: HeldSnapshot) -> Noted:
    """What watchers are told about a snapshot."""
    draft, rank = snapshot.order.draft, snapshot.order.sidecar.rank
    return Noted(rank, draft.generation, draft.step, snapshot.replica)


def listen(address: str) -> socket.socket:
    """A Unix socket whose folder nobody else may enter."""
    path = Path(address)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(128)
    return listener


def main() -> None:
    """Entry point of the process that a worker or an agent starts."""
    parser = argparse.ArgumentParser(prog="phalanx.checkpoint.keeper.process")
    parser.add_argument("--socket", required=True, help="Unix socket that workers connect to")
    parser.add_argument("--listener", type=int, default=-1, help="descriptor of that socket")
    parser.add_argument("--host", default="", help="address for other keepers (default: all)")
    parser.add_argument("--lease", type=float, default=300.0, help="seconds without a worker")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    given = options.listener
    listener = None if given < 0 else socket.socket(fileno=given)
    run_keeper(options.socket, options.host, options.lease, listener)


@cache
def yield_to_training() -> None:
    """From now on take the processors only as far as workers leave them: they have steps to make.

    Not where each step waits for a snapshot of the one before.
    """
    for thread in Path("/proc/self/task").iterdir():  # a nice value is a thread's, and its heirs'
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), NICE)
    with suppress(OSError):  # a session of its own may be weighed as one, whatever its nice value
        Path("/proc/self/autogroup").write_text(str(NICE))


def run_keeper(
    address: str, host: str, lease_seconds: float, listener: socket.socket | None = None
) -> None:
    """Be a keeper, from the first worker to the last."""
    # A scheduler that ends the job signals everybody; what was handed over is written first.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    listener = listener or listen(address)
    options = ReplicaOptions.from_environment()
    tcp = socket.create_server((options.address or host, 0))
    key = bytes.fromhex(os.environ.pop(REPLICA_KEY, ""))
    try:
        keeper = Keeper(listener, lease_seconds, tcp, options, key)
        signal.signal(signal.SIGTERM, lambda number, frame: keeper.leaving.set())
        signal.signal(ABANDON, lambda number, frame: keeper.over.set())
        keeper.serve()
    finally:
        Path(address).unlink(missing_ok=True)
        with suppress(OSError):  # others may have sockets there
            Path(address).parent.rmdir()


if __name__ == "__main__":
    main()
