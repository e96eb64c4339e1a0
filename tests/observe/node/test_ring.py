"""The ring between a worker and its agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.observe.node.ring import HEADER_BYTES, RingReader, RingWriter


def test_a_reader_gets_every_frame_once_and_in_order(tmp_path: Path) -> None:
    writer, reader = RingWriter(tmp_path / "r", 4096), RingReader(tmp_path / "r")
    got: list[bytes] = []
    for number in range(500):  # many times around
        assert writer.append(b"%d" % number)
        if number % 7 == 0:
            got += reader.read().bodies
    got += reader.read().bodies
    assert got == [b"%d" % number for number in range(500)]
    assert reader.read() == ([], 0)


def test_a_writer_never_waits_and_what_was_overwritten_is_counted(tmp_path: Path) -> None:
    writer, reader = RingWriter(tmp_path / "r", 4096), RingReader(tmp_path / "r")
    for _ in range(1000):
        assert writer.append(bytes(100))
    found = reader.read()
    assert found.bodies == []
    assert found.lost_bytes == 1000 * 108
    writer.append(b"next")
    assert reader.read() == ([b"next"], 0)


@pytest.mark.parametrize("count", [0, 3, 37, 500])
def test_a_look_back_gives_what_the_ring_still_holds_and_takes_nothing(
    tmp_path: Path, count: int
) -> None:
    writer, reader = RingWriter(tmp_path / "r", 4096), RingReader(tmp_path / "r")
    bodies = [bytes(40) + b"%d" % number + bytes(number % 50) for number in range(count)]
    for body in bodies:
        writer.append(body)
    found = reader.history()
    assert found == bodies[len(bodies) - len(found) :]
    assert len(found) == count or sum(len(body) + 8 for body in found) > 4096 - 2 * 100
    assert reader.read().bodies == (bodies if count < 40 else [])
    assert reader.history() == found
    assert RingReader(tmp_path / "none").history() == []


def test_a_frame_larger_than_the_ring_is_refused(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "r", 4096)
    assert not writer.append(bytes(4096))


def test_the_next_agent_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "r", 4096)
    writer.append(b"one")
    assert RingReader(tmp_path / "r").read().bodies == [b"one"]
    writer.append(b"two")
    assert RingReader(tmp_path / "r").read().bodies == [b"two"]


def test_a_worker_that_comes_again_appends_behind_what_is_there(tmp_path: Path) -> None:
    RingWriter(tmp_path / "r", 4096).append(b"before")
    RingWriter(tmp_path / "r", 4096).append(b"after")
    assert RingReader(tmp_path / "r").read().bodies == [b"before", b"after"]


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, HEADER_BYTES + 20])
def test_a_ring_cut_short_is_nothing_and_is_made_anew(tmp_path: Path, size: int) -> None:
    path = tmp_path / "r"
    RingWriter(path, 4096).append(bytes(1000))
    reader = RingReader(path)
    os.truncate(path, size)
    assert reader.read().bodies == []
    RingWriter(path, 4096).append(b"again")
    assert b"again" in reader.read().bodies


def test_a_damaged_frame_is_counted_and_what_follows_later_is_read(tmp_path: Path) -> None:
    path = tmp_path / "r"
    writer, reader = RingWriter(path, 4096), RingReader(path)
    writer.append(b"good")
    writer.append(b"bad!")
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 12 + 8)
        file.write(b"X")
    assert reader.read() == ([b"good"], 12)
    writer.append(b"later")
    assert reader.read() == ([b"later"], 0)


def test_a_header_that_lies_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "r"
    RingWriter(path, 4096).append(b"x")
    with path.open("r+b") as file:
        file.seek(8)
        file.write((1 << 62).to_bytes(8, "little"))
    assert RingReader(path).read() == ([], 0)


def test_a_link_in_the_rings_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"PHXRING1" + bytes(4096))
    (tmp_path / "r").symlink_to(tmp_path / "secret")
    assert RingReader(tmp_path / "r").read() == ([], 0)


def test_frames_of_a_killed_writer_are_whole(tmp_path: Path) -> None:
    path = tmp_path / "r"
    child = os.fork()
    if child == 0:
        try:
            writer = RingWriter(path, 1 << 16)
            number = 0
            while True:
                writer.append(b"%06d" % number * 50)
                number += 1
        finally:
            os._exit(1)
    reader = RingReader(path)
    bodies: list[bytes] = []
    while len(bodies) < 200:
        bodies += reader.read().bodies
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    bodies += reader.read().bodies
    assert all(body == body[:6] * 50 for body in bodies)


FILLS_UP = """
import sys
from pathlib import Path
from phalanx.observe.node.node_messages import RunRecord
from phalanx.observe.node.worker_ring import RingSink, ring_path
folder = Path(sys.argv[1])
sink = RingSink(ring_path(folder, 0))
with (folder / "ballast").open("wb", buffering=0) as file:
    size = 1 << 16
    while size:
        try:
            file.write(bytes(size))
        except OSError:
            size //= 2
for generation in range(3000):
    sink.describe(RunRecord(generation=generation, provenance="x" * 400, folder="runs"))
print("trained on")
"""


@pytest.mark.parametrize("disk_bytes", [4 << 20, 64 << 10], ids=["full later", "too small"])
def test_a_full_disk_ends_no_worker(tmp_path: Path, disk_bytes: int) -> None:
    """A page of a mapped file that finds no room would end it with SIGBUS."""
    folder = tmp_path / "run"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={disk_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        command = [sys.executable, "-c", FILLS_UP, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
    assert (done.returncode, done.stdout) == (0, "trained on\n"), done.stderr
