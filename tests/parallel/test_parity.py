"""Every mesh trains as one process does: same losses, same gradient norms."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from phalanx.config import Job, check, job_from_table, resolve
from phalanx.train.parity.prove import LOSS_TOLERANCE, NORM_TOLERANCE, train
from tests.shared_ranks import SharedRanks

STEPS = 3  # the loss of the third follows from an update with moments of two gradients

DENSE = {"dim": 32, "layers": 4, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": 64}
EXPERTS = {"experts": 4, "top_k": 2, "ffn": 32}


def make_job(world_size: int, table: dict[str, Any]) -> Job:
    """A small fp32 job with the sections of ``table`` laid over the defaults."""
    base: dict[str, Any] = {
        "model": dict(DENSE),
        "data": {"sequence": 32, "prefetch": 0},
        "precision": {"compute": "float32"},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 1, "device": "cpu"},
        "optimizer": {"learning_rate": 3e-3},
    }
    for section, values in table.items():
        base[section] = {**base.get(section, {}), **values}
    job = resolve(job_from_table(base), world_size)
    check(job, world_size)
    return job


_references: dict[bytes, list[tuple[float, float]]] = {}


def train_alone(job: Job) -> list[tuple[float, float]]:
    """The reference: a job on this one process, trained once for all that compare with it."""
    key = msgspec.json.encode(job)
    if key not in _references:
        _references[key] = train(job)
    return _references[key]


MOE = {**EXPERTS, "shared_experts": 1, "first_dense_layers": 1}
MODELS: dict[str, dict[str, Any]] = {  # a step on CPUs takes as long as it has layers
    "dense": {"layers": 2},
    "four-layers": {},
    "deep": {"layers": 8, "dim": 16, "ffn": 32},
    "grouped": {"layers": 2, "kv_heads": 2, "qk_norm": True},
    "latent": {
        "layers": 2,
        "latent": {
            "query_rank": 16,
            "key_value_rank": 16,
            "content_head_dim": 8,
            "rope_head_dim": 4,
            "value_head_dim": 8,
        },
    },
    "gemma": {
        "layers": 2,
        "kv_heads": 2,
        "mlp": "geglu",
        "norm": "sandwich",
        "norm_offset": True,
        "qk_norm": True,
        "window": {"size": 8, "full_every": 2, "rope_theta": 1e3, "rope_scaled": False},
        "rope_scaling": {"kind": "linear", "factor": 4.0},
        "attention_scale": 0.3,
        "attention_softcap": 0.5,
        "logit_softcap": 0.7,
        "embedding_scale": 5.6,
    },
    "mistral": {  # and what no published model has together
        "layers": 2,
        "kv_heads": 2,
        "window": {"size": 8},
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_context": 8},
        "rotary_fraction": 0.5,
        "nope_every": 2,
        "attention_bias": True,
        "mlp": "relu2",
        "residual_scale": 0.5,
    },
    "olmo": {
        "layers": 2,
        "norm": "post",
        "qk_norm": True,
        "qk_norm_over": "all",
        "window": {"size": 8, "full_every": 2},
    },
    "scaled-scores": {"layers": 2, "attention_scale": 0.5, "mlp": "gelu-exact"},
    "gpt-oss-moe": {
        "layers": 2,
        "kv_heads": 2,
        "mlp": "swiglu-clamped",
        "window": {"size": 8, "full_every": 2},
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_context": 8},
        "attention_bias": True,
        "attention_out_bias": True,
        "attention_sinks": True,
        "moe": {**EXPERTS, "biases": True},
    },
    "moe": {"layers": 3, "moe": MOE},
    "moe-four-layers": {"moe": MOE},
    "moe-groups": {
        "layers": 2,
        "moe": {**EXPERTS, "groups": 2, "top_groups": 1, "z_loss_coefficient": 0.1},
    },
    "moe-bias": {"layers": 2, "moe": {**EXPERTS, "balance": "bias", "score": "sigmoid"}},
    "tied": {"layers": 2, "tied_embedding": True},
    "tied-four-layers": {"tied_embedding": True},
    "tied-mtp": {"layers": 2, "tied_embedding": True, "mtp": {"weight": 1.0}},
    "mtp": {"layers": 2, "mtp": {"layers": 2, "weight": 1.0}},
    "mtp-deep": {"mtp": {"weight": 1.0}},
    "mtp-moe-two": {
        "layers": 2,
        "moe": {**EXPERTS, "balance": "bias", "score": "sigmoid"},
        "mtp": {"weight": 1.0},
    },
    "mtp-moe": {
        "layers": 1,
        "moe": {**EXPERTS, "balance": "bias", "score": "sigmoid"},
        "mtp": {"weight": 1.0},
    },
}

# name: (ranks, model, parallel section)
MESHES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "ddp2": (2, "dense", {"zero": 0}),
    "ddp3-batch8": (3, "dense", {"zero": 0}),
    "fsdp3-batch8": (3, "dense", {"zero": 3}),
    "zero1": (2, "dense", {"zero": 1}),
    "zero2": (2, "dense", {"zero": 2}),
    "zero3": (2, "dense", {"zero": 3}),
    "fsdp4": (4, "four-layers", {"zero": 3}),
    "hsdp2x2": (4, "dense", {"zero": 3, "replicate": 2}),
    "tp4": (4, "dense", {"tensor": 4}),
    "tp2-grouped": (2, "grouped", {"tensor": 2}),
    "tp2-latent": (2, "latent", {"tensor": 2}),
    "tp2xfsdp2": (4, "dense", {"tensor": 2}),
    "tp2xddp2": (4, "dense", {"tensor": 2, "zero": 0}),
    "pp4-gpipe": (4, "four-layers", {"pipeline": 4, "schedule": "gpipe"}),
    "pp4-1f1b": (4, "four-layers", {"pipeline": 4, "schedule": "1f1b"}),
    "pp2xfsdp2": (4, "dense", {"pipeline": 2}),
    "pp4-interleaved": (4, "deep", {"pipeline": 4, "schedule": "interleaved"}),
    "pp4-zero-bubble": (4, "deep", {"pipeline": 4, "schedule": "zero-bubble"}),
    "pp2xfsdp2-zero-bubble": (
        4,
        "four-layers",
        {"pipeline": 2, "schedule": "zero-bubble", "zero": 2},
    ),
    "pp2xtp2-zero-bubble": (
        4,
        "four-layers",
        {"pipeline": 2, "tensor": 2, "schedule": "zero-bubble"},
    ),
    "pp2xddp2": (4, "dense", {"pipeline": 2, "zero": 0}),
    "pp2xtp2xfsdp2": (8, "dense", {"pipeline": 2, "tensor": 2}),
    "cp2-ring": (2, "dense", {"context": 2, "context_method": "ring"}),
    "cp2-ring-grouped": (2, "grouped", {"context": 2, "context_method": "ring"}),
    "cp4-ring": (4, "dense", {"context": 4, "context_method": "ring"}),
    "cp2-ulysses": (2, "dense", {"context": 2, "context_method": "ulysses"}),
    "cp2-ring-ddp": (2, "dense", {"context": 2, "context_method": "ring", "zero": 0}),
    "cp2xtp2": (4, "dense", {"context": 2, "tensor": 2, "context_method": "ring"}),
    "cp2xtp2-ulysses": (4, "dense", {"context": 2, "tensor": 2, "context_method": "ulysses"}),
    "cp2-ring-scaled-scores": (2, "scaled-scores", {"context": 2, "context_method": "ring"}),
    "gemma-fsdp2": (2, "gemma", {}),
    "gemma-tp2": (2, "gemma", {"tensor": 2}),
    "gemma-pp2": (2, "gemma", {"pipeline": 2}),
    "gemma-cp2": (2, "gemma", {"context": 2}),
    "mistral-fsdp2": (2, "mistral", {}),
    "mistral-tp2": (2, "mistral", {"tensor": 2}),
    "mistral-pp2": (2, "mistral", {"pipeline": 2}),
    "mistral-cp2": (2, "mistral", {"context": 2}),
    "olmo-fsdp2": (2, "olmo", {}),
    "olmo-pp2": (2, "olmo", {"pipeline": 2}),
    "olmo-cp2": (2, "olmo", {"context": 2}),
    "gpt-oss-fsdp2": (2, "gpt-oss-moe", {}),
    "gpt-oss-tp2": (2, "gpt-oss-moe", {"tensor": 2}),
    "gpt-oss-cp2": (2, "gpt-oss-moe", {"context": 2}),
    "gpt-oss-ep2xpp2": (4, "gpt-oss-moe", {"expert": 2, "pipeline": 2}),
    "moe-fsdp2": (2, "moe", {}),
    "moe-tp2": (2, "moe", {"tensor": 2}),
    "moe-cp2": (2, "moe", {"context": 2}),
    "moe-ddp2": (2, "moe", {"zero": 0}),
    "ep2": (2, "moe", {"expert": 2}),
    "ep2-groups": (2, "moe-groups", {"expert": 2}),
    "tp2-groups": (2, "moe-groups", {"tensor": 2}),
    "cp2-groups": (2, "moe-groups", {"context": 2}),
    "pp2-groups": (2, "moe-groups", {"pipeline": 2}),
    "ep2-bias": (2, "moe-bias", {"expert": 2}),
    "moe-pp2-zero-bubble": (2, "moe-four-layers", {"pipeline": 2, "schedule": "zero-bubble"}),
    "ep2xfsdp2": (4, "moe", {"expert": 2}),
    "ep4-hsdp": (4, "moe", {"expert": 2, "replicate": 2}),
    "ep2xtp2": (4, "moe", {"expert": 2, "tensor": 2}),
    "tied-pp2-gpipe": (2, "tied", {"pipeline": 2, "schedule": "gpipe"}),
    "tied-pp2-interleaved": (2, "tied-four-layers", {"pipeline": 2, "schedule": "interleaved"}),
    "tied-pp2-zero-bubble": (2, "tied-four-layers", {"pipeline": 2, "schedule": "zero-bubble"}),
    "tied-pp4": (4, "tied-four-layers", {"pipeline": 4}),
    "tied-pp2xfsdp2": (4, "tied", {"pipeline": 2}),
    "tied-pp2xfsdp2-zero-bubble": (
        4,
        "tied-four-layers",
        {"pipeline": 2, "schedule": "zero-bubble", "zero": 2},
    ),
    "tied-pp2xtp2": (4, "tied", {"pipeline": 2, "tensor": 2}),
    "tied-pp2xcp2": (4, "tied", {"pipeline": 2, "context": 2}),
    "tied-mtp-pp2": (2, "tied-mtp", {"pipeline": 2}),
    "tied-mtp-pp2xtp2": (4, "tied-mtp", {"pipeline": 2, "tensor": 2}),
    "mtp-pp2-interleaved": (2, "mtp-deep", {"pipeline": 2, "schedule": "interleaved"}),
    "mtp-pp2xfsdp2": (4, "mtp", {"pipeline": 2}),
    "mtp-pp2xcp2-ring": (4, "mtp", {"pipeline": 2, "context": 2, "context_method": "ring"}),
    "mtp-ep2xpp2": (4, "mtp-moe-two", {"expert": 2, "pipeline": 2}),
    "mtp-ddp2": (2, "mtp", {"zero": 0}),
    "mtp-tp2xfsdp2": (4, "mtp", {"tensor": 2}),
    "mtp-cp2-ring": (2, "mtp", {"context": 2, "context_method": "ring"}),
    "mtp-cp2-ulysses": (2, "mtp", {"context": 2, "context_method": "ulysses"}),
    "mtp-ep2": (2, "mtp-moe", {"expert": 2}),
    "mtp-ep2xtp2": (4, "mtp-moe", {"expert": 2, "tensor": 2}),
    "ep2xfsdp2xpp2": (8, "moe-four-layers", {"expert": 2, "pipeline": 2}),
}


def reference_of_mesh(name: str, steps: int = STEPS) -> list[tuple[float, float]]:
    """What one process without any axis gives for the model of a mesh."""
    _, model, _ = MESHES[name]
    train_section = {"micro_batch": 4, "steps": steps}
    return train_alone(make_job(1, {"model": MODELS[model], "train": train_section}))


def micro_batch(ranks: int, parallel: dict[str, Any]) -> int:
    """Two of them a replica prove accumulation; a pipeline needs two a stage to fill."""
    stages: int = parallel.get("pipeline", 1)
    split: int = math.prod(parallel.get(axis, 1) for axis in ("tensor", "context"))
    replicas = ranks // split // stages
    return max(1, 8 // replicas // (2 * stages))


def job_of_mesh(name: str, steps: int = STEPS) -> Job:
    """The job that trains on a mesh of the table."""
    ranks, model, parallel = MESHES[name]
    train_section = {"micro_batch": micro_batch(ranks, parallel), "steps": steps}
    return make_job(ranks, {"model": MODELS[model], "parallel": parallel, "train": train_section})


# Proved by smaller meshes, by tests/checkpoint/test_reshard.py (three axes at once) and by
# tests/parallel/test_pipeline_balance.py (gpipe); a context axis shards weights, as fsdp2 does.
IN_SOAK = {"fsdp4", "pp4-gpipe", "pp2xtp2xfsdp2", "ep2xfsdp2xpp2"}
IN_SOAK |= {"gemma-fsdp2", "mistral-fsdp2", "olmo-fsdp2"}
# Proved for the families themselves by tests/train/parity/test_families.py.
IN_SOAK |= {
    "gemma-pp2",
    "gemma-cp2",
    "olmo-pp2",
    "olmo-cp2",
    "gpt-oss-fsdp2",
    "gpt-oss-tp2",
    "gpt-oss-cp2",
}
# Proved pair by pair: by ep2xfsdp2 and hsdp2x2, by cp2xtp2 and cp2-ulysses, by tp2xfsdp2 and ddp2,
# by fsdp3-batch8.
IN_SOAK |= {"ep4-hsdp", "cp2xtp2-ulysses", "tp2xddp2", "ddp3-batch8"}
# And by mtp-ep2, by families with it and, on a tensor axis, by tests/parallel/test_features.py.
IN_SOAK |= {"mtp-tp2xfsdp2", "mtp-ep2xtp2"}
# Several axes at once, of which each pair is proved above.
IN_SOAK |= {"tied-pp4", "tied-pp2xcp2", "tied-mtp-pp2xtp2", "mtp-pp2xcp2-ring"}
CASES = [pytest.param(name, marks=pytest.mark.soak if name in IN_SOAK else ()) for name in MESHES]


@pytest.mark.parametrize("name", CASES)
def test_mesh_trains_like_one_process(name: str, shared_ranks: SharedRanks) -> None:
    ranks, _, _ = MESHES[name]
    reference = reference_of_mesh(name)
    for found in shared_ranks.run(ranks, train, job_of_mesh(name)):
        for (loss, norm), (expected_loss, expected_norm) in zip(found, reference, strict=True):
            assert loss == pytest.approx(expected_loss, rel=LOSS_TOLERANCE)
            assert norm == pytest.approx(expected_norm, rel=NORM_TOLERANCE)
