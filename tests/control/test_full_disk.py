"""A server that starts on a full disk says so, loses nothing, and starts when there is room."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.control.damage import ALL_JOBS, fill, start

DISK_BYTES = 4 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB; only root can make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def leave(disk: Path, free_bytes: int) -> Path:
    """A file that takes all room of a disk but so much."""
    ballast = disk / "ballast"
    room = os.statvfs(disk)
    with ballast.open("wb") as file:
        file.write(bytes(max(0, room.f_bavail * room.f_frsize - free_bytes)))
    return ballast


@pytest.mark.parametrize("killed", [True, False])
def test_a_start_on_a_full_disk_is_refused_and_loses_nothing(
    small_disk: Path, tmp_path: Path, killed: bool
) -> None:
    source, state = tmp_path / "source", small_disk / "state"
    fill(source, killed=killed)
    for left in range(0, 300 << 10, 28 << 10):  # so that each step of a start finds no room once
        shutil.copytree(source, state, ignore=shutil.ignore_patterns("*-shm"))
        ballast = leave(small_disk, left)
        found = start(state)
        assert found.refusal or found.jobs == ALL_JOBS, left
        if not left:
            assert "the disk is full: make room in" in found.refusal
        ballast.unlink()
        assert start(state).jobs == ALL_JOBS, left
        shutil.rmtree(state)


def test_the_command_ends_with_a_sentence(small_disk: Path, tmp_path: Path) -> None:
    fill(tmp_path / "source", killed=True)
    state = Path(shutil.copytree(tmp_path / "source", small_disk / "state"))
    for path in state.glob("*-shm"):
        path.unlink()
    ballast = leave(small_disk, 0)
    command = [sys.executable, "-m", "phalanx", "up", "--state", str(state), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith("error: ") and "the disk is full" in done.stderr
    ballast.unlink()
    assert start(state).jobs == ALL_JOBS


def test_a_first_start_without_room_makes_no_token_that_nobody_has(small_disk: Path) -> None:
    for left in range(0, 400 << 10, 20 << 10):
        state = small_disk / "state"
        ballast = leave(small_disk, left)
        start(state)
        ballast.unlink()
        assert not start(state).refusal and (state / "admin.token").exists(), left
        shutil.rmtree(state)
