"""The engine of one machine: workers that die are replaced, and nothing of theirs is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx.data import DataError
from phalanx.data.prepare.engine import LocalEngine
from phalanx.data.prepare.run import prepare
from tests.data.prepare.raw import prose, recipe, write_lines

DIES_ONCE = """
import os
from pathlib import Path

MARK = Path(__file__).with_suffix(".mark")

def score(text):
    try:
        MARK.touch(exist_ok=False)
    except FileExistsError:
        return 1.0
    os._exit(9)
"""


def test_a_worker_that_is_killed_is_replaced(tmp_path: Path) -> None:
    for name in "ab":
        write_lines(tmp_path / f"raw/{name}.jsonl", [prose(ord(name))])
    (tmp_path / "dies_once.py").write_text(DIES_ONCE)
    asked = '[[classifier]]\nfunction = "dies_once:score"\n'
    report = prepare(recipe(tmp_path, asked), tmp_path, LocalEngine(2)).report
    assert (tmp_path / "dies_once.mark").exists() and report.documents == 2


def test_a_mistake_that_only_a_worker_can_see_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path / "raw/a.jsonl", [prose(1)])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "raw/b.parquet").touch()
    with pytest.raises(DataError, match=r"pip install 'phalanx\[parquet\]'"):
        prepare(recipe(tmp_path), tmp_path, LocalEngine(1))
