"""What a keeper does for other keepers and for those who restore: offers, bytes, replicas."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import numpy as np

from phalanx.checkpoint.format.direct import CHUNK_BYTES, chunk_sums
from phalanx.checkpoint.keeper.channel import ByteStream
from phalanx.checkpoint.keeper.messages import (
    AskSnapshots,
    Condemn,
    Detail,
    Details,
    Fetch,
    FromKeeper,
    Judged,
    KeeperInventory,
    Ping,
    Pong,
    Put,
    Refused,
    SnapshotBytes,
    Taken,
)
from phalanx.checkpoint.keeper.snapshot_store import HeldSnapshot, IncomingReplica
from phalanx.checkpoint.keeper.wire import receive_by_peer, receive_into, send, send_together
from phalanx.checkpoint.write.node_disk import LocatedShard, ShardRecord, find_record

if TYPE_CHECKING:
    from phalanx.checkpoint.keeper.process import Keeper

RECEIVE_BYTES = 4 * CHUNK_BYTES


class KeeperPeer:
    """A connection that may ask for snapshots and bring replicas."""

    def __init__(self, keeper: Keeper, connection: ByteStream) -> None:
        self.keeper, self.connection = keeper, connection
        self.snapshots = keeper.snapshots
        self._telling = threading.Lock()

    def serve(self) -> None:
        """Answer until the other side is gone."""
        with closing(self.connection):
            while self.answer(receive_by_peer(self.connection)):
                pass

    def tell(self, message: FromKeeper, *files: int) -> None:
        """Send; whoever is gone need not know."""
        with self._telling, suppress(OSError):
            send(self.connection, message, *files)

    def tell_all(self, *messages: FromKeeper) -> None:
        """Send several at once."""
        with self._telling, suppress(OSError):
            send_together(self.connection, *messages)

    def answer(self, message: object) -> bool:
        """Serve one request; False for what is none."""
        match message:
            case AskSnapshots():
                self.tell(self._inventory())
            case Ping():
                self.tell(Pong())
            case Condemn():
                bad = self.snapshots.condemn(message.rank, message.session, message.step)
                self.tell(Judged(bad))
            case Detail():
                self._send_detail(message)
            case Fetch() if message.on_disk:
                self._send_from_disk(message)
            case Fetch():
                self._send_bytes(message)
            case Put():
                self._take_replica(message)
            case _:
                return False
        return True

    def _inventory(self) -> KeeperInventory:
        keeper = self.keeper
        return KeeperInventory(
            [held.header() for held in self.snapshots.sealed()],
            keeper.port,
            keeper.token,
            keeper.live(),
            [held.header() for held in self.snapshots.condemned()],
            keeper.shared,
        )

    def _send_detail(self, wanted: Detail) -> None:
        snapshot: HeldSnapshot | ShardRecord | None
        if wanted.on_disk:
            found = self._find_on_disk(wanted)
            snapshot = None if found is None else found.record
        else:
            snapshot = self.snapshots.find(wanted.rank, wanted.session, wanted.step)
        if snapshot is None or snapshot.sidecar is None:
            self.tell(Refused("no such snapshot"))
        else:
            self.tell(Details(snapshot.order, snapshot.sidecar))

    def _find_on_disk(self, wanted: Detail | Fetch) -> LocatedShard | None:
        root = self.keeper.local_root
        if root is None:
            return None
        return find_record(root, wanted.rank, wanted.session, wanted.step)

    def _send_from_disk(self, wanted: Fetch) -> None:
        """The receiver proves what it gets, as it does for memory."""
        shard = self._find_on_disk(wanted)
        try:
            if shard is None or wanted.offset < 0:
                raise FileNotFoundError(2, "no such shard")
            with shard.shard.open("rb") as file:
                content = os.pread(file.fileno(), wanted.length, wanted.offset)
            if len(content) < wanted.length:
                raise OSError(5, "the shard is not so long")
        except OSError as error:
            self.tell(Refused(str(error)))
            return
        with self._telling, suppress(OSError):
            send(self.connection, SnapshotBytes(wanted.length))
            self.connection.sendall(content)

    def _send_bytes(self, wanted: Fetch) -> None:
        snapshot = self.snapshots.find(wanted.rank, wanted.session, wanted.step)
        end = wanted.offset + wanted.length
        if snapshot is None or wanted.offset < 0 or end > len(snapshot.memory):
            self.tell(Refused("no such snapshot, or not so long"))
            return
        with self._telling, suppress(OSError):
            send(self.connection, SnapshotBytes(wanted.length))
            self.connection.sendall(snapshot.memory[wanted.offset : end])

    def _take_replica(self, put: Put) -> None:
        if not self.snapshots.takes(put.order):
            self._refuse("a newer generation goes on from what is here")
            return
        try:
            replica = self.snapshots.receive(put.order, self._hang_up)
        except MemoryError as error:
            self._refuse(str(error))
            return
        try:
            self._receive_replica(replica, put)
        finally:
            if not replica.sealed:
                replica.abandon()

    def _receive_replica(self, replica: IncomingReplica, put: Put) -> None:
        """Bytes are proved as they come; a replica that is not what was sealed is refused."""
        size, good = put.sidecar.shard_bytes, put.sidecar.chunk_sums
        wrong = 0
        for start in range(0, size, RECEIVE_BYTES):
            received = replica.memory[start : min(start + RECEIVE_BYTES, size)]
            if replica.unwanted or not receive_into(self.connection, received):
                return
            first = start // CHUNK_BYTES
            received_sums = np.array(chunk_sums(received), "<u4")
            wrong += int((received_sums != good[first : first + len(received_sums)]).sum())
        if wrong:
            self.tell(Refused(f"{wrong} chunks arrived corrupt"))
            return
        replica.fill(size)
        replica.seal(put.sidecar.sums)
        self.tell(Taken())
        self.keeper.note(replica)

    def _hang_up(self) -> None:
        with suppress(OSError):  # it is gone already
            self.connection.shutdown(socket.SHUT_RDWR)

    def _refuse(self, problem: str) -> None:
        """Take no replica: its bytes are not read."""
        self.tell(Refused(problem))
        self.connection.close()
