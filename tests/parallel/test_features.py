"""What can be combined with the axes: precision, recompute, offload, optimizers, masks, ties."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.checkpoint import Checkpointer, latest
from phalanx.config import Job
from phalanx.parallel import build_mesh
from phalanx.train.parity.prove import LOSS_TOLERANCE, NORM_TOLERANCE, train
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import MODELS, STEPS, make_job, micro_batch, train_alone
from tests.shared_ranks import SharedRanks

# Tensor parallelism on CPUs takes its time for each layer: no more of them than a case needs.
BASE: dict[str, dict[str, Any]] = {
    "model": {"layers": 2},
    "train": {"steps": STEPS},
}
FOUR_LAYERS = {"model": {"layers": 4}}

RING = {"context": 2, "context_method": "ring"}
DROPOUT = {"model": {"dropout": 0.1}}
SCHEDULE_FREE = {"optimizer": {"kind": "schedule-free"}, "schedule": {"kind": "constant"}}

# name: (sections of both runs, ranks and parallel section of the run on a mesh, further sections)
Case = tuple[dict[str, Any], int, dict[str, Any], dict[str, Any]]
SAME: dict[str, Case] = {
    "recompute-full-fsdp": ({}, 2, {}, {"memory": {"recompute": "full"}}),
    "recompute-selective-fsdp": ({}, 2, {}, {"memory": {"recompute": "selective"}}),
    "recompute-full-tp": ({}, 2, {"tensor": 2}, {"memory": {"recompute": "full"}}),
    "recompute-selective-tp": ({}, 2, {"tensor": 2}, {"memory": {"recompute": "selective"}}),
    "recompute-full-ring": (
        {},
        2,
        {"context": 2, "context_method": "ring"},
        {"memory": {"recompute": "full"}},
    ),
    "recompute-full-experts": (
        {"model": MODELS["moe"]},
        2,
        {"expert": 2},
        {"memory": {"recompute": "full"}},
    ),
    "recompute-selective-experts": (
        {"model": MODELS["moe"]},
        2,
        {"expert": 2},
        {"memory": {"recompute": "selective"}},
    ),
    "recompute-selective-mtp": (
        {"model": MODELS["mtp-moe"]},
        2,
        {"expert": 2},
        {"memory": {"recompute": "selective"}},
    ),
    "recompute-full-pipeline": (
        {},
        2,
        {"pipeline": 2},
        {"memory": {"recompute": "full"}},
    ),
    "offload-parameters": ({}, 2, {}, {"memory": {"offload": "parameters"}}),
    "offload-parameters-of-one-rank": ({}, 1, {}, {"memory": {"offload": "parameters"}}),
    "offload-activations": ({}, 2, {}, {"memory": {"offload_activations": True}}),
    "muon-fsdp": ({"optimizer": {"kind": "muon"}}, 2, {}, {}),
    "schedule-free-fsdp": (SCHEDULE_FREE, 2, {}, {}),
    "schedule-free-tp": (SCHEDULE_FREE, 2, {"tensor": 2}, {}),
    "schedule-free-pipeline": (
        SCHEDULE_FREE,
        2,
        {"pipeline": 2},
        {},
    ),
    "muon-tp-fsdp": ({"optimizer": {"kind": "muon"}}, 4, {"tensor": 2}, {}),
    "muon-experts": (
        {"optimizer": {"kind": "muon"}, "model": MODELS["moe"]},
        2,
        {"expert": 2},
        {},
    ),
    "muon-biases-of-experts": (
        {"optimizer": {"kind": "muon"}, "model": MODELS["gpt-oss-moe"]},
        2,
        {"expert": 2},
        {},
    ),
    "tied-ddp": ({"model": {"tied_embedding": True}}, 2, {"zero": 0}, {}),
    "tied-fsdp": ({"model": {"tied_embedding": True}}, 2, {}, {}),
    "tied-tp-fsdp": ({"model": {"tied_embedding": True}}, 4, {"tensor": 2}, {}),
    "tied-schedule-free-pipeline": (
        {**SCHEDULE_FREE, "model": {"tied_embedding": True}},
        2,
        {"pipeline": 2},
        {},
    ),
    "tied-muon-pipeline": (
        {"optimizer": {"kind": "muon"}, "model": {"tied_embedding": True}},
        2,
        {"pipeline": 2},
        {},
    ),
    "tied-offload-parameters-pipeline": (
        {"model": {"tied_embedding": True}},
        4,
        {"pipeline": 2},
        {"memory": {"offload": "parameters"}},
    ),
    "muon-offload-parameters-pipeline": (  # FSDP over the one rank of each stage
        {"optimizer": {"kind": "muon"}},
        2,
        {"pipeline": 2},
        {"memory": {"offload": "parameters"}},
    ),
    "documents-tp": ({"data": {"document_mask": True}}, 2, {"tensor": 2}, {}),
    "documents-ulysses": ({"data": {"document_mask": True}}, 2, {"context": 2}, {}),
    "documents-ring": ({"data": {"document_mask": True}}, 4, RING, {}),
    "documents-ring-grouped": (
        {"data": {"document_mask": True}, "model": MODELS["grouped"]},
        4,
        {**RING, "context": 4},
        {"memory": {"recompute": "full"}},
    ),
    "documents-ring-latent": (
        {"data": {"document_mask": True}, "model": MODELS["latent"]},
        2,
        RING,
        {},
    ),
    "documents-mtp-ring": (
        {"data": {"document_mask": True}, "model": MODELS["mtp"]},
        2,
        RING,
        {},
    ),
    "documents-mtp-ulysses": (
        {"data": {"document_mask": True}, "model": MODELS["mtp"]},
        2,
        {"context": 2},
        {},
    ),
    "documents-pipeline": (
        {"data": {"document_mask": True}},
        2,
        {"pipeline": 2},
        {},
    ),
    "dropout-ring-recompute": (DROPOUT, 4, RING, {"memory": {"recompute": "full"}}),
    "dropout-tp-experts": (
        {"model": {**MODELS["moe"], **DROPOUT["model"]}},
        2,
        {"tensor": 2, "expert": 2},
        {},
    ),
    "dropout-zero-bubble": (
        {"model": {**FOUR_LAYERS["model"], **DROPOUT["model"]}},
        2,
        {"pipeline": 2, "schedule": "zero-bubble"},
        {},
    ),
    "no-prefetch": (FOUR_LAYERS, 2, {"prefetch_layers": 0}, {}),
    "deep-prefetch": (FOUR_LAYERS, 2, {"prefetch_layers": 3}, {}),
    "small-buckets": ({}, 2, {"zero": 0, "ddp_bucket_mb": 0.01}, {}),
    "spike-guard": ({"optimizer": {"spike_factor": 3.0}}, 2, {}, {}),
}


def merged(*tables: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for table in (BASE, *tables):
        for section, values in table.items():
            found[section] = {**found.get(section, {}), **values}
    return found


def alone(*tables: dict[str, Any]) -> Job:
    """What a run on a mesh is compared with."""
    return make_job(1, merged({"train": {"micro_batch": 4}}, *tables))


def on_mesh(ranks: int, parallel: dict[str, Any], *tables: dict[str, Any]) -> Job:
    section = {"micro_batch": micro_batch(ranks, parallel)}
    return make_job(ranks, merged({"train": section, "parallel": parallel}, *tables))


# Of recompute what is selective keeps another part of the same layers, sharded or not.
IN_SOAK = {"recompute-selective-tp", "recompute-selective-experts"}
CASES = [pytest.param(name, marks=pytest.mark.soak if name in IN_SOAK else ()) for name in SAME]


@pytest.mark.parametrize("name", CASES)
def test_feature_changes_nothing_but_where_and_when(name: str, shared_ranks: SharedRanks) -> None:
    common, ranks, parallel, further = SAME[name]
    expected = train_alone(alone(common))
    job = on_mesh(ranks, parallel, common, further)
    for found in shared_ranks.run(ranks, train, job):
        for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
            assert norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE)


LOW_PRECISION: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "bf16-single": (1, {}, {"compute": "bfloat16"}),
    "bf16-ddp": (2, {"zero": 0}, {"compute": "bfloat16"}),
    "bf16-ddp-compute-reduce": (2, {"zero": 0, "reduce_dtype": "compute"}, {"compute": "bfloat16"}),
    "bf16-fsdp": (2, {}, {"compute": "bfloat16"}),
    "bf16-zero1-compute-reduce": (
        2,
        {"zero": 1, "reduce_dtype": "compute"},
        {"compute": "bfloat16"},
    ),
    "bf16-tp": (2, {"tensor": 2}, {"compute": "bfloat16"}),
    "bf16-pp": (2, {"pipeline": 2}, {"compute": "bfloat16"}),
    "bf16-tied-pp": (2, {"pipeline": 2}, {"compute": "bfloat16"}),
    "bf16-tied-pp-zero-bubble": (
        2,
        {"pipeline": 2, "schedule": "zero-bubble"},
        {"compute": "bfloat16"},
    ),
    "bf16-pp-zero-bubble": (
        2,
        {"pipeline": 2, "schedule": "zero-bubble"},
        {"compute": "bfloat16"},
    ),
    "fp8-single": (1, {}, {"fp8": True, "compute": "bfloat16"}),
    "fp8-fsdp": (2, {}, {"fp8": True, "compute": "bfloat16"}),
    "fp8-tp": (2, {"tensor": 2}, {"fp8": True, "compute": "bfloat16"}),
    "fp8-pp-zero-bubble": (
        2,
        {"pipeline": 2, "schedule": "zero-bubble"},
        {"fp8": True, "compute": "bfloat16"},
    ),
    "fp16-single": (1, {}, {"compute": "float16", "initial_loss_scale": 1024.0}),
    "fp16-fsdp": (2, {}, {"compute": "float16", "initial_loss_scale": 1024.0}),
}


# Each is proved by one in fp8, which computes in bf16 too, or with one rank or schedule more.
LOW_IN_SOAK = {"bf16-tp", "bf16-pp", "bf16-single", "fp8-single"}
LOW_CASES = [
    pytest.param(name, marks=pytest.mark.soak if name in LOW_IN_SOAK else ())
    for name in LOW_PRECISION
]


@pytest.mark.parametrize("name", LOW_CASES)
def test_low_precision_follows_fp32(name: str, shared_ranks: SharedRanks) -> None:
    ranks, parallel, precision = LOW_PRECISION[name]
    # One common token in half of the positions gives a loss that falls: lagging weights show.
    common = merged({"train": {"steps": 4}}, FOUR_LAYERS if "schedule" in parallel else {})
    common["model"] |= {"tied_embedding": "tied" in name}
    expected = train_alone(alone(common))
    job = on_mesh(ranks, parallel, common, {"precision": precision})
    for found in shared_ranks.run(ranks, train, job):
        for (loss, norm), (expected_loss, expected_norm) in zip(found, expected, strict=True):
            assert loss == pytest.approx(expected_loss, rel=2e-3)
            assert norm == pytest.approx(expected_norm, rel=5e-2)


SAVED = 2  # steps before the checkpoint, and as many after


def save(job: Job, folder: Path) -> float:
    trainer = Trainer(job, build_mesh(job, torch.device("cpu")), torch.device("cpu"))
    for _ in range(SAVED):
        trainer.train_step()
    Checkpointer(folder, keep=0).save(trainer.step, trainer.tensors(), trainer.extra())
    trainer.close()
    return trainer.validate()


def continue_from(job: Job, folder: Path) -> tuple[float, list[float]]:
    trainer = Trainer(job, build_mesh(job, torch.device("cpu")), torch.device("cpu"))
    found = latest(folder)
    assert found is not None
    trainer.restore(Checkpointer(folder, keep=0).load(found, trainer.tensors()))
    start = trainer.validate()
    losses = [trainer.train_step().loss.item() for _ in range(SAVED)]
    trainer.close()
    return start, losses


# Beside those of dense models in tests/checkpoint/test_reshard.py.
RESHAPES: dict[str, tuple[str, tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = {
    "single-to-pp2": ("dense", (1, {}), (2, {"pipeline": 2})),
    "pp2-to-ddp3": ("dense", (2, {"pipeline": 2}), (3, {"zero": 0})),
    "zero-bubble-to-fsdp2": ("dense", (2, {"pipeline": 2, "schedule": "zero-bubble"}), (2, {})),
    "ep2-to-fsdp2": ("moe", (2, {"expert": 2}), (2, {})),
    "gpt-oss-tp2-to-ep2": ("gpt-oss-moe", (2, {"tensor": 2}), (2, {"expert": 2})),
    "moe-tp2-to-ep2": ("moe-bias", (2, {"tensor": 2}), (2, {"expert": 2})),
    "mtp-tp2-to-fsdp2": ("mtp", (2, {"tensor": 2}), (2, {})),
    "mtp-pp2-to-tp2": ("mtp", (2, {"pipeline": 2}), (2, {"tensor": 2})),
    "tied-fsdp2-to-pp2": ("tied", (2, {}), (2, {"pipeline": 2})),
    "tied-pp2-to-single": ("tied", (2, {"pipeline": 2}), (1, {})),
    "tied-zero-bubble-to-pp2": (
        "tied",
        (2, {"pipeline": 2, "schedule": "zero-bubble"}),
        (2, {"pipeline": 2}),
    ),
}


@pytest.mark.parametrize("name", RESHAPES)
def test_a_checkpoint_continues_on_another_mesh(
    name: str, shared_ranks: SharedRanks, tmp_path: Path
) -> None:
    model, (ranks_before, before), (ranks_after, after) = RESHAPES[name]
    common = {
        "model": MODELS[model] | ({"layers": 4} if "schedule" in before else {}),
        "train": {"steps": 2 * SAVED, "validate_samples": 8},
        "data": {"validation_fraction": 0.5},
    }
    straight = train_alone(alone(common))
    first = on_mesh(ranks_before, before, common)
    then = on_mesh(ranks_after, after, common)
    validated = shared_ranks.run(ranks_before, save, first, tmp_path)
    for start, losses in shared_ranks.run(ranks_after, continue_from, then, tmp_path):
        assert start == pytest.approx(validated[0], rel=LOSS_TOLERANCE)
        expected = [loss for loss, _ in straight[SAVED:]]
        assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE)
