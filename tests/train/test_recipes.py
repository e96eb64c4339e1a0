"""A job with every recipe on trains on each mesh as on one process, and resumes to the bit.

Switched on: dropout, z-losses, QK-clip, balancing by bias and by a loss over batches, an average of
the weights, and samples that grow longer with scaled positions.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.config import Job, job_from_table, resolve
from phalanx.train.parity.prove import LOSS_TOLERANCE, NORM_TOLERANCE, make_trainer
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import make_job
from tests.shared_ranks import SharedRanks
from tests.train.test_determinism import (
    Result,
    Run,
    checkpoint_of,
    cut_off,
    job_on,
    joined,
    make_runs,
)

STEPS = 4
TENSOR_TOLERANCE = 2e-5  # of a tensor's norm
EXPERTS = {
    "experts": 4,
    "top_k": 2,
    "ffn": 32,
    "score": "sigmoid",
    "balance": "bias-auxiliary",
    "auxiliary_over": "batch",
    "auxiliary_coefficient": 0.1,
    "bias_rate": 0.01,
    "z_loss_coefficient": 0.1,
}
MODEL = {
    "layers": 2,
    "kv_heads": 2,
    "dropout": 0.1,
    "qk_clip": 0.02,  # below the scores of weights that were just drawn
    "z_loss_coefficient": 0.1,
    "moe": {**EXPERTS, "first_dense_layers": 1},
}
YARN = {"kind": "yarn", "factor": 2.0, "original_context": 32}
STAGES = [{"after_tokens": 2 * 8 * 32, "sequence": 64, "global_batch": 4, "rope_scaling": YARN}]
TRAIN = {"steps": STEPS, "ema": {"decay": 0.5}, "sequence_stages": STAGES}

MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp2": (2, {"zero": 0}),
    "fsdp3": (3, {"zero": 3}),
    "zero1": (2, {"zero": 1}),
    "tp2": (2, {"tensor": 2}),
    "tp2xfsdp2": (4, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "pp2-zero-bubble": (2, {"pipeline": 2, "schedule": "zero-bubble"}),
    "cp2": (2, {"context": 2}),
    "ep2": (2, {"expert": 2}),
    "hsdp2xep2": (4, {"expert": 2, "replicate": 2}),
}
# Each is proved by another one that has its axes and one more, or one rank more.
IN_SOAK = {"tp2xfsdp2", "pp2", "ep2"}
CASES = [pytest.param(name, marks=pytest.mark.soak if name in IN_SOAK else ()) for name in MESHES]


class Trained(NamedTuple):
    """What a rank comes to."""

    numbers: list[tuple[float, float]]  # loss and gradient norm of each step
    lengths: list[int]  # tokens in a sample of each step
    tensors: dict[str, Tensor]  # weights, averages and what keeps experts balanced, each whole


def recipe(ranks: int, parallel: dict[str, Any], layers: int = 2) -> Job:
    sections = {
        "model": {**MODEL, "layers": layers},
        "parallel": parallel,
        "optimizer": {"learning_rate": 3e-3, "eps": 1e-6},  # above the rounding of gradients
        "train": TRAIN,
    }
    return make_job(ranks, sections)


def train_recipe(job: Job) -> Trained:
    trainer = make_trainer(job)
    outcomes = [trainer.train_step() for _ in range(STEPS)]
    trainer.close()
    numbers = [(outcome.loss.item(), outcome.grad_norm.item()) for outcome in outcomes]
    lengths = [outcome.tokens // outcome.samples for outcome in outcomes]
    return Trained(numbers, lengths, dict(whole_tensors(trainer)))


def whole_tensors(trainer: Trainer) -> list[tuple[str, Tensor]]:
    kept = [
        (name, tensor)
        for name, tensor in trainer.tensors().items()
        if name.startswith(("model.", "ema.", "balance."))
    ]
    return [
        (name, (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone())
        for name, t in kept
    ]


@cache
def alone(layers: int) -> Trained:
    return train_recipe(recipe(1, {}, layers))


@pytest.mark.parametrize("name", CASES)
def test_every_mesh_follows_the_recipe_like_one_process(
    name: str, shared_ranks: SharedRanks
) -> None:
    ranks, parallel = MESHES[name]
    layers = 4 if "schedule" in parallel else 2
    job, expected = recipe(ranks, parallel, layers), alone(layers)
    for found in shared_ranks.run(ranks, train_recipe, job):
        assert found.lengths == expected.lengths == [32, 32, 64, 64]
        for (loss, norm), (expected_loss, expected_norm) in zip(
            found.numbers, expected.numbers, strict=True
        ):
            assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
            assert norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE)
        for key, tensor in found.tensors.items():
            off = (tensor - expected.tensors[key]).norm() / expected.tensors[key].norm().clamp(1e-9)
            assert off < TENSOR_TOLERANCE, key


def test_a_validation_has_the_samples_and_positions_of_the_last_step() -> None:
    """As its checkpoint and its export have them, whatever the next step takes."""
    held_out = {"validate_samples": 4, "steps": STEPS}
    stages = [{"after_tokens": 2 * 8 * 32, "sequence": 64, "rope_scaling": YARN}]
    settings = {"data": {"validation_fraction": 0.5}, "model": {"layers": 1}}
    short = make_trainer(make_job(1, {**settings, "train": held_out}))
    longer = make_trainer(
        make_job(1, {**settings, "train": held_out | {"sequence_stages": stages}})
    )
    for step in range(1, STEPS):
        outcomes = [trainer.train_step() for trainer in (short, longer)]
        same = outcomes[0].tokens == outcomes[1].tokens
        assert same == (step <= 2)
        assert (short.validate() == longer.validate()) == same
    for trainer in (short, longer):
        trainer.close()


def test_the_recipe_has_an_effect() -> None:
    """Or the meshes would prove nothing."""
    plain, weight = recipe(1, {}), "model.layers.0.attention.qkv.weight"
    for without in ("qk_clip", "z_loss_coefficient"):
        model = msgspec.structs.replace(plain.model, **{without: 0.0})
        other = train_recipe(msgspec.structs.replace(plain, model=model)).tensors[weight]
        assert not torch.allclose(other, alone(2).tensors[weight], rtol=1e-3, atol=0), without
    found = alone(2).tensors
    assert not torch.equal(found[weight], found[weight.replace("model.", "ema.", 1)])
    shares = [t for name, t in found.items() if name.startswith("balance.")]
    assert shares and all(share.std() > 0 for share in shares)


CUTS = (1, 2, 3)  # within the first stage, where the second begins, and within that


class Runs(NamedTuple):
    """A run that was saved in each stage and went on, one that was not, and the rests."""

    saved: list[Result]
    whole: list[Result]
    continued: dict[int, list[Result]]  # by the step they continue from


def resumable(ranks: int, parallel: dict[str, Any], folder: Path) -> Job:
    """The recipe over a corpus, in bf16, with bits that repeat."""
    table: dict[str, Any] = msgspec.to_builtins(job_on(ranks, parallel, folder))
    table["model"] |= MODEL
    table["train"] |= TRAIN | {"micro_batch": 1}
    return resolve(job_from_table(table), ranks)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, {}), id="single", marks=pytest.mark.soak),
        pytest.param((2, {"zero": 3}), id="fsdp2"),
        pytest.param((2, {"pipeline": 2}), id="pp2"),
    ],
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("recipe")
    ranks, parallel = request.param
    job = resumable(ranks, parallel, folder)
    (saved,) = make_runs(ranks, job, Run(folder, save_at=CUTS))
    rests = (Run(folder, resume=checkpoint_of(folder, cut)) for cut in CUTS)
    whole, *continued = make_runs(ranks, job, Run(folder / "whole"), *rests)
    return Runs(saved, whole, dict(zip(CUTS, continued, strict=True)))


def test_a_run_that_is_saved_is_as_one_that_is_not(runs: Runs) -> None:
    assert len(runs.saved[0][0]) == STEPS
    assert runs.whole == runs.saved


@pytest.mark.parametrize("cut", CUTS)
def test_a_run_cut_in_any_stage_continues_to_the_bit(runs: Runs, cut: int) -> None:
    assert joined(cut_off(runs.saved, cut), runs.continued[cut]) == runs.saved
