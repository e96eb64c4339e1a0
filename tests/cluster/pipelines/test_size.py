"""A file that describes too much is refused before any of it is made."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from phalanx.cluster.pipelines.description import pipeline_from_table
from phalanx.cluster.pipelines.rules import check_pipeline
from phalanx.cluster.pipelines.size import HERE, MOST_CHARACTERS
from phalanx.config import ConfigError
from phalanx.config.errors import MOST_PROBLEMS


def mistakes(steps: dict[str, Any], **limits: int) -> list[str]:
    table = {"name": "p", "steps": {n: {"command": ["true"], **step} for n, step in steps.items()}}
    try:
        check_pipeline(pipeline_from_table(table), lambda _: True, structs.replace(HERE, **limits))
    except ConfigError as error:
        return [str(each) for each in error.problems]
    return []


def lists(**sizes: int) -> dict[str, list[int]]:
    return {name: list(range(size)) for name, size in sizes.items()}


def test_tasks_are_counted_before_one_is_named() -> None:
    # The names of a million tasks would be made to find the one that is referred to.
    steps = {"a": {"for_each": lists(x=100, y=100, z=100)}, "b": {"after": ["a[x=1]"]}}
    (said,) = mistakes(steps)
    assert said.startswith("steps: make 1,000,001 tasks, and 10,000 is the most")


@pytest.mark.parametrize(
    ("steps", "waits"),
    [
        ({"a": {"for_each": lists(x=30)}, "b": {"for_each": lists(y=20), "after": ["a"]}}, 600),
        ({"a": {"for_each": lists(x=30)}, "b": {"for_each": lists(x=30), "after": ["a"]}}, 30),
        ({"a": {"for_each": lists(x=30)}, "b": {"after": ["a[x=7]"] * 3}}, 93),
        ({"a": {"inputs": {"one": "./x", "two": "y/*"}, "for_each": lists(x=5)}}, 10),
        (
            {
                "a": {"outputs": {"scores": "s{x}"}, "scores": ["l"], "for_each": lists(x=4)},
                "b": {"when": ["a.l < 1", " a.l > 0"], "for_each": lists(y=5)},
            },
            40,
        ),
    ],
)
def test_what_tasks_refer_to_is_counted_pair_by_pair(steps: dict[str, Any], waits: int) -> None:
    assert not mistakes(steps, waits=waits)
    (said,) = mistakes(steps, waits=waits - 1)
    assert f"refer to each other {waits} times" in said


@pytest.mark.parametrize(
    "steps",
    [
        {"a": {"command": ["x" * 70_000], "for_each": lists(x=500)}},
        {"a": {"command": ["{x}" * 1_000], "for_each": {"x": ["y" * 40_000]}}},
    ],
)
def test_texts_are_counted_with_their_values_filled_in(steps: dict[str, Any]) -> None:
    (said,) = mistakes(steps)
    assert f"and {MOST_CHARACTERS:,} is the most" in said


def test_a_path_longer_than_any_system_takes_is_refused_as_it_is() -> None:
    (said,) = mistakes({"a": {"outputs": {"o": "a/" * 50_000}}})
    assert "is longer than 4096 characters" in said


def test_of_many_mistakes_the_first_are_told() -> None:
    said = mistakes({f"s{i}": {"after": [f"t{i}"]} for i in range(3 * MOST_PROBLEMS)})
    assert len(said) == MOST_PROBLEMS + 1
    assert f"the first of more than {MOST_PROBLEMS} mistakes" in said[-1]
