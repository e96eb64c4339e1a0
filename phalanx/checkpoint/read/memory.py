"""Restoring from the memory of keepers: what is where, the newest whole step, and its bytes."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from phalanx.checkpoint.format.geometry import RankGroup, TensorTable
from phalanx.checkpoint.format.manifest import BadCheckpointError, Manifest, Shard, shard_name
from phalanx.checkpoint.format.shard import Sidecar
from phalanx.checkpoint.format.source import FileReader, ShardReader
from phalanx.checkpoint.keeper import channel
from phalanx.checkpoint.keeper.channel import ByteStream
from phalanx.checkpoint.keeper.messages import (
    AskSnapshots,
    Condemn,
    Detail,
    Details,
    Fetch,
    Header,
    Judged,
    KeeperInventory,
    Release,
    Shelve,
    SnapshotBytes,
    header_of,
)
from phalanx.checkpoint.keeper.start import node_name, own_address
from phalanx.checkpoint.keeper.wire import ask, receive_into, send
from phalanx.checkpoint.write.node_disk import find_record, find_records

ANSWER_SECONDS = 30.0


class KeeperPlace(NamedTuple):
    """A keeper, as seen from anywhere in the job."""

    node: str
    path: str  # of its Unix socket, on that node
    host: str
    port: int
    token: bytes  # empty: the one that all keepers of the job share
    folder: str = ""  # of the step, where it lies on the node's disk and not in memory


class SnapshotOffer(NamedTuple):
    """A snapshot that some keeper holds."""

    header: Header
    place: KeeperPlace

    @property
    def run(self) -> str:
        """Whose disk space it lies in; "": in memory."""
        return Path(self.place.folder).parent.name if self.place.folder else ""


class RestoreCandidate(NamedTuple):
    """A step of which every rank's snapshot is held by somebody."""

    generation: int
    step: int
    session: str
    world_size: int
    holders: dict[int, list[KeeperPlace]]  # by rank: its own node's keeper, replicas, disks

    def without(self, rank: int) -> RestoreCandidate | None:
        """When a rank's first holder turned out bad; None if it was the last."""
        rest = self.holders[rank][1:]
        return self._replace(holders=self.holders | {rank: rest}) if rest else None


def inventory(path: str) -> KeeperInventory | None:
    """What a keeper of this node says that it holds; None if it is gone."""
    with suppress(OSError), _connect_unix(path) as connection:
        return ask(connection, AskSnapshots(), KeeperInventory)
    return None


def offers(path: str, keeper: KeeperInventory | None = None) -> list[SnapshotOffer]:
    """What a keeper of this node offers; nothing if it is gone."""
    keeper = keeper or inventory(path)
    if keeper is None:
        return []
    address = KeeperPlace(node_name(), path, own_address(), keeper.port, _told(keeper))
    return [SnapshotOffer(header, address) for header in keeper.headers]


def condemn_held(place: KeeperPlace, rank: int, session: str, step: int) -> bool:
    """Have a keeper prove a snapshot again and offer it no more; whether it is bad indeed."""
    with suppress(OSError), closing(connect(place)) as connection:
        return ask(connection, Condemn(rank, session, step), Judged).bad
    return False


def offers_on_disk(root: Path, keeper: str) -> list[SnapshotOffer]:
    """What lies on this node's disk of the newest run; ``keeper`` reads it for other nodes."""
    shards = list(find_records(root))
    newest = max((each.run for each in shards), default="")
    port, token = 0, b""
    if keeper:
        with suppress(OSError), _connect_unix(keeper) as connection:
            send(connection, Shelve(str(root)))
            answer = ask(connection, AskSnapshots(), KeeperInventory)
            port, token = answer.port, _told(answer)
    return [
        SnapshotOffer(
            header_of(each.record.order, replica=False),
            KeeperPlace(node_name(), keeper, own_address(), port, token, str(each.folder)),
        )
        for each in shards
        if each.run == newest
    ]


def release(path: str) -> None:
    """Let a keeper of this node end: nobody will need its snapshots again."""
    with suppress(OSError), _connect_unix(path) as connection:
        send(connection, Release())


def candidates(offers: list[SnapshotOffer]) -> list[RestoreCandidate]:
    """Whole steps, best first: of the newest generation, then the newest step.

    A step counts when every rank sealed it; that makes the recovery step the least common one.
    """
    by_step: dict[tuple[int, int, str, int], dict[int, list[tuple[bool, bool, KeeperPlace]]]] = {}
    for header, place in offers:
        key = (header.generation, header.step, header.session, header.world_size)
        held_by = by_step.setdefault(key, {}).setdefault(header.rank, [])
        held_by.append((bool(place.folder), header.replica, place))
    whole = []
    for (generation, step, session, world_size), keepers_of in by_step.items():
        if len(keepers_of) == world_size:
            holders = {
                rank: [place for *_, place in sorted(places)] for rank, places in keepers_of.items()
            }
            whole.append(RestoreCandidate(generation, step, session, world_size, holders))
    return sorted(whole, key=lambda c: (c.generation, c.step), reverse=True)


