"""Explaining: every key has a meaning, and a misspelt one leads to the right one."""

from __future__ import annotations

import pytest

from phalanx.config import ConfigError, explain


def test_every_key_has_a_meaning() -> None:
    without = [doc.key for doc in explain() if not doc.meaning.endswith((".", "..."))]
    assert without == []


def test_a_key_shows_values_and_default() -> None:
    (doc,) = explain("parallel.zero")
    assert (doc.allowed, doc.default) == ("one of 0, 1, 2, 3", "3")


def test_a_bound_is_part_of_what_is_allowed() -> None:
    (doc,) = explain("train.steps")
    assert doc.allowed == "an integer >= 1 and <= 10^15"


def test_a_section_shows_all_below_it() -> None:
    keys = [doc.key for doc in explain("model.moe")]
    assert keys[:3] == ["model.moe", "model.moe.experts", "model.moe.top_k"]
    assert all(key.startswith("model.moe") for key in keys)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("parallel.tensr", "parallel.tensor"),
        ("tensr", "parallel.tensor"),
        ("zero", "parallel.zero"),
    ],
)
def test_a_misspelt_key_is_corrected(asked: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f'did you mean "{meant}"'):
        explain(asked)
