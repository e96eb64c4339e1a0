"""Evaluation by a gang: its scores, files for gates, and training the same to the bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.checkpoint.format.tier import open_source
from phalanx.checkpoint.read.load import StoredTensors
from phalanx.config import Evaluate
from phalanx.data import ShardWriter
from phalanx.train.evaluate.callback import plan_of
from phalanx.train.evaluate.scores import read_scores
from phalanx.train.exits import ExitCode
from phalanx.train.report.records import EvaluationRecord, StepRecord, read_records
from tests.train.evaluate.small_checkpoint import SEQUENCE, SHAPE
from tests.train.evaluate.small_tasks import write_tasks
from tests.train.forked_runs import Run, small_job

EVERY = 3


@pytest.fixture(scope="module")
def domain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a vocabulary that the small job has."""
    folder = tmp_path_factory.mktemp("domain") / "shards"
    with ShardWriter(folder, 64, 0) as writer:
        for length in (5, 40, 1):
            writer.write([1 + number % 63 for number in range(length)])
            writer.end_document()
        writer.finish()
    return folder


def evaluated(runs: Path, domain: Path, **settings: object) -> Run:
    sets = f'{{near = "{domain}"}}'
    job = small_job(runs, evaluate__every=EVERY, evaluate__perplexity=sets, **settings)
    return Run(job)


def losses(run: Run) -> list[float | None]:
    return [record.loss for record in read_records(run.folder.steps, StepRecord)]


def saved(run: Run) -> dict[str, Tensor]:
    source = open_source(run.folder.checkpoints / "step-00000006")
    stored = StoredTensors(source)
    tensors = {
        name: torch.empty(size, dtype=kind) for name, (size, kind) in stored.tensors().items()
    }
    stored.fill(tensors)
    return tensors


EXPERTS = '{experts = 4, top_k = 2, ffn = 16, balance = "bias"}'
JOBS: dict[str, dict[str, Any]] = {
    "shards": {"parallel__zero": 3},
    "stages with experts": {"parallel__pipeline": 2, "model__moe": EXPERTS},
}


@pytest.mark.parametrize("job", JOBS)
def test_training_is_the_same_to_the_bit_and_scores_are_told(
    job: str, tmp_path: Path, domain: Path
) -> None:
    plain = Run(small_job(tmp_path / "a", **JOBS[job]))
    watched = evaluated(tmp_path / "b", domain, **JOBS[job])
    assert plain.wait() == watched.wait() == ExitCode.DONE, watched.output.read_text()
    assert losses(plain) == losses(watched)
    before, after = saved(plain), saved(watched)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    sources = [open_source(run.folder.checkpoints / "step-00000006") for run in (plain, watched)]
    assert sources[0].manifest.rng == sources[1].manifest.rng

    records = list(read_records(watched.folder.evaluation, EvaluationRecord))
    assert [record.step for record in records] == [3, 6]
    names = {"near.perplexity", "near.loss", "near.tokens"}
    assert all(set(record.scores) == names and not record.problems for record in records)
    assert records[0].scores["near.tokens"] == 46
    assert records[0].scores["near.loss"] != records[1].scores["near.loss"]
    for record in records:
        scores = read_scores(watched.folder.scores / f"step-{record.step:08d}.json")
        assert (scores.step, scores.scores) == (record.step, record.scores)
    assert "scores after step 3" in watched.output.read_text()


def test_the_number_of_ranks_does_not_change_scores(tmp_path: Path, domain: Path) -> None:
    found = []
    for axes in ({}, {"parallel__pipeline": 2}):
        run = evaluated(tmp_path / str(len(found)), domain, train__steps=3, **axes)
        assert run.wait() == ExitCode.DONE, run.output.read_text()
        found.append(read_scores(run.folder.scores / "step-00000003.json").scores)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_what_cannot_be_scored_is_refused_before_the_first_step(tmp_path: Path) -> None:
    run = evaluated(tmp_path, tmp_path / "nowhere")
    assert run.wait() == ExitCode.CONFIG
    assert "perplexity.near" in run.output.read_text()
    assert not run.folder.steps.exists()


def test_what_comes_too_late_is_said_to_be_missing(tmp_path: Path, domain: Path) -> None:
    run = evaluated(tmp_path, domain, train__steps=3, evaluate__minutes=1e-9)
    assert run.wait() == ExitCode.DONE, run.output.read_text()
    scores = read_scores(run.folder.scores / "step-00000003.json")
    assert scores.scores == {} and list(scores.problems) == ["near"]
    assert "near is NOT SCORED" in run.output.read_text()


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="lm_eval is not installed: pip install 'phalanx[eval]'",
)
def test_tasks_are_scored_by_the_gang_and_those_that_write_are_refused(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    tasks = write_tasks(tmp_path)
    shape: dict[str, Any] = {f"model__{name}": value for name, value in SHAPE.items()}
    settings = {
        **shape,
        "data__source": "shards",
        "data__path": corpus,
        "data__sequence": SEQUENCE,
        "train__steps": 2,
        "evaluate__every": 2,
        "evaluate__task_folder": tasks,
    }
    run = Run(small_job(tmp_path / "a", **settings, evaluate__tasks='["animals", "fables"]'))
    assert run.wait() == ExitCode.DONE, run.output.read_text()
    scores = read_scores(run.folder.scores / "step-00000002.json").scores
    assert {"animals.acc", "fables.bits_per_byte"} <= set(scores)
    refused = Run(small_job(tmp_path / "b", **settings, evaluate__tasks='["endings"]'))
    assert refused.wait() == ExitCode.CONFIG
    assert "phalanx eval" in refused.output.read_text()


def test_a_plan_says_what_the_job_says() -> None:
    plan = plan_of(Evaluate(every=2, tasks=("arc",), few_shot=3))
    assert (plan.tasks, plan.few_shot, plan.limit) == (("arc",), 3, 100)
    assert plan_of(Evaluate(every=2, tasks=("arc",))).few_shot is None
