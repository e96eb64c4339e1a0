"""A file for optimizer state: room that is there, bytes that arrive, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from phalanx.config import ConfigError
from phalanx.train.optim.away import state_file
from phalanx.train.optim.away.state_file import PAGE, SPARE_BYTES, StateFile


def pages(count: int, content: bytes = b"") -> memoryview:
    memory = memoryview(mmap.mmap(-1, count * PAGE))
    memory[: len(content)] = content
    return memory


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def open_here(path: Path, size: int = 8 * PAGE) -> StateFile:
    return StateFile(path, size)


def test_both_ways_see_the_same_bytes(tmp_path: Path) -> None:
    file = open_here(tmp_path)
    file.write(pages(2, b"past the cache"), 4 * PAGE).result()
    assert file.map[4 * PAGE : 4 * PAGE + 14] == b"past the cache"
    file.map[5 * PAGE : 5 * PAGE + 7] = b"through"
    file.flush()
    found = pages(2)
    file.read(found, 4 * PAGE).result()
    assert bytes(found[PAGE : PAGE + 7]) == b"through"
    assert file.map[:PAGE] == bytes(PAGE)  # it begins with zeros, whatever was tried


def test_the_file_has_no_name_and_its_room_is_free_again_afterwards(tmp_path: Path) -> None:
    before = descriptors()
    file = open_here(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert file.map.size() >= 8 * PAGE
    del file
    assert descriptors() == before


def test_too_little_room_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage: Any = type("Usage", (), {"free": 12_000_000_000 + SPARE_BYTES})()
    monkeypatch.setattr(state_file.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError) as caught:
        open_here(tmp_path, 30_000_000_000)
    said = str(caught.value)
    assert "memory.offload_folder" in said and "30.0 GB there, 12.0 GB are left" in said
    assert 'optimizer.state = "int8"' in said


def test_room_that_others_take_meanwhile_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = descriptors()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="GB are left"):
        open_here(tmp_path)
    assert list(tmp_path.iterdir()) == [] and descriptors() == before


def test_a_place_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        open_here(tmp_path / "file")
    assert "drive of this node" in str(caught.value)


def test_reads_and_writes_that_stop_short_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_here(tmp_path)
    read, write = os.preadv, os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda d, b, at: write(d, [b[0][:PAGE]], at))
    file.write(pages(3, bytes(range(256)) * 48), 0).result()
    monkeypatch.setattr(os, "preadv", lambda d, b, at: read(d, [b[0][:PAGE]], at))
    found = pages(3)
    file.read(found, 0).result()
    assert bytes(found) == bytes(range(256)) * 48


def test_a_read_that_brings_nothing_is_an_error_that_names_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = open_here(tmp_path)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match=r"cannot be read at byte 4,096: no byte was moved") as caught:
        file.read(pages(1), PAGE).result()
    assert str(tmp_path) in str(caught.value) and caught.value.errno == errno.EIO


def test_a_drive_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    file = open_here(tmp_path)
    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OSError, match="cannot be written at byte 0: Input/output error"):
        file.write(pages(1), 0).result()


@pytest.mark.parametrize("way", ["unsupported", "incoherent"])
def test_a_file_system_without_direct_access_is_used_through_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    whole = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if str(path).startswith("/proc/self/fd"):
            raise OSError(errno.EINVAL, "Invalid argument")
        return whole(path, flags, *more, **named)

    if way == "unsupported":
        monkeypatch.setattr(os, "open", refuse)
    else:
        monkeypatch.setattr(StateFile, "_agrees", lambda *_: False)
    file = open_here(tmp_path)
    assert not file.direct and "also fills host memory" in caplog.text
    file.write(pages(1, b"cached"), PAGE).result()
    assert file.map[PAGE : PAGE + 6] == b"cached"
