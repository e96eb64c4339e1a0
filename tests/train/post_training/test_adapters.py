"""Adapters train on every mesh that is allowed as on one process, and go on to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.checkpoint import Checkpointer
from phalanx.config import ConfigError, Job
from phalanx.model.hf import export_hf
from phalanx.model.post_training.adapters import MARK
from phalanx.train.parity.prove import (
    LOSS_TOLERANCE,
    NORM_TOLERANCE,
    make_steps,
    make_trainer,
    train,
)
from phalanx.train.resume.refusal import refuse_adapted_weights, refuse_state_of
from phalanx.train.resume.start import load_foreign_weights
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import make_job, train_alone
from tests.shared_ranks import SharedRanks


def job_of(ranks: int = 1, kind: str = "lora", **sections: dict[str, Any]) -> Job:
    model = {"layers": 2, "heads": 4, "kv_heads": 2, "qk_norm": True}
    return make_job(
        ranks,
        {
            "model": model,
            "adapter": {"kind": kind, "rank": 4, "alpha": 8.0},
            "optimizer": {"learning_rate": 2e-2},
            "train": {"micro_batch": 2},
            **sections,
        },
    )


MESHES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ddp2": (2, "lora", {"zero": 0}),
    "zero1": (2, "lora", {"zero": 1}),
    "zero2": (2, "lora", {"zero": 2}),
    "zero3": (2, "lora", {"zero": 3}),
    "tp2": (2, "lora", {"tensor": 2}),
    "tp2xfsdp2": (4, "lora", {"tensor": 2}),
    "hsdp2x2": (4, "lora", {"replicate": 2}),
    "pp2": (2, "lora", {"pipeline": 2}),
    "cp2": (2, "lora", {"context": 2}),
    "dora-pp2": (2, "dora", {"pipeline": 2}),
    "dora-cp2": (2, "dora", {"context": 2}),
    "dora-ddp2": (2, "dora", {"zero": 0}),
    "dora-zero3": (2, "dora", {"zero": 3}),
}


# Smaller meshes prove the same sums.
IN_SOAK = {"zero1", "tp2xfsdp2", "hsdp2x2", "dora-pp2", "dora-cp2"}
CASES = [pytest.param(name, marks=pytest.mark.soak if name in IN_SOAK else ()) for name in MESHES]


@pytest.mark.parametrize("name", CASES)
def test_a_mesh_trains_adapters_like_one_process(name: str, shared_ranks: SharedRanks) -> None:
    ranks, kind, parallel = MESHES[name]
    reference = train_alone(job_of(kind=kind))
    assert reference[0][1] > 0
    for found in shared_ranks.run(ranks, train, job_of(ranks, kind, parallel=parallel)):
        for (loss, norm), (expected_loss, expected_norm) in zip(found, reference, strict=True):
            assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
            assert norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE)


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {weight.name: weight.master.clone() for weight in trainer.engine.weights}


def test_only_adapters_change_and_have_an_optimizer() -> None:
    trainer = make_trainer(job_of(kind="dora"))
    before = weights(trainer)
    make_steps(trainer, 3)
    for name, after in weights(trainer).items():
        assert torch.equal(after, before[name]) != (MARK in name), name
    kept = [name for name in trainer.tensors() if name.startswith("optimizer.exp_avg")]
    assert kept and all(MARK in name for name in kept)
    trainer.close()


def saved_and_continued(folder: str, job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of four steps at once, and of two and two with a checkpoint between."""
    whole = make_trainer(job)
    make_steps(whole, 2)
    saver = Checkpointer(Path(folder))
    path = saver.save(2, whole.tensors(), whole.extra())
    make_steps(whole, 2)
    again = make_trainer(job)
    again.restore(saver.load(path, again.tensors()))
    make_steps(again, 2)
    found = weights(whole), weights(again)
    whole.close()
    again.close()
    return found


@pytest.mark.parametrize(("ranks", "parallel"), [(2, {"zero": 3}), (2, {"tensor": 2})], ids=str)
def test_a_run_goes_on_to_the_bit(
    ranks: int, parallel: dict[str, Any], tmp_path: Path, shared_ranks: SharedRanks
) -> None:
    job = job_of(ranks, parallel=parallel)
    for whole, again in shared_ranks.run(ranks, saved_and_continued, str(tmp_path), job):
        assert whole.keys() == again.keys()
        assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_weights_of_hugging_face_are_the_base(tmp_path: Path) -> None:
    plain = make_trainer(job_of(kind="none"))
    state = {weight.name: weight.master * 2 for weight in plain.engine.weights}
    export_hf(state, plain.job.model, tmp_path / "hf", dtype=torch.float32)
    trainer = make_trainer(job_of())
    load_foreign_weights(trainer, tmp_path / "hf")
    for name, value in weights(trainer).items():
        if MARK not in name:
            assert torch.equal(value, state[name])
    assert any(MARK in name for name in weights(trainer))
    for each in (plain, trainer):
        each.close()


def test_frozen_weights_have_no_fp32_copy() -> None:
    trainer = make_trainer(job_of(precision={"compute": "bfloat16"}))
    for weight in trainer.engine.weights:
        expected = torch.float32 if MARK in weight.name else torch.bfloat16
        assert weight.master.dtype == expected
    make_steps(trainer, 1)
    trainer.close()


def test_a_run_that_goes_on_keeps_its_adapters() -> None:
    config = {"adapter": {"kind": "lora", "rank": 4, "alpha": 8.0}, "model": {}}
    refuse_state_of(job_of(), config, "there")
    with pytest.raises(ConfigError, match=r"adapter\.alpha = 8\.0: the run in there has 16\.0"):
        refuse_state_of(job_of(), {"adapter": {**config["adapter"], "alpha": 16.0}}, "there")
    with pytest.raises(ConfigError, match=r'adapter\.kind = "none": the run in there has "lora"'):
        refuse_state_of(job_of(kind="none"), config, "there")
    with pytest.raises(ConfigError, match=r"have adapters.*phalanx convert merge"):
        refuse_adapted_weights(config, "there")
