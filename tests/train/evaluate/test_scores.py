"""The file that gates read: written whole, and refused where it is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.train.evaluate.scores import Scores, read_scores, write_scores

FOUND = Scores(checkpoint="runs/a/step-00000007", step=7, scores={"arc_easy.acc": 0.5})


def test_it_has_three_fields_and_problems_only_where_there_are_some(tmp_path: Path) -> None:
    path = tmp_path / "new" / "scores.json"
    write_scores(path, FOUND)
    assert json.loads(path.read_text()) == {
        "checkpoint": "runs/a/step-00000007",
        "step": 7,
        "scores": {"arc_easy.acc": 0.5},
    }
    assert read_scores(path) == FOUND
    late = Scores(checkpoint="", step=8, scores={}, problems={"arc_easy": "too late"})
    write_scores(path, late)
    assert read_scores(path) == late
    assert [each.name for each in path.parent.iterdir()] == ["scores.json"]


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*phalanx eval --out"):
        read_scores(tmp_path / "none.json")
    (tmp_path / "other.json").write_text('{"step": 1}')
    with pytest.raises(ConfigError, match="holds no scores"):
        read_scores(tmp_path / "other.json")
