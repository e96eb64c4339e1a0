"""Conditions on scores: what is one, and when it holds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.pipelines.conditions import judge, parse_condition, parse_metric
from tests.examples import examples


@pytest.mark.parametrize(
    ("text", "step", "metric", "bound"),
    [
        ("eval.mmlu >= 0.55", "eval", "mmlu", 0.55),
        ("eval[seed=1].docs.loss<3", "eval[seed=1]", "docs.loss", 3.0),
        ("e-1.a/b@5 == -1e-3", "e-1", "a/b@5", -0.001),
        ("eval.loss <= released", "eval", "loss", 2.0),
        ("eval.loss <= released + 0.5 %", "eval", "loss", 2.01),
        ("eval.loss <= released - 5%", "eval", "loss", 1.9),
        ("eval.loss <= released + 0.5", "eval", "loss", 2.5),
    ],
)
def test_a_condition_names_a_metric_and_a_bound(
    text: str, step: str, metric: str, bound: float
) -> None:
    condition = parse_condition(text)
    assert (condition.name.step, condition.name.metric) == (step, metric)
    assert condition.bound(2.0) == pytest.approx(bound)


@pytest.mark.parametrize(
    "text",
    ["", "eval.loss", "eval.loss <= ", "loss <= 3", "eval.loss <= three", "eval.loss =< 3",
     "eval.loss <= 3 %", "3 <= eval.loss", "eval.loss <= released * 2"],
)  # fmt: skip
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a condition|is not a metric of a step"):
        parse_condition(text)


@pytest.mark.parametrize("text", [" " * 900, "e.l <" + " " * 900, "e.l < " + "1" * 900 + "x"])
def test_a_long_text_that_is_no_condition_is_refused_in_one_pass(text: str) -> None:
    for each in (text, *[text * 1_000] * 1_000):  # spaces alone would be tried in n^3 ways
        with pytest.raises(ValueError, match=r"is not a condition"):
            parse_condition(each)


def test_a_metric_is_of_a_step() -> None:
    with pytest.raises(ValueError, match="is not a metric of a step"):
        parse_metric("loss")


def test_all_tasks_must_fulfil_a_condition_and_those_that_do_not_are_named() -> None:
    condition = parse_condition("eval.loss <= 3")
    judged = judge(condition, {"eval[seed=1]": 2.0, "eval[seed=2]": 4.0}, {})
    assert not judged.holds
    assert judged.reason == "eval.loss <= 3: eval[seed=2].loss is 4"


def test_without_a_release_there_is_nothing_to_be_worse_than() -> None:
    judged = judge(parse_condition("eval.loss <= released + 1 %"), {"eval": 9.0}, {"other": 1.0})
    assert judged.holds and "the current release has no such score" in judged.reason


def test_a_score_that_is_no_number_never_holds() -> None:
    for sign in (">=", "<=", "==", ">", "<"):
        assert not judge(parse_condition(f"e.x {sign} 0"), {"e": math.nan}, {}).holds


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.floats(0, 50))
@examples(100)
def test_no_worse_by_more_than_a_share_is_symmetric_in_the_direction(
    score: float, released: float, percent: float
) -> None:
    """For losses (lower is better) and for their negatives (higher is) the answer is the same."""
    lower = parse_condition(f"e.x <= released + {percent:f} %")
    higher = parse_condition(f"e.x >= released - {percent:f} %")
    assert (
        judge(lower, {"e": score}, {"x": released}).holds
        == judge(higher, {"e": -score}, {"x": -released}).holds
    )
