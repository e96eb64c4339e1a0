"""The words that start each kind of step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.cluster.pipelines.description import pipeline_from_table
from phalanx.cluster.pipelines.graph import TaskGraph
from phalanx.pipelines.run.commands import StepCommand, step_command

PHALANX = [sys.executable, "-m", "phalanx"]
WORK = Path("/work")


def command(inputs: dict[str, list[str]] | None = None, **step: Any) -> StepCommand:
    table = {"name": "x", "steps": {"a": {"inputs": dict.fromkeys(inputs or {}, "f"), **step}}}
    (task,) = TaskGraph(pipeline_from_table(table)).in_order
    return step_command(task.step, inputs or {}, WORK)


@pytest.mark.parametrize(
    ("first", "becomes"),
    [
        ("python", [sys.executable]),
        ("phalanx", PHALANX),
        ("sh", ["sh"]),
        ("./python", ["./python"]),
    ],
)
def test_a_program_runs_with_the_python_that_runs_the_pipeline(
    first: str, becomes: list[str]
) -> None:
    assert command(command=[first, "x y"]).argv == [*becomes, "x y"]


def test_paths_are_filled_into_words_and_variables() -> None:
    made = command(
        {"text": ["/a", "/b"], "one": ["/c"]},
        command=["cat", "{inputs.text}", "--one={inputs.one}", "{outputs.out}"],
        outputs={"out": "deep/out"},
        environment={"ONE": "{inputs.one}", "WHERE": "{outputs.out}:x"},
    )
    assert made.argv == ["cat", "/a", "/b", "--one=/c", "/work/deep/out"]
    assert made.environment == {"ONE": "/c", "WHERE": "/work/deep/out:x"}


@pytest.mark.parametrize("kind", ["data", "eval"])
def test_data_and_eval_are_commands_of_phalanx(kind: str) -> None:
    made = command(kind=kind, command=["tokenize", "{outputs.out}"], outputs={"out": "out"})
    assert made.argv == [*PHALANX, kind, "tokenize", "/work/out"]


def test_a_train_step_goes_on_with_what_an_attempt_left_in_its_own_folder() -> None:
    made = command(
        {"corpus": ["/corpus"]},
        kind="train",
        job="job.toml",
        settings={"data.path": "{inputs.corpus}", "train.seed": 3, "train.deterministic": True},
        outputs={"run": "run"},
    )
    assert made.overrides == [
        *("data.path=/corpus", "train.seed=3", "train.deterministic=true"),
        *("runs=/work/.runs", "checkpoint.resume=auto", "checkpoint.at_end=true"),
    ]
    assert made.argv[:6] == [*PHALANX, "train", "job.toml", "--set"]


def test_an_export_turns_a_checkpoint_into_a_folder() -> None:
    options = ["--dtype", "float32"]
    inputs = {"checkpoint": ["/run"]}
    made = command(inputs, kind="export", outputs={"model": "model"}, command=options)
    assert made.argv == [*PHALANX, "convert", "export-hf", "/run", "/work/model", *options]
