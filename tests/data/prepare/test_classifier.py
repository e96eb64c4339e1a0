"""A user's classifier: found beside the recipe, its mistakes told from those of a document."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phalanx.data import DataError
from phalanx.data.prepare.classifier import ClassifierFailure, load_classifier, score


def test_a_module_beside_the_recipe_is_found_and_the_path_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "beside_recipe.py").write_text("def length(text):\n    return len(text)\n")
    before = list(sys.path)
    function = load_classifier("beside_recipe:length", tmp_path)
    assert score(function, "four") == 4.0 and sys.path == before
    assert score(lambda text: True, "") == 1.0


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("no_colon", "must be module:function"),
        ("no_such_module_here:f", "cannot be imported"),
        ("json:no_such", "has no function no_such"),
        ("json:decoder", "has no function decoder"),
    ],
)
def test_references_that_do_not_work_are_refused(tmp_path: Path, reference: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        load_classifier(reference, tmp_path)


@pytest.mark.parametrize(
    "function",
    [lambda text: 1 / 0, lambda text: "high", lambda text: float("nan"), lambda text: sys.exit(3)],
)
def test_what_is_no_score_is_a_failure_of_the_document(function: object) -> None:
    with pytest.raises(ClassifierFailure):
        score(function, "text")  # type: ignore[arg-type]