class KeeperSource:
    """A checkpoint in the memory of keepers, and on the disks of their nodes."""

    def __init__(self, chosen: RestoreCandidate) -> None:
        on_disk = any(places[0].folder for places in chosen.holders.values())
        self.where = f"{'disks of nodes' if on_disk else 'memory of keepers'}, step {chosen.step}"
        self._chosen = chosen
        self._details: dict[int, Details] = {}
        self._lock = threading.Lock()
        draft = self._detail(0).order.draft
        shards = tuple(Shard(0, 0) for _ in range(chosen.world_size))
        self.manifest: Manifest = msgspec.structs.replace(draft, shards=shards)

    def table(self, group: RankGroup) -> TensorTable:
        order = self._detail(group.ranks[0][0]).order
        return msgspec.json.decode(order.table, type=TensorTable)

    def sidecar(self, rank: int) -> Sidecar:
        return self._detail(rank).sidecar

    def open_shard(self, rank: int, direct: bool) -> ShardReader:
        place = self._chosen.holders[rank][0]
        if place.folder and place.node == node_name():
            return FileReader(Path(place.folder) / shard_name(rank, self._chosen.session), direct)
        return KeeperShard(self._chosen, rank, self.sidecar(rank).shard_bytes)

    def _detail(self, rank: int) -> Details:
        with self._lock:
            if rank not in self._details:
                keeper = self._chosen.holders[rank][0]
                on_disk = bool(keeper.folder)
                wanted = Detail(rank, self._chosen.session, self._chosen.step, on_disk)
                try:
                    if on_disk and keeper.node == node_name():
                        self._details[rank] = _read_details(keeper, wanted)
                    else:
                        with closing(connect(keeper)) as connection:
                            self._details[rank] = ask(connection, wanted, Details)
                except OSError as error:
                    problem = f"the snapshot of rank {rank} cannot be read: {error}"
                    raise BadCheckpointError(self.where, problem, ranks=(rank,)) from error
            return self._details[rank]


def _read_details(keeper: KeeperPlace, wanted: Detail) -> Details:
    root = Path(keeper.folder).parents[1]
    stored = find_record(root, wanted.rank, wanted.session, wanted.step)
    if stored is None:
        raise FileNotFoundError(2, "its record is gone", keeper.folder)
    return Details(stored.record.order, stored.record.sidecar)


class KeeperShard:
    """One rank's snapshot; every thread that reads has a connection of its own."""

    def __init__(self, chosen: RestoreCandidate, rank: int, size: int) -> None:
        self._chosen, self._rank, self.bytes = chosen, rank, size
        self._own = threading.local()
        self._all: list[ByteStream] = []

    def read(self, buffer: memoryview, offset: int) -> int:
        if not hasattr(self._own, "connection"):
            self._own.connection = connect(self._chosen.holders[self._rank][0])
            self._all.append(self._own.connection)
        session, step = self._chosen.session, self._chosen.step
        connection: ByteStream = self._own.connection
        on_disk = bool(self._chosen.holders[self._rank][0].folder)
        ask(
            connection,
            Fetch(self._rank, session, step, offset, len(buffer), on_disk),
            SnapshotBytes,
        )
        if not receive_into(connection, buffer):
            raise ConnectionError("the keeper ended in the middle of a snapshot")
        return len(buffer)

    def close(self) -> None:
        for connection in self._all:
            connection.close()


def connect(keeper: KeeperPlace) -> ByteStream:
    """To a keeper: by its socket on the same node, otherwise by TCP with its token."""
    if keeper.node == node_name():
        return _connect_unix(keeper.path)
    token = keeper.token or _shared_token()
    return channel.connect(keeper.host, keeper.port, token, ANSWER_SECONDS)


def _told(answer: KeeperInventory) -> bytes:
    """What the other ranks are told of a keeper's token: nothing, where their own keepers know it.

    Ranks speak over the job's network, which others may hear.
    """
    return b"" if answer.shared else answer.token


@cache
def _shared_token() -> bytes:
    """The token that all keepers of this job have, from the one on this node."""
    with _connect_unix(os.environ.get("PHALANX_KEEPER", "")) as connection:
        return ask(connection, AskSnapshots(), KeeperInventory).token


def _connect_unix(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(ANSWER_SECONDS)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection
