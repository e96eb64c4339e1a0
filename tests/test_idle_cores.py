"""Time that the cores have left over."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import idle_cores
from tests.idle_cores import IdleCores


@pytest.mark.parametrize(("used", "idle", "left"), [(60, 40, True), (90, 10, False)])
def test_cores_are_idle_where_enough_of_their_time_was_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used: int, idle: int, left: bool
) -> None:
    monkeypatch.setattr(idle_cores, "SECONDS", 0.0)
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 800 50 0 0 0 0 0\ncpu0 1 1\n")
    cores = IdleCores(stat)
    stat.write_text(f"cpu  {100 + used} 0 100 {800 + idle} 50 0 0 0 0 0\ncpu0 1 1\n")
    assert cores.left() is left
    assert not cores.left()  # no time has passed since


def test_nobody_is_asked_twice_within_a_second(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  1 0 1 1 0 0 0 0 0 0\n")
    cores = IdleCores(stat)
    stat.write_text("cpu  1 0 1 9 0 0 0 0 0 0\n")
    assert not cores.left()
