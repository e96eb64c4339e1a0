"""Mistakes in a pipeline are named before anything runs, each with its key."""

from __future__ import annotations

import tomllib
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.pipelines.description import Kind, PipelineStep, pipeline_from_table
from phalanx.cluster.pipelines.rules import KEYS, check_pipeline
from phalanx.config import ConfigError
from tests.examples import examples

GOOD = """
name = "good"
[steps.prepare]
command = ["sh", "-c", "cat {{1}}", "{inputs.text}", "{outputs.corpus}"]
inputs = { text = "text/*.txt" }
outputs = { corpus = "corpus" }
[steps.train]
kind = "train"
job = "job.toml"
for_each = { seed = [1, 2] }
settings = { "train.seed" = "{seed}", "data.path" = "{inputs.corpus}" }
inputs = { corpus = "prepare.corpus" }
outputs = { run = "run/{seed}" }
[steps.eval]
kind = "eval"
for_each = { seed = [1, 2] }
command = ["{inputs.run}", "--out", "{outputs.scores}"]
inputs = { run = "train.run" }
outputs = { scores = "scores/{seed}.json" }
scores = ["loss"]
[steps.best]
kind = "best"
inputs = { run = "train.run", scores = "eval.scores" }
by = "eval.loss"
[steps.gate]
kind = "gate"
require = ["eval.loss <= 3", "best.loss <= released + 0.5 %"]
model = "toy"
[steps.approve]
kind = "approval"
question = "release?"
after = ["gate"]
[steps.export]
kind = "export"
inputs = { checkpoint = "best.run" }
outputs = { model = "model" }
after = ["approve"]
[steps.register]
kind = "register"
model = "toy"
inputs = { checkpoint = "best.run", scores = "best.scores", export = "export.model" }
[steps.tell]
kind = "notify"
url = "https://example.org/hook"
after = ["register:any"]
"""


def problems(table: dict[str, Any], exists: bool = True) -> list[str]:
    try:
        check_pipeline(pipeline_from_table(table), lambda pattern: exists)
    except ConfigError as error:
        return [str(each) for each in error.problems]
    return []


def changed(**steps: dict[str, Any]) -> dict[str, Any]:
    """The good pipeline with keys of steps replaced; None takes one away."""
    table = tomllib.loads(GOOD)
    for name, keys in steps.items():
        step = table["steps"].setdefault(name, {})
        for key, value in keys.items():
            if value is None:
                del step[key]
            else:
                step[key] = value
    return table


