"""The nodes' own disks: written without a shared folder, found again by all nodes together."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from phalanx.checkpoint import Checkpointer, list_checkpoints
from phalanx.checkpoint.keeper.start import home_of
from phalanx.checkpoint.read.verify import verify
from phalanx.checkpoint.retention import RetentionPolicy
from phalanx.checkpoint.tools.inspect import describe, find
from phalanx.checkpoint.write.commit import LocalDisk
from phalanx.checkpoint.write.node_disk import find_records
from phalanx.cli.checkpoints.output import state_text
from tests.checkpoint.read.test_memory import (
    CPU,
    assert_value,
    become,
    end,
    extra,
    keepers_of,
    state,
)
from tests.checkpoint.waiting import eventually, keepers_below
from tests.ranks import RankError, die_together, run_ranks


def disk(tmp_path: Path, node: int) -> Path:
    return tmp_path / f"disk{node}" / "job"


def save_and_die(tmp_path: Path, *, steps: int = 3, local: LocalDisk | None = None) -> None:
    """Two nodes of one rank each save to their own disks, and are killed."""

    def train() -> None:
        rank = dist.get_rank()
        become(rank)
        tensors = state(0.0)
        target = local or LocalDisk(root=str(disk(tmp_path, rank)), run="run-1")
        checkpointer = Checkpointer(tmp_path / "checkpoints", local=target)
        assert checkpointer.prepare_background(
            tensors,
            generation=0,
            step=0,
            device=CPU,
            lease_seconds=60.0,
            home=home_of(str(tmp_path)),
        )
        for step in range(1, steps + 1):
            for tensor in tensors.values():
                tensor += 1
            checkpointer.save(step, tensors, extra(rank), write=False)
        checkpointer._background.wait_durable()  # type: ignore[union-attr]
        die_together()

    with pytest.raises(RankError):
        run_ranks(2, train)


def restore(tmp_path: Path, expected: int | None, nodes: tuple[int, int] = (0, 1)) -> None:
    """Ranks 0 and 1 come up on these nodes."""

    def load() -> None:
        node = nodes[dist.get_rank()]
        become(node)
        tensors, home = state(-100.0), home_of(str(tmp_path))
        loader = Checkpointer(tmp_path / "checkpoints")
        manifest = loader.load_memory(home, tensors, local=disk(tmp_path, node))
        loader.release_memory(home)
        if expected is None:
            assert manifest is None
            return
        assert manifest is not None and manifest.step == expected
        assert manifest.rng == b"dice%d" % dist.get_rank()
        assert_value(tensors, expected)

    run_ranks(2, load)


@pytest.mark.parametrize("nodes", [(0, 1), (1, 0)])
def test_nodes_without_keepers_continue_from_their_disks_whoever_is_where(
    tmp_path: Path, runtime: Path, nodes: tuple[int, int]
) -> None:
    save_and_die(tmp_path)
    end(keepers_below(str(runtime)))
    assert not list((tmp_path / "checkpoints").glob("step-*"))
    restore(tmp_path, 3, nodes)
    assert eventually(lambda: not keepers_below(str(runtime)))  # nor the one that read for others


def test_memory_of_one_node_and_the_disk_of_another_make_a_whole(tmp_path: Path) -> None:
    save_and_die(tmp_path)
    end(keepers_of(tmp_path, "node1"))
    restore(tmp_path, 3)


def test_a_lost_disk_leaves_nothing_whole(tmp_path: Path, runtime: Path) -> None:
    save_and_die(tmp_path)
    end(keepers_below(str(runtime)))
    for path in disk(tmp_path, 1).rglob("*.safetensors"):
        path.unlink()
    restore(tmp_path, None)


def test_a_corrupt_shard_gives_way_to_an_older_step_and_is_not_tried_again(
    tmp_path: Path, runtime: Path
) -> None:
    save_and_die(tmp_path)
    end(keepers_below(str(runtime)))
    (shard,) = disk(tmp_path, 1).glob("*/step-00000003/*.safetensors")
    with shard.open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"\x7f")
    restore(tmp_path, 2)
    left = [found.record.order.draft.step for found in find_records(disk(tmp_path, 1))]
    assert sorted(left) == [1, 2]


def test_each_node_keeps_what_its_policy_says_and_clears_older_runs(tmp_path: Path) -> None:
    def names(run: str) -> list[str]:
        return sorted(path.name for path in (tmp_path / "disk" / run).glob("step-*"))

    for run, first in (("run-1", 1), ("run-2", 11)):
        policy = RetentionPolicy(last=2, every=10)
        target = LocalDisk(root=str(tmp_path / "disk"), run=run, policy=policy)
        checkpointer = Checkpointer(tmp_path / run, local=target)
        for step in range(first, first + 10):
            checkpointer.save(step, {"model.w": torch.ones(3000)}, extra())
        checkpointer.close()
    assert names("run-1") == []
    assert names("run-2") == ["step-00000019", "step-00000020"]


def test_ls_shows_what_a_node_has_as_parts(tmp_path: Path) -> None:
    save_and_die(tmp_path, steps=1)
    (found,) = [describe(tier, name) for tier, name in find(str(disk(tmp_path, 0)))]
    assert (found.step, found.parts, found.problems) == (1, 1, [])
    assert (found.tokens, found.ranks, found.mesh, found.shards) == (5, 2, {"data": 2}, 1)
    assert found.created and state_text(found) == "1 of 2 ranks"
    assert not verify(found.path, lambda _: None).problems
    (shard,) = Path(found.path).glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert verify(found.path, lambda _: None).problems == [f"{shard.name} is not what was written"]


def test_a_node_disk_over_its_quota_or_broken_costs_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    small = LocalDisk(
        root=str(tmp_path / "disk"), run="r", policy=RetentionPolicy(last=3, quota_bytes=30_000)
    )
    broken = LocalDisk(root=str(tmp_path / "file"), run="r")
    for number, (target, problem) in enumerate(((small, "quota_gb"), (broken, "Not a directory"))):
        checkpointer = Checkpointer(tmp_path / str(number), local=target)
        tensors = {"model.w": torch.ones(3000)}
        assert checkpointer.prepare_background(
            tensors, generation=0, step=0, device=CPU, lease_seconds=60.0
        )
        with caplog.at_level(logging.ERROR):
            for step in (1, 2, 3):
                checkpointer.save(step, tensors, extra())
            assert [outcome.step for outcome in checkpointer.finish()] == [1, 2, 3]
        checkpointer.close()
        assert problem in caplog.text and len(list_checkpoints(tmp_path / str(number))) == 3
        caplog.clear()
    assert len(list((tmp_path / "disk").glob("r/step-*"))) == 1
