"""Gradients that went wrong in silence are found by recomputation, which changes no bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.cluster.detectors import vote
from phalanx.config import job_from_table, resolve, verification_interval
from phalanx.train.optim.verification import GradientVerification, judge
from tests.shared_ranks import SharedRanks
from tests.train.verified_steps import (
    Flips,
    flipping,
    make_flipped_steps,
    make_step,
    make_trainer,
    state,
    unsharded,
    verified_step,
)

MOE = {"experts": 4, "top_k": 2, "ffn": 32, "balance": "bias"}
FLIPS = 5  # each rank, and the first one again in its other micro-batch


def _flips(flips: int, seed: int) -> tuple[Flips, dict[str, Tensor]]:
    trainer = make_trainer(4)
    return make_flipped_steps(trainer, flips, seed), state(trainer)


def _plain(steps: int) -> dict[str, Tensor]:
    trainer = make_trainer(4)
    for _ in range(steps):
        trainer.train_step()
    return state(trainer)


def find_all(shared_ranks: SharedRanks, flips: int, seed: int) -> None:
    results = shared_ranks.run(4, _flips, flips, seed)
    for made, _ in results:
        assert made.named == [(culprit,) for culprit in made.culprits] and made.alarms == 0
        assert len(made.named) == flips and set(made.culprits) == {0, 1, 2, 3}
        assert [vote({0: copies}).wrong for copies in made.copies] == made.named
    plain = shared_ranks.run(4, _plain, flips + 1)
    for (_, found), expected in zip(results, plain, strict=True):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_flipped_gradient_is_found_and_its_rank_is_named(shared_ranks: SharedRanks) -> None:
    find_all(shared_ranks, FLIPS, seed=7)


@pytest.mark.soak
def test_a_hundred_flipped_gradients_are_found_and_their_ranks_are_named(
    shared_ranks: SharedRanks,
) -> None:
    for seed in range(5):
        find_all(shared_ranks, 20, seed)


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "zero-3": {},
    "zero-2-float16-recompute": {
        "parallel": {"zero": 2},
        "precision": {"compute": "float16"},
        "memory": {"recompute": "full"},
    },
    "experts": {"model": {"moe": MOE}},
    "documents-padded-tied-offloaded": {
        "data": {"document_mask": True},
        "train": {"global_batch": 13},
        "model": {"tied_embedding": True},
        "memory": {"offload_activations": True},
    },
    "replicas": {"parallel": {"replicate": 2}},
    "bfloat16-reduced-as-computed": {
        "precision": {"compute": "bfloat16"},
        "parallel": {"reduce_dtype": "compute"},
    },
}


def _losses(sections: dict[str, dict[str, Any]], verified: bool) -> tuple[list[float], Any]:
    trainer = make_trainer(dist.get_world_size(), **sections)
    losses = []
    verification = GradientVerification(trainer, 1) if verified else None
    assert verification is None or verification.active
    for _ in range(3):  # the turn of each of two ranks, and one after it
        if verification is None:
            outcome = trainer.train_step()
        else:
            outcome = verified_step(trainer, verification)
            assert verification.active
        losses.append(outcome.loss.item())
    return losses, state(trainer)


@pytest.mark.parametrize("case", CASES)
def test_verification_changes_no_bit_of_training_and_raises_no_alarm(
    case: str, shared_ranks: SharedRanks
) -> None:
    ranks = 4 if case == "replicas" else 2
    verified = shared_ranks.run(ranks, _losses, CASES[case], True)
    plain = shared_ranks.run(ranks, _losses, CASES[case], False)
    for (losses, found), (expected_losses, expected) in zip(verified, plain, strict=True):
        assert losses == expected_losses
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def _errs_always(world: int, culprit: int) -> tuple[int, Any, tuple[int, ...]]:
    trainer = make_trainer(world)
    verification = GradientVerification(trainer, 1)
    assert make_step(trainer, verification) is None
    if dist.get_rank() == culprit:
        for backward in range(6):
            unsharded(trainer)[0].register_hook(flipping(3, 20, backward))
    finding = make_step(trainer, verification)
    assert finding is not None
    return finding.step, finding.copies, finding.changed


@pytest.mark.parametrize("culprit", [1, 2])  # at step 2 it is the turn of rank 2
def test_a_rank_that_errs_every_time_is_named_whoever_is_verified(
    culprit: int, shared_ranks: SharedRanks
) -> None:
    for step, copies, changed in shared_ranks.run(4, _errs_always, 4, culprit):
        assert (step, changed) == (2, (culprit,))
        assert len(copies) == 3  # it, and as many others as a majority needs


def test_of_two_ranks_one_that_insists_is_left_to_a_third(shared_ranks: SharedRanks) -> None:
    for _, copies, changed in shared_ranks.run(2, _errs_always, 2, 0):
        assert changed == () and [rank for rank, _ in copies] == [0, 1]


def _told() -> list[tuple[bool, str]]:
    """A step that two ranks disagreed on is made again: what it gives is told."""
    trainer = make_trainer(2)
    found = []
    for told in ((0, 0), (1, 0)):
        finding = make_step(trainer, GradientVerification(trainer, 1, told))
        found.append((finding is not None, str(finding)))
        trainer.step = 0
    return found


def test_a_step_that_is_asked_about_is_told_though_all_agree(shared_ranks: SharedRanks) -> None:
    for first, second in shared_ranks.run(2, _told):
        assert first == (False, "None")
        assert second[0] and "recomputed gradients agree this time at step 1" in second[1]


def _all_differ() -> tuple[bool, bool]:
    trainer = make_trainer(3)
    verification = GradientVerification(trainer, 1)
    assert make_step(trainer, verification) is None
    if rank := dist.get_rank():
        unsharded(trainer)[0].register_hook(flipping(3, rank, 0))
    quiet = make_step(trainer, verification) is None
    return quiet, verification.active


def test_where_no_majority_agrees_nobody_is_accused_and_verification_ends(
    shared_ranks: SharedRanks,
) -> None:
    assert shared_ranks.run(3, _all_differ) == [(True, False)] * 3


JUDGED: dict[str, tuple[int, int, list[int], Any]] = {
    "all agree": (1, 5, [5, 5, 5], None),
    "its step went wrong": (1, 9, [5, 5, 5], (((0, 5), (1, 9), (2, 5)), (1,))),
    "its recomputation did": (1, 5, [5, 9, 5], (((0, 5), (1, 9), (2, 5)), (1,))),
    "both did": (1, 9, [5, 9, 5], (((0, 5), (1, 9), (2, 5)), (1,))),
    "another one's did": (1, 5, [5, 5, 9], (((0, 5), (1, 5), (2, 9)), (2,))),
    "two at once": (
        *(0, 8, [5, 5, 9, 5, 5, 5]),
        (((0, 8), (1, 5), (2, 9), (3, 5), (4, 5)), (0, 2)),
    ),
    "of two, its step": (0, 9, [5, 5], (((0, 9), (1, 5)), (0,))),
    "of two, its recomputation": (0, 5, [9, 5], (((0, 9), (1, 5)), (0,))),
    "of two, each insists": (0, 9, [9, 5], (((0, 9), (1, 5)), ())),
    "of two, nothing agrees": (0, 7, [9, 5], (((0, 9), (1, 5)), ())),
    "of three, nothing agrees": (0, 7, [7, 8, 9], (((0, 7), (1, 8), (2, 9)), ())),
    "two camps": (0, 5, [5, 5, 9, 9], (((0, 5), (1, 5), (2, 9), (3, 9)), ())),
}


@pytest.mark.parametrize("case", JUDGED)
def test_who_is_wrong(case: str) -> None:
    turn, in_course, again, expected = JUDGED[case]
    found = judge(turn, in_course, again)
    assert found is None if expected is None else found == expected


INTERVALS: list[tuple[list[str], int, int]] = [
    ([], 4, 200),
    (["parallel.zero=2"], 4, 200),
    ([], 1, 0),
    (["parallel.zero=1"], 4, 0),
    (["parallel.zero=0"], 4, 0),
    (["parallel.replicate=2"], 4, 0),
    (["parallel.tensor=2"], 4, 0),
    (["parallel.pipeline=2"], 4, 0),
    (["parallel.context=2"], 4, 0),
    (["train.verify_every=0"], 4, 0),
    (["train.verify_every=7", "parallel.replicate=2"], 4, 7),
]


@pytest.mark.parametrize(("overrides", "world", "expected"), INTERVALS)
def test_sharded_jobs_without_replicas_are_verified(
    overrides: list[str], world: int, expected: int
) -> None:
    job = resolve(job_from_table({"model": {"preset": "tiny"}}, overrides), world)
    assert verification_interval(job, "cpu") == expected
    assert verification_interval(job, "cuda") == max(0, job.train.verify_every)
