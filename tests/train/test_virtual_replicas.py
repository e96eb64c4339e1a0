"""With virtual replicas a run has the same bits on every number of data replicas."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from phalanx.checkpoint import Checkpointer
from phalanx.config import ConfigError, Job
from phalanx.parallel import build_mesh
from phalanx.train.resume.refusal import refuse_state_of
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import make_job
from tests.shared_ranks import SharedRanks

STEPS = 3
# Sizes that shards cut unevenly, and eight micro-batches in four virtual replicas.
SHAPE = {"dim": 24, "layers": 2, "heads": 2, "kv_heads": 2, "ffn": 40, "vocab": 57}


class Bits(NamedTuple):
    """All that must be equal."""

    steps: tuple[str, ...]  # losses and norms, and a validation at the end
    state: tuple[tuple[str, str], ...]  # digests of weights and moments


def job_on(ranks: int, *tables: dict[str, Any]) -> Job:
    """A small job with the sections of ``tables`` laid over it."""
    base: dict[str, Any] = {
        "model": dict(SHAPE),
        "data": {"sequence": 16, "validation_fraction": 0.1},
        "train": {"steps": STEPS, "virtual_replicas": 4, "validate_samples": 12},
    }
    for table in tables:
        for section, values in table.items():
            base[section] = {**base.get(section, {}), **values}
    return make_job(ranks, base)


def train(job: Job, folder: Path | None = None, first: int = 0) -> Bits:
    """Make the steps of a job, with a folder from the checkpoint of ``first`` to one of the end."""
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    if folder is not None and first:
        loaded = Checkpointer(folder, keep=0).load(folder / f"step-{first:08d}", trainer.tensors())
        trainer.restore(loaded)
    values = []
    while trainer.step < job.train.steps:
        outcome = trainer.train_step()
        values += [outcome.loss.item(), outcome.grad_norm.item()]
    if folder is not None:
        Checkpointer(folder, keep=0).save(trainer.step, trainer.tensors(), trainer.extra())
    values.append(trainer.validate())
    trainer.close()
    return Bits(tuple(value.hex() for value in values), _digests(trainer))


def _digests(trainer: Trainer) -> tuple[tuple[str, str], ...]:
    """Of every tensor of all stages; collective."""
    digests: dict[str, str] = {}
    for name, tensor in trainer.tensors().items():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        content = whole.detach().contiguous().numpy().tobytes()
        digests[name] = hashlib.blake2b(content, digest_size=8).hexdigest()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, digests)
    assert all(part[name] == digests[name] for part in gathered for name in part if name in digests)
    return tuple(sorted({name: of for part in gathered for name, of in part.items()}.items()))


def bits_on(shared_ranks: SharedRanks, ranks: int, *tables: dict[str, Any]) -> Bits:
    """What every rank of a run comes to."""
    found = shared_ranks.run(ranks, train, job_on(ranks, *tables))
    assert len(set(found)) == 1
    return found[0]


_references: dict[str, Bits] = {}


def bits_alone(shared_ranks: SharedRanks, *tables: dict[str, Any]) -> Bits:
    """What one process comes to, trained once for all that compare with it."""
    if repr(tables) not in _references:
        _references[repr(tables)] = bits_on(shared_ranks, 1, *tables)
    return _references[repr(tables)]


def precision(compute: str) -> dict[str, Any]:
    return {"precision": {"compute": compute}}


def parallel(**axes: Any) -> dict[str, Any]:
    return {"parallel": axes}


def test_without_virtual_replicas_bits_differ(shared_ranks: SharedRanks) -> None:
    """What the other tests compare is able to show a difference."""
    off = {"train": {"virtual_replicas": 0}}
    tables = precision("bfloat16"), off, parallel(zero=3)
    one, four = (bits_on(shared_ranks, ranks, *tables) for ranks in (1, 4))
    assert one.steps != four.steps and one.state != four.state


# All of them together, and eight replicas, take their time: see the soak below.
@pytest.mark.parametrize(
    ("compute", "zero", "ranks"),
    [
        ("float32", 0, 4),
        ("float32", 3, 2),
        ("bfloat16", 0, 2),
        ("bfloat16", 1, 4),
        ("bfloat16", 2, 2),
        ("bfloat16", 3, 4),
    ],
)
def test_same_bits_on_1_2_and_4_replicas(
    compute: str, zero: int, ranks: int, shared_ranks: SharedRanks
) -> None:
    alone = bits_alone(shared_ranks, precision(compute))
    assert bits_on(shared_ranks, ranks, precision(compute), parallel(zero=zero)) == alone


def test_replicas_drop_the_same_values(shared_ranks: SharedRanks) -> None:
    drops = {"model": {**SHAPE, "dropout": 0.1}}
    found = bits_on(shared_ranks, 2, precision("bfloat16"), drops, parallel(zero=3))
    assert found == bits_alone(shared_ranks, precision("bfloat16"), drops)
    assert found.steps != bits_alone(shared_ranks, precision("bfloat16")).steps


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "hsdp2x2-zero1": (4, {"replicate": 2, "zero": 1}),
    "hsdp2x2-zero3": (4, {"replicate": 2, "zero": 3}),
    "pp2xdp2-zero0": (4, {"pipeline": 2, "zero": 0}),
    "pp2xdp2-zero3": (4, {"pipeline": 2, "zero": 3}),
    "pp2xdp2-gpipe": (4, {"pipeline": 2, "zero": 1, "schedule": "gpipe"}),
    "pp2xdp2-interleaved": (4, {"pipeline": 2, "zero": 2, "schedule": "interleaved"}),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_same_bits_on_meshes(mesh: str, shared_ranks: SharedRanks) -> None:
    ranks, axes = MESHES[mesh]
    deep = [{"model": {"layers": 4}}] if "schedule" in axes else []  # two stages a rank
    tables = precision("bfloat16"), *deep
    found = bits_on(shared_ranks, ranks, *tables, parallel(**axes))
    assert found == bits_alone(shared_ranks, *tables)


VARIANTS: dict[str, dict[str, Any]] = {
    "ragged-batch": {"train": {"global_batch": 11, "micro_batch": 2}},
    "experts": {"model": {"moe": {"experts": 4, "top_k": 2, "ffn": 32, "balance": "bias"}}},
    "fp16": precision("float16"),
    "tied": {"model": {"tied_embedding": True}},
    "recompute": {"memory": {"recompute": "full"}},
}


IN_SOAK = {("fp16", 2), ("tied", 4), ("recompute", 2)}
OTHER_JOBS = [
    pytest.param(variant, ranks, marks=pytest.mark.soak if (variant, ranks) in IN_SOAK else ())
    for variant in VARIANTS
    for ranks in (2, 4)
]


@pytest.mark.parametrize(("variant", "ranks"), OTHER_JOBS)
def test_same_bits_of_other_jobs(variant: str, ranks: int, shared_ranks: SharedRanks) -> None:
    table, sharded = VARIANTS[variant], parallel(zero=0 if ranks == 2 else 3)
    assert bits_on(shared_ranks, ranks, table, sharded) == bits_alone(shared_ranks, table)


def _in_pieces(
    shared_ranks: SharedRanks,
    folder: Path,
    replicas: tuple[int, ...],
    each: int,
    *tables: dict[str, Any],
    pipeline: int = 1,
) -> None:
    """A run that goes on with another number of replicas after every ``each`` steps."""
    steps: tuple[str, ...] = ()
    schedule = {"schedule": {"kind": "constant"}}
    for number, count in enumerate(replicas):
        length, ranks = {"train": {"steps": each * (number + 1)}}, count * pipeline
        job = job_on(ranks, *tables, schedule, length, parallel(pipeline=pipeline))
        part = shared_ranks.run(ranks, train, job, folder, each * number)[0]
        validation, steps = part.steps[-1:], steps + part.steps[:-1]
    whole = job_on(1, *tables, schedule, {"train": {"steps": each * len(replicas)}})
    assert shared_ranks.run(1, train, whole)[0] == Bits(steps + validation, part.state)


def test_same_bits_when_the_number_of_replicas_changes(
    shared_ranks: SharedRanks, tmp_path: Path
) -> None:
    _in_pieces(shared_ranks, tmp_path, (4, 2, 4), 2, precision("bfloat16"), parallel(zero=3))


@pytest.mark.parametrize("name", ["virtual_replicas", "micro_batch"])
def test_a_checkpoint_of_other_sums_is_refused(name: str) -> None:
    before = msgspec.to_builtins(job_on(1))
    refuse_state_of(job_on(1), before, "there")
    refuse_state_of(job_on(1), {}, "there")  # from a run without virtual replicas
    with pytest.raises(ConfigError, match=f"train.{name} = 2: there was trained with"):
        refuse_state_of(job_on(1, {"train": {name: 2}}), before, "there")


@pytest.mark.soak
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_sixty_steps_on_1_2_4_and_8_replicas(
    pipeline: int, zero: int, compute: str, shared_ranks: SharedRanks, tmp_path: Path
) -> None:
    length = {"train": {"steps": 60, "virtual_replicas": 8, "global_batch": 16}}
    tables = precision(compute), parallel(zero=zero, pipeline=pipeline), length
    expected = bits_alone(shared_ranks, precision(compute), length)
    for replicas in (1, 2, 4, 8):
        assert bits_on(shared_ranks, replicas * pipeline, *tables) == expected
    changing = precision(compute), parallel(zero=zero)
    _in_pieces(shared_ranks, tmp_path, (4, 2, 4, 2, 4), 12, *changing, pipeline=pipeline)
