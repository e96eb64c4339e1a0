"""Background saves: a keeper process writes what ranks handed over, whatever becomes of them."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from phalanx.checkpoint import Checkpointer, CheckpointError, Extra, latest, list_checkpoints
from phalanx.checkpoint.format.direct import CHUNK_BYTES, WRITE_BYTES, chunk_sums
from phalanx.checkpoint.keeper import snapshot_store as shelf
from phalanx.checkpoint.keeper.channel import HELLO_BYTES
from phalanx.checkpoint.keeper.messages import AskSnapshots, KeeperInventory, SaveOutcome
from phalanx.checkpoint.keeper.snapshot_store import HeldSnapshot, refuse_memory
from phalanx.checkpoint.keeper.wire import ask
from phalanx.checkpoint.write.commit import SaveOrder
from phalanx.control.agent.jobs.keeper_watch import keeper_port, save_kept
from phalanx.data import Cursor
from tests.checkpoint.waiting import eventually, keepers_below, newest_child
from tests.ranks import RankError, die_together, run_ranks

CPU = torch.device("cpu")


def extra(**fields: object) -> Extra:
    defaults = {"tokens": 1, "cursor": Cursor(), "mesh": {}, "config_hash": "h", "rng": b"dice"}
    return Extra(**{**defaults, **fields})


def state(value: float, rows: int = 4096) -> dict[str, torch.Tensor]:
    """1 MiB a copy, shared by two ranks, and a scalar."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    whole = torch.arange(rows * 64.0).view(rows, 64) + value
    scalar = torch.tensor(value)
    if mesh is None:
        return {"model.w": whole, "scale": scalar}
    parts = distribute_tensor(whole, mesh, [Shard(0)])
    return {
        "model.w": parts,
        "copy": distribute_tensor(whole, mesh, [Replicate()]),
        "scale": scalar,
    }


def prepared(folder: Path, tensors: dict[str, torch.Tensor], **settings: object) -> Checkpointer:
    checkpointer = Checkpointer(folder, keep=2)
    made = checkpointer.prepare_background(
        tensors, generation=0, step=0, device=CPU, lease_seconds=5.0, **settings
    )
    assert made
    return checkpointer


def keepers() -> list[psutil.Process]:
    return keepers_below(os.environ["XDG_RUNTIME_DIR"])


def test_state_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    def train() -> None:
        tensors = state(0.0)
        checkpointer = prepared(tmp_path, tensors)
        for step in range(1, 6):
            for tensor in tensors.values():
                tensor += 1
            checkpointer.save(step, tensors, extra())
        outcomes = checkpointer.finish()
        assert 5 in {o.step for o in outcomes} and not any(o.problem for o in outcomes)
        checkpointer.close()
        for path, value in zip(list_checkpoints(tmp_path), (4.0, 5.0), strict=True):
            loaded, expected = state(0.0), state(value)
            assert checkpointer.load(path, loaded).rng == b"dice"
            for name, tensor in loaded.items():
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                other = expected[name]
                assert torch.equal(whole, getattr(other, "full_tensor", lambda o=other: o)())

    run_ranks(2, train)
    assert eventually(lambda: not keepers())


def test_a_keeper_writes_what_only_memory_holds_when_no_worker_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    socket = tmp_path / "keeper"
    monkeypatch.setenv("PHALANX_KEEPER", str(socket))
    keeper = subprocess.Popen(
        [sys.executable, "-m", "phalanx.checkpoint.keeper.process", "--socket", str(socket)]
    )
    try:
        assert eventually(socket.exists)

        def train() -> None:
            tensors = state(7.0)
            checkpointer = prepared(tmp_path / "own", tensors, buffers=4, prompt=True)
            for step in (1, 2):
                checkpointer.save(step, tensors, extra(), write=False)
            checkpointer.wait_acknowledged()
            die_together()

        with pytest.raises(RankError):
            run_ranks(2, train)
        saved = asyncio.run(save_kept(socket, 2, tmp_path / "saved"))
        assert not saved.problem and latest(tmp_path / "saved") == Path(saved.path)
        loaded = {"model.w": torch.zeros(4096, 64), "scale": torch.zeros(())}
        assert Checkpointer(tmp_path / "saved").load(Path(saved.path), loaded).step == 2
        assert loaded["scale"] == 7.0
        missing = asyncio.run(save_kept(socket, 9, tmp_path / "saved"))
        assert "step 9 is not in this node's memory" in missing.problem
    finally:
        keeper.kill()
        keeper.wait()


