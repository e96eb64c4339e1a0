"""What an agent is, whatever a full disk or a power cut has left of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.control.agent.identity import machine_id, next_incarnation


def test_a_machine_has_one_name_and_never_none(tmp_path: Path) -> None:
    first = machine_id(tmp_path)
    assert len(first) == 32 and machine_id(tmp_path) == first
    (tmp_path / "machine").write_text("")  # as a disk leaves it that was full just then
    again = machine_id(tmp_path)
    assert len(again) == 32 and machine_id(tmp_path) == again


@pytest.mark.parametrize(("left", "expected"), [("41", 42), ("", 1), ("\0\0", 1), ("4x", 1)])
def test_every_start_has_a_number_whatever_was_left_of_the_last(
    tmp_path: Path, left: str, expected: int
) -> None:
    (tmp_path / "incarnation").write_text(left)
    assert next_incarnation(tmp_path) == expected
    assert (tmp_path / "incarnation").read_text() == f"{expected}\n"
