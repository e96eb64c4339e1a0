"""A team's quota: room is made from a run's own older checkpoints, or a save is refused."""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.checkpoint import Checkpointer, CheckpointError, latest, list_checkpoints
from phalanx.checkpoint.format.folder import used_bytes
from phalanx.checkpoint.format.tier import FolderTier
from phalanx.checkpoint.retention import RetentionPolicy
from phalanx.checkpoint.write.commit import ArchiveTier
from tests.checkpoint.keeper.test_process import CPU, extra
from tests.checkpoint.waiting import eventually
from tests.ranks import run_ranks

ONE = 1_000_000 * 4  # bytes of a checkpoint, but for its header


# The first rank refuses and clears the folder away, which another may be about to write into.
REFUSED = "above the quota|No such file or directory"


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"model.w": torch.full((1_000_000,), value)}


def folder_of(tmp_path: Path, run: str) -> Path:
    return tmp_path / "runs" / "job" / run / "checkpoints"


def opened(tmp_path: Path, run: str, checkpoints: float) -> Checkpointer:
    policy = RetentionPolicy(quota_bytes=int(checkpoints * (ONE + 5000)))
    return Checkpointer(folder_of(tmp_path, run), policy=policy)


def steps(tmp_path: Path, run: str) -> list[int]:
    return [int(path.name[5:13]) for path in list_checkpoints(folder_of(tmp_path, run))]


def test_room_is_made_before_the_next_one_is_written(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path, "a", 2)
    for step in (1, 2, 3, 4):
        checkpointer.save(step, state(), extra())
        assert used_bytes(folder_of(tmp_path, "a")) <= 2 * (ONE + 5000)
    assert steps(tmp_path, "a") == [3, 4]
    assert not list(folder_of(tmp_path, "a").glob("*/reserved"))


def test_a_save_above_the_quota_is_refused_and_the_newest_one_stays(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path, "a", 1.5)
    checkpointer.save(1, state(), extra())
    with pytest.raises(CheckpointError, match=r"above the quota.*\n.*phalanx ckpt prune"):
        checkpointer.save(2, state(), extra())
    assert [path.name for path in folder_of(tmp_path, "a").glob("step-*")] == ["step-00000001"]


def test_pinned_ones_are_not_made_room_of(tmp_path: Path) -> None:
    checkpointer = opened(tmp_path, "a", 2)
    pinned = checkpointer.save(1, state(), extra())
    (pinned / "pinned").touch()
    checkpointer.save(2, state(), extra())
    with pytest.raises(CheckpointError, match="above the quota"):
        checkpointer.save(3, state(), extra())
    assert steps(tmp_path, "a") == [1, 2]


def test_a_copy_above_the_archives_quota_is_refused_and_the_checkpoint_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "archive"
    (root / "other").mkdir(parents=True)
    (root / "other" / "file").write_bytes(bytes(ONE))
    policy = RetentionPolicy(quota_bytes=int(2.5 * (ONE + 5000)))
    archive = ArchiveTier(url=str(root / "job" / "run"), root=str(root), policy=policy)
    checkpointer = Checkpointer(tmp_path / "checkpoints", archive=archive)
    for step in (1, 2):
        checkpointer.save(step, state(), extra())
    assert "above the quota" in caplog.text and len(list_checkpoints(tmp_path / "checkpoints")) == 2
    assert FolderTier(root / "job" / "run").names() == ["step-00000001"]


def test_runs_of_a_team_share_a_quota_and_none_removes_anothers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the background, with two ranks: both are told, nothing is left, room is found again."""
    opened(tmp_path, "other", 3).save(7, state(), extra())

    def train() -> None:
        checkpointer = opened(tmp_path, "a", 2.5)
        tensors = state()  # copies, of which each rank writes a half
        assert checkpointer.prepare_background(
            tensors, generation=0, step=0, device=CPU, lease_seconds=60.0
        )
        checkpointer.save(1, tensors, extra())
        checkpointer.finish()
        for step in (2, 3):  # the second finds a refusal standing
            checkpointer.save(step, tensors, extra())
            told = []
            assert eventually(lambda told=told: bool(told.extend(checkpointer.poll()) or told))
            assert re.search(REFUSED, told[0].problem) and told[0].step == step
            dist.barrier()
        with pytest.raises(CheckpointError, match=REFUSED):
            checkpointer.finish()
        assert [p.name for p in folder_of(tmp_path, "a").glob("step-*")] == ["step-00000001"]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder_of(tmp_path, "other"))
        dist.barrier()
        checkpointer.save(4, tensors, extra())
        assert [outcome.step for outcome in checkpointer.finish()] == [4]
        checkpointer.close()

    with caplog.at_level(logging.ERROR):
        run_ranks(2, train)
    newest = latest(folder_of(tmp_path, "a"))
    assert newest is not None and newest.name == "step-00000004"
