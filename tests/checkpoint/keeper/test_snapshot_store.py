"""Replicas in a keeper's memory: which of them stay until a newer one is whole."""

from __future__ import annotations

from phalanx.checkpoint.format.manifest import VERSION, Manifest
from phalanx.checkpoint.format.shard import Sidecar
from phalanx.checkpoint.keeper.snapshot_store import SnapshotStore
from phalanx.checkpoint.retention import RetentionPolicy
from phalanx.checkpoint.write.commit import SaveOrder
from phalanx.data.order.cursor import Cursor


def replica(step: int, generation: int = 1) -> SaveOrder:
    """A rank's snapshot of a step, as another node's keeper sends it."""
    draft = Manifest(
        version=VERSION,
        step=step,
        generation=generation,
        tokens=0,
        cursor=Cursor(),
        mesh={},
        world_size=1,
        config_hash="",
        created="",
        session="s",
        groups=(),
    )
    side = Sidecar(
        rank=0, step=step, generation=generation, session="s", shard_bytes=8, header_bytes=0
    )
    return SaveOrder(path="", policy=RetentionPolicy(), draft=draft, sidecar=side)


def kept(store: SnapshotStore) -> set[int]:
    """Steps that may be restored."""
    return {held.order.draft.step for held in store.sealed()}


def test_the_newest_replica_stays_until_the_next_one_is_whole() -> None:
    store = SnapshotStore()
    for step in (1, 2, 3):
        store.receive(replica(step)).seal(b"")
    store.receive(replica(4))
    assert kept(store) == {3}


def test_a_generation_that_restored_again_keeps_nothing_of_its_first_branch() -> None:
    store = SnapshotStore()
    store.receive(replica(20)).seal(b"")
    for step in (10, 11):
        store.receive(replica(step)).seal(b"")
        assert 20 not in kept(store)
    store.receive(replica(12))
    assert kept(store) == {11}  # the buffer of the given up step is used, not that of the newest


def test_the_next_generation_may_begin_before_the_steps_of_the_last() -> None:
    store = SnapshotStore()
    for step in (19, 20):
        store.receive(replica(step)).seal(b"")
    store.receive(replica(10, generation=2))
    assert kept(store) == {20}  # it may be what others restore, until the next one runs
