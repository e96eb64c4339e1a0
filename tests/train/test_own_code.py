"""A job's own loss, optimizer, corpus, callback and metric: on meshes, in checkpoints, recorded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from phalanx.checkpoint import Checkpointer
from phalanx.config import ConfigError, Job
from phalanx.config.own_code import import_code
from phalanx.train.exits import ExitCode
from phalanx.train.parity.prove import LOSS_TOLERANCE, NORM_TOLERANCE, train
from phalanx.train.rank.own_code import refuse_other_code
from tests.parallel.test_parity import make_job
from tests.ranks import run_ranks
from tests.train.forked_runs import Run, small_job, start

__all__ = ["start"]

CODE = """
import numpy as np
import torch
import torch.nn.functional as F

from phalanx.data.own_corpus import OwnCorpus
from phalanx.model import TokenLoss
from phalanx.train.callback import Callback
from phalanx.train.metric import Metric
from phalanx.train.optim.own import ElementwiseOptimizer

class FocalLoss(TokenLoss):
    def of_tokens(self, logits, labels):
        loss = F.cross_entropy(logits, labels, reduction="none")
        return (1 - torch.exp(-loss)) ** 2 * loss

class Lion(ElementwiseOptimizer):
    state = ("momentum",)

    def update(self, weight, gradient, state, learning_rate, weight_decay):
        momentum = state["momentum"]
        direction = (0.9 * momentum + 0.1 * gradient) / 1e-4
        momentum.lerp_(gradient, 0.01)
        return weight * (1 - learning_rate * weight_decay) - learning_rate * direction.tanh()

class Counting(OwnCorpus):
    def __init__(self, data, vocab):
        super().__init__(data, vocab)
        self.samples, self.fingerprint = 1000, f"counting-{vocab}"

    def sample(self, index):
        return (index + np.arange(self.data.sequence + 1)) % self.vocab

class Watch(Callback):
    def begin(self, run):
        run.details["watched"] = "yes"

class Rate(Metric):
    every = 2

    def measure(self, run, outcome):
        return {"rate": outcome.learning_rate, "bad": float("nan")}
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "own_training.py"
    file.write_text(CODE, encoding="utf-8")
    return file


def own_job(code: Path, ranks: int, parallel: dict[str, Any]) -> Job:
    return make_job(
        ranks,
        {
            "code": {"files": [str(code)]},
            "model": {"layers": 2, "loss": "own_training:FocalLoss"},
            "data": {"source": "module", "module": "own_training:Counting"},
            "optimizer": {"module": "own_training:Lion"},
            "parallel": parallel,
            "train": {"steps": 3, "micro_batch": 2},
        },
    )


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}, {"zero": 3}], ids=str)
def test_all_of_it_trains_on_a_mesh_as_on_one_process(code: Path, parallel: dict[str, Any]) -> None:
    alone = run_ranks(1, train, own_job(code, 1, {}))[0]
    assert alone[2][0] < alone[0][0]
    for found in run_ranks(2, train, own_job(code, 2, parallel)):
        for (loss, norm), (expected_loss, expected_norm) in zip(found, alone, strict=True):
            assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
            assert norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE)


def test_a_run_records_its_code_and_goes_on_with_it(
    code: Path, tmp_path: Path, start: Callable[..., Run]
) -> None:
    names = json.dumps(["own_training:Watch", "own_training:Rate"])
    settings = {
        "code__files": json.dumps([str(code)]),
        "code__callbacks": names,
        "optimizer__module": "own_training:Lion",
        "model__loss": "own_training:FocalLoss",
        "data__source": "module",
        "data__module": "own_training:Counting",
        "schedule__kind": "constant",
        "parallel__zero": 3,
    }
    whole = start(small_job(tmp_path / "whole", **settings))
    assert whole.wait() == ExitCode.DONE, whole.text
    assert whole.exit.details["watched"] == "yes"
    lines = (whole.folder.metrics / "own.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4, 6]
    assert json.loads(lines[0])["bad"] is None
    provenance = json.loads((whole.folder.provenance / "provenance.json").read_text())
    digest = hashlib.sha256(code.read_bytes()).hexdigest()
    assert provenance["own_code"] == {str(code): digest}

    half = start(small_job(tmp_path / "half", **settings, train__steps=3))
    assert half.wait() == ExitCode.DONE, half.text
    later = {**settings, "checkpoint__resume": "auto"}
    rest = start(small_job(tmp_path / "half", **later))
    assert rest.wait() == ExitCode.DONE, rest.text
    expected = {record.step: record.loss for record in whole.steps}
    assert rest.steps[-1].loss == pytest.approx(expected[6], rel=1e-5)


def test_code_that_does_not_import_ends_the_run_with_the_fix(
    tmp_path: Path, start: Callable[..., Run]
) -> None:
    file = tmp_path / "own_broken.py"
    file.write_text("import nothing_of_this_name\n", encoding="utf-8")
    run = start(small_job(tmp_path / "runs", code__files=json.dumps([str(file)])))
    assert run.wait() == ExitCode.CONFIG
    assert "nothing_of_this_name" in run.exit.message and "own_broken.py:1" in run.exit.message


def test_ranks_with_other_texts_of_a_file_do_not_train_together(tmp_path: Path) -> None:
    file = tmp_path / "own_changing.py"
    file.write_text("x = 1\n", encoding="utf-8")
    job = make_job(2, {"code": {"files": [str(file)]}})

    def refused() -> str:
        if dist.get_rank() == 0:
            import_code(job.code)
        dist.barrier()
        file.write_text("x = 2\n", encoding="utf-8")
        import_code(job.code)
        try:
            refuse_other_code(job, Checkpointer(tmp_path / "checkpoints"))
        except ConfigError as error:
            return str(error)
        return ""

    first, second = run_ranks(2, refused)
    assert first == "" and "own_changing.py" in second and "start the job again" in second
