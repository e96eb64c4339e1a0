"""What a keeper does for a worker of its node: memory, writing, replicas, copies."""

from __future__ import annotations

import logging
import queue
import select
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from phalanx.checkpoint.format.folder import checkpoint_path
from phalanx.checkpoint.format.manifest import CheckpointError
from phalanx.checkpoint.keeper.channel import ByteStream, connect
from phalanx.checkpoint.keeper.messages import (
    Acknowledged,
    Archived,
    Bye,
    Committed,
    Durable,
    FenceReplicas,
    Filled,
    FlushBuffer,
    Hello,
    MemoryGranted,
    Pair,
    Put,
    Refused,
    Release,
    Replicated,
    Save,
    Saved,
    Shelve,
    Taken,
    Trouble,
    Watch,
)
from phalanx.checkpoint.keeper.peer import KeeperPeer
from phalanx.checkpoint.keeper.problems import failed, problem_of
from phalanx.checkpoint.keeper.snapshot_store import (
    HeldSnapshot,
    Region,
    SnapshotStore,
    WorkerGoneError,
    sums_of,
)
from phalanx.checkpoint.keeper.wire import expect, receive_by_keeper, send
from phalanx.checkpoint.write.archive import Archiver, Copy
from phalanx.checkpoint.write.commit import (
    is_published,
    publish_sidecar,
    try_commit,
    withdraw,
    write_bytes,
)
from phalanx.checkpoint.write.node_disk import write_local

if TYPE_CHECKING:
    from phalanx.checkpoint.keeper.process import Keeper

PEER_SECONDS = 30.0  # that another keeper may be silent while it takes a replica

log = logging.getLogger(__name__)