def test_a_good_pipeline_has_no_problems_and_a_task_for_each_value() -> None:
    table = tomllib.loads(GOOD)
    assert problems(table) == []
    names = [task.name for task in check_pipeline(pipeline_from_table(table), bool).in_order]
    assert names.index("eval[seed=2]") > names.index("train[seed=2]") > names.index("prepare")
    assert len(names) == 11


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({"prepare": {"after": ["eval"]}}, "wait for each other"),
        ({"prepare": {"inputs": {"text": "eval.scores"}}}, "wait for each other"),
        ({"gate": {"require": ["eval.mmlu >= 0.5"]}}, "no step produces eval.mmlu"),
        ({"gate": {"require": ["train.loss >= 0.5"]}}, "no step produces train.loss"),
        ({"gate": {"require": ["evil.loss >= 0.5"]}}, 'did you mean "eval"?'),
        ({"gate": {"require": ["eval.loss ~ 3"]}}, "is not a condition"),
        ({"gate": {"require": ["eval[seed=9].loss < 3"]}}, "there is no such task"),
        ({"gate": {"model": None}}, "refers to a release, but no model is named"),
        ({"export": {"when": ["eval.loss < released"]}}, "to a release, but no model is named"),
        ({"best": {"by": "eval.mmlu"}}, "no step produces eval.mmlu"),
        ({"export": {"outputs": {"model": "corpus"}}}, "both write it"),
        ({"export": {"outputs": {"model": "corpus/model"}}}, "lies inside corpus"),
        ({"train": {"outputs": {"run": "run"}}}, "with {seed} in it"),
        ({"export": {"outputs": {"model": "../model"}}}, "must lie in the pipeline's folder"),
        ({"export": {"outputs": {"model": "/model"}}}, "must lie in the pipeline's folder"),
        ({"export": {"inputs": {"checkpoint": "best.runs"}}}, "best has no output runs"),
        ({"export": {"inputs": {"other": "best.run"}}}, "reads an input called checkpoint"),
        ({"export": {"after": ["aprove"]}}, 'did you mean "approve"?'),
        ({"export": {"after": ["approve:ended"]}}, "use :ok, :any or :fail"),
        ({"train": {"for_each": {"seed": []}}}, "has no values"),
        ({"train": {"for_each": {"seed": [1, 1]}}}, "contains a value twice"),
        ({"train": {"for_each": {"see-d": [1]}}}, "is not a valid name for a value"),
        ({"train": {"settings": {"train.seed": "{sed}"}}}, "{sed} is not a placeholder here"),
        ({"prepare": {"command": ["cat", "--in={inputs.text}"]}}, "may be several files"),
        ({"prepare": {"command": ["cat", "--in={inputs.text}"], "inputs": {"text": "[ab].txt"}}},
         "may be several files"),
        ({"prepare": {"environment": {"TEXT": "{inputs.text}"}}}, "and this takes one"),
        ({"train": {"inputs": {"corpus": "text/*.txt"}}}, "and this takes one"),
        ({"export": {"inputs": {"checkpoint": "train.run"}}}, "kind export takes one"),
        ({"register": {"inputs": {"checkpoint": "train.run"}}}, "kind register takes one"),
        ({"register": {"inputs": {"checkpoint": "best.run", "scores": "eval.scores"}}},
         "steps.register.inputs.scores"),
        ({"prepare": {"command": None}}, "kind program needs it"),
        ({"prepare": {"job": "job.toml"}}, "is not a key of kind program"),
        ({"eval": {"outputs": {"other": "other/{seed}"}, "command": ["x"]}}, "called scores"),
        ({"tell": {"url": "example.org"}}, "is no address"),
        ({"bad name": {"command": ["true"]}}, "must be letters"),
        ({"prepare": {"command": ["sh", "-c", "a\0b"]}}, "holds a NUL character"),
        ({"prepare": {"environment": {"A=B": "1"}}}, "is no name of a variable"),
        ({"register": {"model": "my toy"}}, "as a name of a model"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(steps: dict[str, Any], said: str) -> None:
    found = problems(changed(**steps))
    assert any(said in each for each in found), found


def test_missing_files_are_named() -> None:
    found = problems(tomllib.loads(GOOD), exists=False)
    assert any(each.startswith("steps.prepare.inputs.text = text/*.txt") for each in found)
    assert any(each.startswith("steps.train.job = job.toml") for each in found)


@pytest.mark.parametrize("budget", [{"hours": 0}, {"gpu_hours": 0.0}, {"hours": -1}])
def test_a_budget_of_nothing_is_refused(budget: dict[str, float]) -> None:
    (found,) = problems({**tomllib.loads(GOOD), "budget": budget})
    assert found.startswith("budget.") and "> 0" in found


def test_unknown_keys_and_types_are_refused_with_the_nearest() -> None:
    found = problems(changed(prepare={"input": {"text": "x"}, "retries": "two"}))
    assert 'did you mean "inputs"?' in found[0] and "steps.prepare.retries" in found[1]


def test_every_candidate_of_a_choice_has_its_score() -> None:
    table = changed(train={"for_each": {"seed": [1, 2, 3]}})
    table["steps"]["best"]["inputs"]["run"] = "prepare.corpus"
    assert problems(table) == []  # one for all scores
    table["steps"]["best"]["inputs"]["run"] = "train[seed=1].run"
    assert any(
        "does not have exactly one candidate for eval[seed=2].loss" in each
        for each in problems(table)
    )


def test_a_pipeline_of_too_many_tasks_is_refused() -> None:
    table = changed(train={"for_each": {"seed": list(range(200)), "size": list(range(100))}})
    assert any("10,000 is the most" in each for each in problems(table))


WORDS = st.sampled_from(
    [
        *("train", "eval.loss", "eval.scores", "best.run", "train[seed=1].run", "train[seed="),
        *("{seed}", "{inputs.run}", "{", "{}", "eval.loss <= 3", "best.loss > released - 1 %"),
        *("gate:any", "gate:", ":fail", "export", "program", "notify", "..", "[", "a/b", "x", ""),
        "eval[seed=2].loss",
    ]
)
VALUES = (
    WORDS
    | st.integers(-1, 3)
    | st.booleans()
    | st.lists(WORDS | st.integers(0, 2), max_size=3)
    | st.dictionaries(WORDS, WORDS | st.lists(st.integers(0, 2), max_size=2), max_size=2)
)
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(sorted(tomllib.loads(GOOD)["steps"])),
        st.sampled_from(PipelineStep.__struct_fields__),
        VALUES,
    ),
    max_size=3,
)


@given(CHANGES)
@examples(400)
def test_whatever_is_written_is_refused_in_words_or_makes_tasks(
    changes: list[tuple[str, str, Any]],
) -> None:
    found = problems(changed(**{step: {key: value} for step, key, value in changes}))
    assert all(": " in each and "; " in each for each in found)


def test_every_kind_says_which_keys_it_takes() -> None:
    assert set(KEYS) == set(get_args(Kind))