def test_what_was_handed_over_is_committed_although_the_worker_is_killed(tmp_path: Path) -> None:
    def train() -> None:
        tensors = state(7.0)
        checkpointer = prepared(tmp_path, tensors)
        checkpointer.save(3, tensors, extra())
        die_together()

    with pytest.raises(RankError):
        run_ranks(2, train)
    assert eventually(lambda: latest(tmp_path) is not None)
    loaded = {"model.w": torch.zeros(4096, 64), "scale": torch.zeros(())}
    assert Checkpointer(tmp_path).load(tmp_path / "step-00000003", loaded).step == 3
    assert loaded["scale"] == 7.0 and loaded["model.w"][-1, -1] == 4096 * 64 - 1 + 7.0
    assert eventually(lambda: not keepers())  # no orphan stays


def test_a_worker_killed_before_the_hand_over_leaves_nothing_that_looks_complete(
    tmp_path: Path,
) -> None:
    def train() -> None:
        tensors = state(7.0)
        checkpointer = prepared(tmp_path, tensors)
        if dist.get_rank() == 0:
            checkpointer.save(3, tensors, extra())
        die_together()

    with pytest.raises(RankError):
        run_ranks(2, train)
    assert eventually(lambda: not keepers())  # after its lease
    assert list_checkpoints(tmp_path) == []