class WorkerPeer(KeeperPeer):
    """A worker of this node: a thread listens to it, another writes what it hands over."""

    def __init__(self, keeper: Keeper, connection: socket.socket) -> None:
        super().__init__(keeper, connection)
        self._local = connection
        self._work: queue.Queue[tuple[int, HeldSnapshot] | None] = queue.Queue()
        self._later: queue.Queue[tuple[int, HeldSnapshot] | None] = (
            queue.Queue()
        )  # sealed, to be written
        self._region: Region | None = None
        self._filling: dict[int, HeldSnapshot] = {}
        self._buddy: Pair | None = None
        self._to_buddy: ByteStream | None = None  # kept open: a snapshot may come with every step
        self._as_planned = False
        self._archiver = Archiver(self._complain, self._archived, keeper.leaving)

    def is_there(self) -> bool:
        """Whether the process at the other end lives, also before its last words are read."""
        watch = select.poll()
        gone = select.POLLHUP | select.POLLRDHUP | select.POLLERR
        try:
            watch.register(self._local, gone)
        except ValueError:  # it was closed while somebody asked
            return False
        return not watch.poll(0)

    def takes_more(self) -> bool:
        """Whether a short message can be sent without waiting for the other end to read."""
        watch = select.poll()
        try:
            watch.register(self._local, select.POLLOUT)
        except ValueError:  # it was closed while somebody asked
            return False
        return bool(watch.poll(0))

    def start(self) -> None:
        self.keeper.connected()
        start_thread(self._listen, self._turn_away)

    def _turn_away(self) -> None:
        self.connection.close()
        self.keeper.disconnected()

    def _listen(self) -> None:
        try:
            while True:
                message, files = receive_by_keeper(self._local)
                if not self._obey(message, files):
                    return
        finally:  # also after words that nobody understands
            self.keeper.gone(self)
            self.connection.close()
            self.keeper.unwatched(self)
            for held in self._filling.values():
                held.abandon()
            if self._region is not None:
                self._work.put(None)
            else:
                self.keeper.disconnected()

    def _obey(self, message: object, files: list[int]) -> bool:
        match message:
            case Hello():
                self._welcome(message, files)
            case FlushBuffer():
                assert self._region is not None
                snapshot = self._region.begin(message.buffer, message.order)
                self._filling[message.buffer] = snapshot
                self.keeper.saves.begin(snapshot.order)
                self.keeper.took(prompt=message.order.prompt)
                self._work.put((message.buffer, snapshot))
            case Filled():
                snapshot = self._filling[message.buffer]
                snapshot.fill(message.bytes)
                if message.bytes >= snapshot.order.sidecar.shard_bytes:
                    del self._filling[message.buffer]
            case Pair():
                self._buddy = message
                self._leave_buddy()
            case FenceReplicas():
                self.snapshots.fence(message.generation)
            case Release():
                self.keeper.release()
            case Shelve():
                self.keeper.local_root = Path(message.root)
            case Watch():
                self.keeper.watched(self)
            case Save():
                self.tell(save_held(self.snapshots, message))
            case Bye():
                self._as_planned = True
                return False
            case _:
                return self.answer(message)
        return True

    def _welcome(self, hello: Hello, files: list[int]) -> None:
        for lock in files:
            self.keeper.hold(lock)
        try:
            self._region = self.snapshots.own(hello.rank, hello.buffer_bytes, hello.buffers)
        except MemoryError as error:
            self.tell(Refused(str(error)))
            return
        self.keeper.joined(self)
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._write_later, daemon=True).start()
        order = self._region.in_order_of_use(step=hello.step)
        keeper = self.keeper
        self.tell(MemoryGranted(order, keeper.port, keeper.token, keeper.shared), self._region.file)

    def _write(self) -> None:
        while (work := self._work.get()) is not None:
            buffer, snapshot = work
            try:
                if snapshot.order.prompt:
                    self._seal_promptly(buffer, snapshot)
                else:
                    committed = self._keep(buffer, snapshot)
                    self.keeper.finished(self, snapshot.order, not committed)
            except Exception as error:  # a full disk must not end the keeper
                self._give_up(buffer, snapshot, error)
        self._later.put(None)

    def _give_up(self, buffer: int, snapshot: HeldSnapshot, error: Exception) -> None:
        step = snapshot.order.draft.step
        if not isinstance(error, WorkerGoneError):
            log.error("step %d is not saved: %s", step, problem_of(error))
        if not is_published(snapshot.order):  # else others may commit it at this moment
            withdraw(snapshot.order)
        self.tell(failed(buffer, snapshot.order, error))
        self.keeper.finished(self, snapshot.order, waits_for_others=False)

    def _seal_promptly(self, buffer: int, snapshot: HeldSnapshot) -> None:
        """Make a snapshot safe in memory; where it is to be written too, that comes later."""
        step, began = snapshot.order.draft.step, time.monotonic()
        snapshot.seal(sums_of(snapshot))
        safe = self._replicate(snapshot)
        if safe:
            self.keeper.note(snapshot)
        if snapshot.order.write or snapshot.order.local is not None:
            self.tell(Acknowledged(step, safe))
            self._later.put((buffer, snapshot))
            return
        free = Durable(buffer, step, time.monotonic() - began)
        self.tell_all(Acknowledged(step, safe), free)
        self.keeper.finished(self, snapshot.order, waits_for_others=False)

    def _write_later(self) -> None:
        assert self._region is not None
        writing = self._region.writing
        while (work := self._later.get()) is not None:
            buffer, snapshot = work
            writing[buffer] = writing.get(buffer, 0) + 1
            try:
                self._write_sealed(buffer, snapshot)
            except Exception as error:
                self._give_up(buffer, snapshot, error)
            finally:
                writing.pop(buffer, None)
        self._leave_buddy()
        self.keeper.left(self._as_planned)
        self.keeper.disconnected()

    def _write_sealed(self, buffer: int, snapshot: HeldSnapshot) -> None:
        """Write a snapshot that is sealed; what changed under the writing is not published."""
        order, began = snapshot.order, time.monotonic()
        assert snapshot.sidecar is not None
        self._write_local(snapshot)
        if order.write:
            if write_bytes(order, snapshot.views()) != snapshot.sidecar.sums:
                raise OSError("the next worker used its memory before it was written")
            self.keeper.saves.publish(order, snapshot.sidecar)
            self._archive(snapshot)
        self.tell(Durable(buffer, order.draft.step, time.monotonic() - began))
        self.keeper.finished(self, order, waits_for_others=not self._commit(snapshot))

    def _keep(self, buffer: int, snapshot: HeldSnapshot) -> bool:
        """Write, replicate, give the buffer back, commit; whether nothing is left to wait for.

        Where the disk fails, memory and the other node still hold the snapshot.
        """
        order, began = snapshot.order, time.monotonic()
        failure: Exception | None = None
        sums = self._write_local(snapshot)
        if order.write:
            try:
                sums = write_bytes(order, snapshot.views())
            except (OSError, CheckpointError) as error:
                failure = error
        sidecar = snapshot.seal(sums or sums_of(snapshot))
        replica = threading.Thread(target=self._replicate, args=(snapshot,))
        replica.start()
        if order.write and failure is None:
            try:
                self.keeper.saves.publish(order, sidecar)
                self._archive(snapshot)
            except OSError as error:
                failure = error
        replica.join()
        if failure is not None:
            raise failure
        self.tell(Durable(buffer, order.draft.step, time.monotonic() - began))
        return self._commit(snapshot)

    def _write_local(self, snapshot: HeldSnapshot) -> bytes:
        """Write to the node's own disk; training and the other tiers go on if that fails."""
        if snapshot.order.local is None:
            return b""
        try:
            sums = write_local(snapshot.order, snapshot.views())
        except OSError as error:
            self._complain(
                snapshot.order.draft.step, f"not on the node's disk: {problem_of(error)}"
            )
            return b""
        if snapshot.sidecar is not None and sums != snapshot.sidecar.sums:
            raise OSError("the next worker used its memory before it was written")
        return sums

    def _archive(self, snapshot: HeldSnapshot) -> None:
        """Have a shard copied that is durable here: a copy that cannot begin costs nothing else."""
        order, sidecar = snapshot.order, snapshot.sidecar
        if order.archive is None or sidecar is None:
            return
        self.keeper.took()
        try:
            self._archiver.add(Copy(order, sidecar))  # opened before anybody may prune it
        except (OSError, RuntimeError) as error:  # no descriptor, or no thread
            step, problem = order.draft.step, f"not copied to {order.archive.url}: {error}"
            self._complain(step, problem)
            self._archived(step, problem)

    def _complain(self, step: int, problem: str) -> None:
        log.error("step %d: %s", step, problem)
        self.tell(Trouble(step, problem))

    def _archived(self, step: int, problem: str) -> None:
        self.tell(Archived(step, problem))
        self.keeper.rested()

    def _commit(self, held: HeldSnapshot) -> bool:
        order, step = held.order, held.order.draft.step
        if not order.write:
            return True
        try:
            done = Committed(step=step, path=order.path)
            return try_commit(order, lambda: self.tell(done))
        except (OSError, CheckpointError) as error:
            log.error("step %d is not committed: %s", step, error)
            self.tell(failed(-1, order, error))
        return True

    def _replicate(self, snapshot: HeldSnapshot) -> bool:
        """Have another node's keeper hold the snapshot too; training goes on if it cannot."""
        buddy, step = self._buddy, snapshot.order.draft.step
        if buddy is None:
            return True
        fresh = self._to_buddy is None
        try:
            self._send_replica(buddy, snapshot)
        except OSError as error:
            self._leave_buddy()
            if not fresh and not isinstance(error, TimeoutError):  # it hung up, long ago maybe
                return self._replicate(snapshot)
            self._complain(step, f"no replica at {buddy.host}:{buddy.port}: {error}")
            if buddy.spare:  # the gang lives without it; the next generation has another
                self._buddy = None
            return buddy.spare
        if not snapshot.order.prompt:  # else this is part of its acknowledgement
            self.tell(Replicated(step))
        return True

    def _send_replica(self, buddy: Pair, snapshot: HeldSnapshot) -> None:
        assert snapshot.sidecar is not None
        encrypt, throttle = self.keeper.options.encrypt, self.keeper.throttle
        if self._to_buddy is None:
            token = buddy.token or self.keeper.token
            self._to_buddy = connect(buddy.host, buddy.port, token, PEER_SECONDS, encrypt=encrypt)
        peer = self._to_buddy
        send(peer, Put(snapshot.order, snapshot.sidecar))
        for part in throttle.parts(snapshot.memory[: snapshot.sidecar.shard_bytes]):
            throttle.take(len(part))
            peer.sendall(part)
        expect(peer, Taken)

    def _leave_buddy(self) -> None:
        if self._to_buddy is not None:
            self._to_buddy.close()
            self._to_buddy = None


