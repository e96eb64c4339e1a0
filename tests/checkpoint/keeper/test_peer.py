"""Replicas that other keepers send: one that stands still on its way harms no other."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
from msgspec import structs

from phalanx.checkpoint.format.direct import CHUNK_BYTES, chunk_sums
from phalanx.checkpoint.format.shard import Sidecar
from phalanx.checkpoint.keeper.messages import Put, Taken
from phalanx.checkpoint.keeper.peer import KeeperPeer
from phalanx.checkpoint.keeper.snapshot_store import HeldSnapshot, SnapshotStore, sums_of
from phalanx.checkpoint.keeper.wire import expect, send
from tests.checkpoint.keeper.test_snapshot_store import replica
from tests.checkpoint.waiting import eventually

if TYPE_CHECKING:
    from phalanx.checkpoint.keeper.process import Keeper

SIZE = 2 * CHUNK_BYTES


class OneKeeper:
    """A keeper's memory, and the connections of other keepers to it."""

    def __init__(self) -> None:
        self.store = SnapshotStore()
        self.noted: list[HeldSnapshot] = []

    def meet(self) -> socket.socket:
        """A connection to it."""
        ours, theirs = socket.socketpair()
        keeper = SimpleNamespace(snapshots=self.store, note=self.noted.append)
        peer = KeeperPeer(cast("Keeper", keeper), theirs)
        threading.Thread(target=peer.serve, daemon=True).start()
        ours.settimeout(60.0)
        return ours


def put(connection: socket.socket, step: int, generation: int) -> bytes:
    """Announce a snapshot; returns its bytes."""
    data = os.urandom(SIZE)
    order = replica(step, generation)
    side = structs.replace(order.sidecar, shard_bytes=SIZE)
    sums = np.array(chunk_sums(memoryview(data)), "<u4").tobytes()
    send(connection, Put(structs.replace(order, sidecar=side), structs.replace(side, sums=sums)))
    return data


def held(store: SnapshotStore, step: int) -> tuple[HeldSnapshot, Sidecar]:
    found = store.find(0, "s", step)
    assert found is not None and found.sidecar is not None
    return found, found.sidecar


def arrived(store: SnapshotStore, data: bytes) -> bool:
    """Whether the beginning of a replica is there, sealed or not."""
    return any(bytes(each.memory[: len(data)]) == data for each in store._all())


def test_a_replica_that_goes_on_late_does_not_overwrite_the_one_that_took_its_place() -> None:
    """Its sender stood still in the middle; meanwhile another generation came as far, and further.

    The order of memory is the same for both: nothing may be written by whoever lost it.
    """
    keeper = OneKeeper()
    late, prompt = keeper.meet(), keeper.meet()
    data = put(late, step=20, generation=1)
    late.sendall(data[: SIZE // 2])
    assert eventually(lambda: arrived(keeper.store, data[: SIZE // 2]))
    newer = put(prompt, step=21, generation=2)
    prompt.sendall(newer)
    expect(prompt, Taken)
    with suppress(OSError):  # nobody wants it any more
        late.sendall(data[SIZE // 2 :])
        expect(late, Taken)
    found, side = held(keeper.store, 21)
    assert bytes(found.memory[:SIZE]) == newer and sums_of(found) == side.sums
    assert [each.order.draft.step for each in keeper.noted] == [21]
    for each in (late, prompt):
        each.close()
