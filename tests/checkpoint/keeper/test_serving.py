"""A shard that is durable stays, whatever fails behind it: others may commit it already."""

from __future__ import annotations

import errno
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from msgspec import structs

from phalanx.checkpoint.format.manifest import MANIFEST_FILE, shard_name
from phalanx.checkpoint.keeper import serving
from phalanx.checkpoint.keeper.messages import Archived, Durable, Failed
from phalanx.checkpoint.keeper.open_saves import OpenSaves
from phalanx.checkpoint.keeper.serving import WorkerPeer
from phalanx.checkpoint.keeper.snapshot_store import Region, SnapshotStore, sums_of
from phalanx.checkpoint.write.commit import ArchiveTier, seen_shards, try_commit
from tests.checkpoint.keeper.test_snapshot_store import replica

if TYPE_CHECKING:
    from phalanx.checkpoint.keeper.process import Keeper

BYTES = 5000


class OneWorker:
    """A keeper's end of the connection to the worker of rank 0 of two, and what that is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[object] = []
        self.busy = 1
        keeper = SimpleNamespace(
            snapshots=SnapshotStore(),
            saves=OpenSaves(),
            leaving=threading.Event(),
            took=self._took,
            rested=self._rested,
            finished=lambda *_, **__: self._rested(),
        )
        ours, self._theirs = socket.socketpair()
        self.peer = WorkerPeer(cast("Keeper", keeper), ours)
        monkeypatch.setattr(self.peer, "tell", self.told.append)
        archive = ArchiveTier(url=f"file://{folder}/archive")
        self.orders = [self._order(folder / "step-00000001", rank, archive) for rank in (0, 1)]
        region = Region(BYTES, 2)
        self.snapshots = [region.begin(rank, order) for rank, order in enumerate(self.orders)]
        for snapshot in self.snapshots:
            snapshot.memory[:BYTES] = os.urandom(BYTES)
            snapshot.fill(BYTES)
            snapshot.seal(sums_of(snapshot))

    def _took(self) -> None:
        self.busy += 1

    def _rested(self) -> None:
        self.busy -= 1

    def _order(self, path: Path, rank: int, archive: ArchiveTier) -> serving.SaveOrder:
        plain = replica(step=1)
        return structs.replace(
            plain,
            path=str(path),
            draft=structs.replace(plain.draft, world_size=2),
            sidecar=structs.replace(plain.sidecar, rank=rank, shard_bytes=BYTES),
            archive=archive if rank == 0 else None,
        )

    def of_kind(self, kind: type) -> list[object]:
        return [each for each in self.told if isinstance(each, kind)]


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneWorker:
    return OneWorker(tmp_path, monkeypatch)


@pytest.mark.parametrize("prompt", [True, False])
def test_a_copy_that_cannot_begin_costs_no_checkpoint(
    worker: OneWorker, monkeypatch: pytest.MonkeyPatch, prompt: bool
) -> None:
    def copy(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(serving, "Copy", copy)
    first, second = worker.snapshots
    work = worker.peer._write_sealed if prompt else worker.peer._keep
    worker.peer._write_sealed(1, second)
    work(0, first)
    (archived,) = worker.of_kind(Archived)
    assert isinstance(archived, Archived) and "Too many open files" in archived.problem
    assert len(worker.of_kind(Durable)) == 2 and not worker.of_kind(Failed)
    assert (Path(first.order.path) / MANIFEST_FILE).exists()


def test_a_shard_that_others_may_commit_is_not_taken_away(
    worker: OneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sidecar can be seen, and then the disk fails."""
    first, second = worker.snapshots
    path = Path(first.order.path)
    publish = worker.peer.keeper.saves.publish

    def fail_behind(*arguments: object) -> None:
        publish(*arguments)  # type: ignore[arg-type]
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(worker.peer.keeper.saves, "publish", fail_behind)
    with pytest.raises(OSError, match="Input/output"):
        worker.peer._write_sealed(0, first)
    worker.peer._give_up(0, first, OSError(errno.EIO, "Input/output error"))
    assert set(seen_shards(path, "s")) == {0} and (path / shard_name(0, "s")).exists()
    monkeypatch.setattr(worker.peer.keeper.saves, "publish", publish)
    worker.peer._write_sealed(1, second)
    assert try_commit(second.order)


def test_what_nobody_can_see_yet_goes_with_a_save_that_failed(worker: OneWorker) -> None:
    (snapshot, _) = worker.snapshots
    path = Path(snapshot.order.path)
    path.mkdir()
    (path / shard_name(0, "s")).write_bytes(b"a part")
    worker.peer._give_up(0, snapshot, OSError(errno.ENOSPC, "No space left on device"))
    assert not path.exists() and worker.of_kind(Failed)