def start_thread(work: Callable[[], object], otherwise: Callable[[], object]) -> None:
    """Work aside; where the machine has no thread left for it (a program forks without end), the
    caller lives on, and what it holds."""
    try:
        threading.Thread(target=work, daemon=True).start()
    except RuntimeError as error:
        log.warning("somebody is turned away: %s", error)
        otherwise()


def save_held(snapshots: SnapshotStore, wanted: Save) -> Saved:
    """Write what this node's own ranks have of a step; the last keeper to do so commits it."""
    path = checkpoint_path(Path(wanted.folder), wanted.step, 0)
    newest: dict[int, HeldSnapshot] = {}
    for snapshot in snapshots.sealed():
        draft, rank = snapshot.order.draft, snapshot.order.sidecar.rank
        if snapshot.replica or draft.step != wanted.step:
            continue
        if rank not in newest or draft.generation > newest[rank].order.draft.generation:
            newest[rank] = snapshot
    try:
        if not newest:
            raise CheckpointError(path, f"step {wanted.step} is not in this node's memory")
        for snapshot in newest.values():
            order = msgspec.structs.replace(snapshot.order, path=str(path), write=True)
            assert snapshot.sidecar is not None
            if write_bytes(order, snapshot.views()) != snapshot.sidecar.sums:
                raise CheckpointError(path, "its memory was damaged")
            publish_sidecar(path, snapshot.sidecar)
            try_commit(order)
    except (OSError, CheckpointError) as error:
        log.error("step %d is not saved: %s", wanted.step, problem_of(error))
        return Saved(str(path), problem_of(error))
    return Saved(str(path))
