"""Output of programs on its way into their logs."""

from __future__ import annotations

import os
import selectors
import threading
import time
from pathlib import Path

import pytest

from phalanx.control.agent.spawn import output_pump
from phalanx.control.agent.spawn.output_pump import Pump, Pumps


def serve(pumps: Pumps, selector: selectors.BaseSelector, seconds: float) -> int:
    """Attend to pumps as a zygote does; the most room that a log took meanwhile."""
    until, highest = time.monotonic() + seconds, 0
    while pumps._open and time.monotonic() < until:
        for key, _ in selector.select(pumps.wake()):
            assert isinstance(key.fileobj, Pump)
            pumps.attend(key.fileobj)
            if key.fileobj in pumps._open:
                highest = max(highest, os.fstat(key.fileobj._log).st_blocks * 512)
    return highest


def test_a_flood_waits_and_never_takes_more_room_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"MOST_BYTES": 8 << 20, "KEPT_BYTES": 2 << 20, "CUT_EVERY": 1 << 20}
    for name, value in {**small, "TURN_BYTES": 4 << 20}.items():
        monkeypatch.setattr(output_pump, name, value)
    selector = selectors.DefaultSelector()
    pumps = Pumps(selector)
    writer = pumps.open("job1/worker0", tmp_path / "log")

    def flood() -> None:
        for number in range(48):
            os.write(writer, f"{number:07d}\n".encode() * (1 << 17))
        os.close(writer)

    thread = threading.Thread(target=flood)
    began = time.monotonic()
    thread.start()
    highest = serve(pumps, selector, 30.0)
    thread.join()
    assert highest <= 8 << 20
    assert time.monotonic() - began > 0.8, "48 MiB at 40 MiB/s"
    assert (tmp_path / "log").stat().st_size == 48 << 20
    with (tmp_path / "log").open("rb") as file:
        file.seek(-8, os.SEEK_END)
        assert file.read() == b"0000047\n"
    assert not selector.get_map(), "nobody writes any more"


def test_what_is_left_in_the_pipe_is_written_before_the_end_is_told(tmp_path: Path) -> None:
    pumps = Pumps(selectors.DefaultSelector())
    writer = pumps.open("job1/worker0", tmp_path / "log")
    os.write(writer, b"last words\n")
    pumps.drain("job1/worker0")
    assert (tmp_path / "log").read_bytes() == b"last words\n"
    os.close(writer)
    pumps.close()


def test_a_link_in_the_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        Pumps(selectors.DefaultSelector()).open("job1/worker0", tmp_path / "log")
