"""What a save may take: memory, the speed of a shared file system, and training's time."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from phalanx.checkpoint import Checkpointer
from phalanx.checkpoint.format import direct
from phalanx.checkpoint.format.direct import WriteRate
from phalanx.checkpoint.keeper.background import OVERLAP_BYTES
from phalanx.checkpoint.write import commit
from phalanx.checkpoint.write.snapshot import ShardSnapshot
from tests.checkpoint.keeper.test_process import CPU, extra
from tests.checkpoint.waiting import newest_child
from tests.ranks import run_ranks


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0.0
        self.now += seconds


def test_writes_are_held_to_their_rate_and_idle_time_is_not_saved_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(direct, "time", clock)
    pace = WriteRate(bytes_per_second=100.0)
    for _ in range(10):
        pace.wait(50)
    assert clock.now == pytest.approx(4.5)  # the last one's bytes are paid for by the next
    clock.now = 100.0
    for _ in range(3):
        pace.wait(50)
    assert clock.now == pytest.approx(101.0)
    WriteRate().wait(1 << 40)
    assert clock.now == pytest.approx(101.0)


def test_ranks_start_writing_one_after_the_other(tmp_path: Path) -> None:
    def save() -> list[float]:
        slept: list[float] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(commit, "time", SimpleNamespace(sleep=slept.append))
            Checkpointer(tmp_path, stagger_seconds=8.0).save(1, {"x": torch.ones(4)}, extra())
        return slept

    found = run_ranks(4, save)
    assert [slept[0] for slept in found] == [0.0, 2.0, 4.0, 6.0]


def anonymous_bytes(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_one_buffer_takes_no_more_host_memory_than_a_tenth_above_the_shard(
    tmp_path: Path,
) -> None:
    tensors = {"model.w": torch.ones(40_000_000)}
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.prepare_background(
        tensors, generation=0, step=0, device=CPU, buffers=1, lease_seconds=60.0
    )
    keeper = newest_child()
    processes = [psutil.Process(), keeper]
    before = sum(map(anonymous_bytes, processes))
    for step in (1, 2):
        checkpointer.save(step, tensors, extra())
    checkpointer.finish()
    grown = sum(map(anonymous_bytes, processes)) - before
    descriptors = Path(f"/proc/{keeper.pid}/fd").iterdir()
    files = [path.stat() for path in descriptors if "phalanx-snapshot" in str(path.readlink())]
    shared = sum({file.st_ino: file.st_size for file in files}.values())
    checkpointer.close()
    shard_bytes = tensors["model.w"].nbytes
    assert shared >= shard_bytes and shared + grown <= 1.1 * shard_bytes


STREAMED = """
import resource, sys
from pathlib import Path
import torch
from phalanx.checkpoint import Checkpointer, Extra
from phalanx.data import Cursor

tensors = {"model.w": torch.ones(40_000_000)}
extra = Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="")
status = Path("/proc/self/status").read_text().splitlines()
data = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data + int(sys.argv[2]),) * 2)
Checkpointer(Path(sys.argv[1])).save(1, tensors, extra)
"""


def test_a_synchronous_save_streams_through_less_than_the_shard(tmp_path: Path) -> None:
    """160 MB through 64 MiB that the kernel enforces, stacks of threads included."""
    command = [sys.executable, "-c", STREAMED, str(tmp_path), str(64 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "step-00000001" / "manifest.json").exists()


def test_with_overlap_a_save_returns_before_its_copy_and_an_update_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"model.w": torch.ones(OVERLAP_BYTES // 4)}
    checkpointer = Checkpointer(tmp_path)
    assert checkpointer.prepare_background(
        tensors, generation=0, step=0, device=CPU, lease_seconds=60.0, overlap=True
    )
    may_copy, copied = threading.Event(), ShardSnapshot.copy_into

    def copy_late(self: ShardSnapshot, *arguments: object) -> None:
        assert may_copy.wait(90)
        copied(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ShardSnapshot, "copy_into", copy_late)
    path = checkpointer.save(1, tensors, extra())
    threading.Timer(0.2, may_copy.set).start()
    checkpointer.before_update()
    assert may_copy.is_set() and checkpointer.waited_seconds > 0
    tensors["model.w"].zero_()
    checkpointer.finish()
    checkpointer.close()
    Checkpointer(tmp_path).load(path, tensors)
    assert bool((tensors["model.w"] == 1).all())
