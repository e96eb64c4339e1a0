"""The server's log, damaged at every boundary: of its WAL's frames, and of its records."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.control.damage import ALL_JOBS, LOG, fill, flip, start
from tests.control.sql import change_file

pytestmark = pytest.mark.soak
HEADER_BYTES, FRAME_HEADER_BYTES = 32, 24  # of a WAL, and of each page in it
FRAME_BYTES = FRAME_HEADER_BYTES + 4096
EVENTS = 32  # that a server of 30 jobs has stored


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of a server that was killed, with every job in its WAL."""
    state = tmp_path_factory.mktemp("log") / "state"
    fill(state, killed=True)
    return state


def frames(wal: Path) -> int:
    return (wal.stat().st_size - HEADER_BYTES) // FRAME_BYTES


def cut(wal: Path, at: int) -> None:
    os.truncate(wal, at)


def zero(wal: Path, at: int) -> None:
    with wal.open("r+b") as file:
        file.seek(at)
        file.write(bytes(FRAME_BYTES))


def take_out(wal: Path, at: int) -> None:
    data = wal.read_bytes()
    wal.write_bytes(data[:at] + data[at + FRAME_BYTES :])


def double(wal: Path, at: int) -> None:
    data = wal.read_bytes()
    wal.write_bytes(data[: at + FRAME_BYTES] + data[at:])


def flip_header(wal: Path, at: int) -> None:
    flip(wal, at + 3, 0)


def flip_page(wal: Path, at: int) -> None:
    flip(wal, at + FRAME_HEADER_BYTES + 100, 5)


def lost_silently(state: Path) -> bool:
    """Whether a server starts on it as if nothing were wrong, and lacks jobs."""
    found = start(state)
    shutil.rmtree(state)
    return not found.refusal and found.jobs != ALL_JOBS


@pytest.mark.parametrize("harm", [cut, zero, take_out, double, flip_header, flip_page])
def test_no_damage_at_a_frame_of_the_wal_loses_a_job_silently(
    killed: Path, tmp_path: Path, harm: Callable[[Path, int], None]
) -> None:
    count = frames(killed / f"{LOG}-wal")
    assert count > 2 * EVENTS
    bad = []
    for number in range(count):
        state = Path(shutil.copytree(killed, tmp_path / "state"))
        harm(state / f"{LOG}-wal", HEADER_BYTES + number * FRAME_BYTES)
        if lost_silently(state):
            bad.append(number)
    assert bad == []


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM events WHERE sequence = {n}",
        "DELETE FROM events WHERE sequence >= {n}",
        "UPDATE events SET body = (SELECT body FROM events WHERE sequence = {n} % 32 + 1) "
        "WHERE sequence = {n}",
        "UPDATE events SET time_ns = time_ns + 1 WHERE sequence = {n}",
        "UPDATE events SET chain = zeroblob(16) WHERE sequence = {n}",
        "UPDATE events SET sequence = 1000 WHERE sequence = {n}",
    ],
)
def test_no_damage_of_a_record_loses_a_job_silently(
    killed: Path, tmp_path: Path, statement: str
) -> None:
    bad = []
    for number in range(1, EVENTS + 1):
        state = Path(shutil.copytree(killed, tmp_path / "state"))
        change_file(state / LOG, statement.format(n=number))
        if lost_silently(state):
            bad.append(number)
    assert bad == []


def test_an_older_copy_of_the_log_beside_a_newer_anchor_is_refused_at_every_event(
    tmp_path: Path,
) -> None:
    """A disk that is put back, or a snapshot of a machine: each job was acknowledged."""
    for jobs in range(1, 8):
        whole, old = tmp_path / f"whole-{jobs}", tmp_path / f"old-{jobs}"
        fill(old, killed=True, jobs=jobs, snapshot_after=-1)
        fill(whole, killed=True, jobs=jobs + 1, snapshot_after=-1)
        shutil.copy2(whole / "log.anchor", old / "log.anchor")
        assert start(old).refusal
