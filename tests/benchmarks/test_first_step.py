"""Stages add up to the wait that they explain."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.first_step import Start, _read_marks, stage_medians


def test_stages_last_from_one_mark_to_the_next() -> None:
    starts = [
        Start(4.0, 9.0, [("imports", 2.0), ("fork", 2.5), ("first step", 4.0)]),
        Start(5.0, 9.0, [("imports", 3.0), ("fork", 3.25), ("first step", 5.0)]),
        Start(9.0, 9.0, [("imports", 7.0), ("fork", 7.75), ("first step", 9.0)]),
    ]
    expected = {"imports": 3.0, "fork": 0.5, "first step": 1.5}
    assert stage_medians(starts) == pytest.approx(expected)


def test_marks_after_the_first_record_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    path.write_text("import torch 101.0\nfirst step 103.0\nsinks 103.5\nfirst step 105.0\n")
    marks = _read_marks(path, began=100.0, wall_seconds=3.2)
    names = ["import torch", "first step", "record reaches the terminal"]
    assert [name for name, _ in marks] == names
    assert marks[-1][1] == pytest.approx(3.2)
