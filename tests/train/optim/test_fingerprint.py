"""Replicas that hold other bits than their peers are found, and who they are can be told."""

from __future__ import annotations

import torch
import torch.distributed as dist

from phalanx.config import job_from_table, resolve
from phalanx.parallel.mesh import build_mesh
from phalanx.train.optim.fingerprint import Copies, Fingerprints, ReplicaDivergence
from phalanx.train.rank.drill import _flip_bit
from phalanx.train.trainer import Trainer
from tests.ranks import run_ranks


def make_trainer(world: int) -> Trainer:
    table = {
        "name": "x",
        "model": {"preset": "tiny", "dim": 64, "layers": 1, "ffn": 64, "vocab": 64},
        "data": {"sequence": 16},
        "parallel": {"data": world, "zero": 0},
        "precision": {"compute": "float32"},
        "train": {"steps": 4, "global_batch": 2 * world, "micro_batch": 2, "device": "cpu"},
    }
    job = resolve(job_from_table(table), world)
    device = torch.device("cpu")
    return Trainer(job, build_mesh(job, device), device)


def compare(prints: Fingerprints, step: int) -> ReplicaDivergence | None:
    try:
        prints.compare(step)
    except ReplicaDivergence as finding:
        return finding
    return None


def _flip_one(world: int, culprit: int) -> tuple[int, int, Copies, tuple[int, ...]]:
    trainer = make_trainer(world)
    prints = Fingerprints(trainer, 1)
    trainer.train_step(before_update=prints.note_sum)
    assert compare(prints, 1) is None
    if dist.get_rank() == culprit:
        _flip_bit(trainer)
    trainer.train_step(before_update=prints.note_sum)
    found = compare(prints, 2)
    assert found is not None
    return found.step, found.clean_step, found.copies, found.changed


def test_one_flipped_bit_in_one_of_three_replicas_stands_out() -> None:
    results = run_ranks(3, _flip_one, 3, 1)
    assert results[0] == results[1] == results[2]
    step, clean, copies, changed = results[0]
    assert (step, clean, changed) == (2, 1, (1,))
    sums = dict(copies)
    assert sums[0] == sums[2] != sums[1]


def test_of_two_replicas_the_one_whose_memory_changed_is_told() -> None:
    assert [found[3] for found in run_ranks(2, _flip_one, 2, 0)] == [(0,), (0,)]


def _dispute(culprit: int) -> tuple[Copies, Copies]:
    """An update goes wrong on one of two replicas; both go back and make the step again."""
    trainer = make_trainer(2)
    kept = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    trainer.train_step()
    if dist.get_rank() == culprit:
        _flip_bit(trainer)
    first = compare(Fingerprints(trainer, 1), 1)
    assert first is not None and first.changed == ()
    for name, tensor in trainer.tensors().items():
        tensor.copy_(kept[name])
    trainer.step, trainer.cursor = 0, trainer.feed.start()
    trainer.train_step()
    assert compare(Fingerprints(trainer, 1), 1) is None
    assert compare(Fingerprints(trainer, 1, (1, 1)), 1) is None  # another block, of other ranks
    second = compare(Fingerprints(trainer, 1, (1, 0)), 1)
    assert second is not None and "agree this time" in str(second)
    return first.copies, second.copies


def test_a_step_made_again_is_told_and_says_which_of_two_replicas_was_wrong() -> None:
    one, other = run_ranks(2, _dispute, 0)
    assert one == other
    first, second = dict(one[0]), dict(one[1])
    assert first[0] != first[1] == second[0] == second[1]