def test_a_full_disk_is_told_while_training_goes_on_and_the_older_checkpoint_stays(
    tmp_path: Path,
) -> None:
    tensors = state(1.0)
    checkpointer = prepared(tmp_path, tensors)
    checkpointer.save(1, tensors, extra())
    checkpointer.finish()
    keeper = newest_child()
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(keeper.pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    checkpointer.save(2, tensors, extra())
    told = []
    assert eventually(lambda: bool(told.extend(checkpointer.poll()) or told))
    assert "File too large" in told[0].problem and told[0].step == 2
    with pytest.raises(CheckpointError, match="File too large"):
        checkpointer.finish()
    assert list_checkpoints(tmp_path) == [tmp_path / "step-00000001"]
    assert not list((tmp_path / "step-00000002").glob("*.safetensors"))
    resource.prlimit(keeper.pid, resource.RLIMIT_FSIZE, unlimited)
    checkpointer.save(3, tensors, extra())
    assert [outcome.step for outcome in checkpointer.finish()] == [3]
    checkpointer.close()


def kill_keepers() -> None:
    for keeper in keepers():
        keeper.kill()
        keeper.wait()


def test_a_killed_keeper_costs_what_it_had_and_the_next_save_starts_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = state(1.0)
    checkpointer = prepared(tmp_path, tensors)
    checkpointer.save(1, tensors, extra())
    checkpointer.finish()
    kill_keepers()
    assert checkpointer.poll() == []  # training goes on
    for step in (2, 3):
        checkpointer.save(step, tensors, extra())
    assert "another one is started" in caplog.text
    assert [(o.step, o.problem) for o in checkpointer.finish()] == [(2, ""), (3, "")]
    checkpointer.close()


def test_a_save_that_a_killed_keeper_had_is_told_as_failed(tmp_path: Path) -> None:
    tensors = state(1.0)
    checkpointer = prepared(tmp_path, tensors)
    for keeper in keepers():
        keeper.suspend()  # it has the save and cannot write it
    checkpointer.save(1, tensors, extra())
    kill_keepers()
    told: list[SaveOutcome] = []
    assert eventually(lambda: bool(told.extend(checkpointer.poll()) or told))
    assert told[0].step == 1 and "keeper process of this node is gone" in told[0].problem
    checkpointer.save(2, tensors, extra())
    assert [outcome.step for outcome in checkpointer.finish()] == [2]
    checkpointer.close()


def test_a_killed_keeper_that_somebody_supervises_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = state(1.0)
    checkpointer = prepared(tmp_path, tensors)
    monkeypatch.setenv("PHALANX_KEEPER", "theirs")
    kill_keepers()
    with pytest.raises(CheckpointError, match="keeper process of this node is gone"):
        checkpointer.save(1, tensors, extra())
    checkpointer.close()


def test_with_one_buffer_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    tensors = state(1.0)
    checkpointer = prepared(tmp_path, tensors, buffers=1)
    for step in (1, 2, 3):
        checkpointer.save(step, tensors, extra())
    outcomes = checkpointer.finish()
    assert [outcome.step for outcome in outcomes] == [1, 2, 3]
    checkpointer.close()


def test_without_memory_saves_are_synchronous(tmp_path: Path) -> None:
    assert "are free" in refuse_memory(1 << 60) and not refuse_memory(4096)
    tensors = {"model.w": torch.ones(16)}
    checkpointer = Checkpointer(tmp_path)
    made = checkpointer.prepare_background(
        tensors, generation=0, step=0, device=CPU, buffers=1 << 40, lease_seconds=1.0
    )
    assert not made and not checkpointer.in_background
    assert checkpointer.save(1, tensors, extra()) == latest(tmp_path)


def kill_keepers_at_random(folder: Path, points: int) -> None:
    """SIGKILL of the keeper, then of its worker, at a random time in a series of saves."""
    generator = random.Random(11)
    for point in range(points):
        target = folder / str(point)
        child = os.fork()
        if child == 0:
            try:
                tensors = state(0.0, rows=16384)
                checkpointer = prepared(target, tensors)
                for step in range(1, 1000):
                    for tensor in tensors.values():
                        tensor += 1
                    checkpointer.save(step, tensors, extra())
            finally:
                os._exit(1)
        assert eventually(lambda folder=target: latest(folder) is not None)
        time.sleep(generator.uniform(0.0, 0.3))
        for process in keepers():
            process.kill()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert eventually(lambda: not keepers())
        listed = list_checkpoints(target)
        assert listed
        for path in listed:
            loaded = {"model.w": torch.zeros(16384, 64), "scale": torch.zeros(())}
            number = Checkpointer(target).load(path, loaded).step
            assert loaded["scale"] == number and loaded["model.w"][0, 0] == number
        after = Checkpointer(target, keep=1)
        after.save(5000, {"model.w": torch.ones(4)}, extra())  # sweeps what was left
        after.close()
        assert [path.name for path in target.glob("step-*")] == ["step-00005000"]
        shutil.rmtree(target)


def test_a_keeper_killed_at_random_points_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    kill_keepers_at_random(tmp_path, points=3)


@pytest.mark.soak
def test_a_keeper_killed_at_200_random_points_leaves_only_whole_checkpoints(
    tmp_path: Path,
) -> None:
    kill_keepers_at_random(tmp_path, points=200)


def test_a_read_only_folder_is_told_in_words(tmp_path: Path) -> None:
    def refused(*_: object, **__: object) -> int:
        raise PermissionError(errno.EROFS, "Read-only file system", str(tmp_path))

    # As root every folder may be written: the file system has to say no.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.checkpoint.format.folder.os.open", refused)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            Checkpointer(tmp_path).save(1, {"x": torch.ones(2)}, extra())


def test_checksums_by_several_threads_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    content = memoryview(os.urandom(2 * WRITE_BYTES + 3 * CHUNK_BYTES + 123))
    order = SimpleNamespace(sidecar=SimpleNamespace(shard_bytes=len(content) - 100))
    held = HeldSnapshot(cast(SaveOrder, order), content, replica=False)
    held.fill(len(content))
    alone = shelf.sums_of(held)
    monkeypatch.setattr(shelf, "THREADED_BYTES", 1)
    assert shelf.sums_of(held) == alone == np.array(chunk_sums(content[:-100]), "<u4").tobytes()


def test_a_keeper_without_descriptors_for_a_while_keeps_what_it_has(tmp_path: Path) -> None:
    """Whoever connects meanwhile is served later, from this node and from others."""
    path, said = tmp_path / "keeper", tmp_path / "said"
    command = [sys.executable, "-m", "phalanx.checkpoint.keeper.process", "--socket", str(path)]
    with said.open("w") as log, subprocess.Popen(command, stderr=log) as keeper:
        try:
            assert eventually(path.exists)
            port = asyncio.run(keeper_port(path))
            before = resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, (3, before[1]))
            with (
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as worker,
                socket.create_connection(("127.0.0.1", port), 90.0) as peer,
            ):
                worker.connect(str(path))
                assert eventually(lambda: said.read_text().count("nobody can connect") >= 2)
                resource.prlimit(keeper.pid, resource.RLIMIT_NOFILE, before)
                assert len(peer.recv(HELLO_BYTES)) == HELLO_BYTES
                worker.settimeout(90.0)
                assert ask(worker, AskSnapshots(), KeeperInventory).port == port
        finally:
            keeper.kill()
