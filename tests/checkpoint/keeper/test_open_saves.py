"""Saves that a keeper's end leaves without a shard, and those that others may complete."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from phalanx.checkpoint.format.manifest import MANIFEST_FILE
from phalanx.checkpoint.keeper.open_saves import OpenSaves
from phalanx.checkpoint.write.commit import SaveOrder
from tests.checkpoint.keeper.test_snapshot_store import replica


def begun(saves: OpenSaves, path: Path, rank: int = 0, *, write: bool = True) -> SaveOrder:
    path.mkdir(exist_ok=True)
    (path / f"rank-{rank:05d}.s.bin").write_bytes(b"a part")
    plain = replica(step=1)
    side = structs.replace(plain.sidecar, rank=rank)
    order = structs.replace(plain, path=str(path), sidecar=side, write=write)
    saves.begin(order)
    return order


def test_what_lacks_a_shard_goes_and_what_others_may_complete_stays(tmp_path: Path) -> None:
    saves = OpenSaves()
    paths = [tmp_path / f"step-{step:08d}" for step in range(1, 6)]
    lacking, ours, failed, kept, complete = paths
    first, second = begun(saves, lacking, 0), begun(saves, lacking, 1)
    saves.publish(first, first.sidecar)
    whole = begun(saves, ours)
    saves.publish(whole, whole.sidecar)
    saves.end(begun(saves, failed))  # its ranks have withdrawn it themselves
    begun(saves, kept, write=False)  # in memory alone
    begun(saves, complete)
    (complete / MANIFEST_FILE).write_text("another session's")
    assert saves.commits()
    saves.abandon()
    assert sorted(tmp_path.iterdir()) == [ours, failed, kept, complete]
    with pytest.raises(OSError, match="its job is over"):
        saves.publish(second, second.sidecar)
    saves.end(whole)
    saves.end(first)
    assert not saves.commits()
