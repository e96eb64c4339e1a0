"""Runs a cell and says where its meshes and plain training come apart."""

from __future__ import annotations

import hashlib
import logging
import math
import random
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.checkpoint import Checkpointer, latest
from phalanx.config import Job, batch_ramp, takes_unequal_shares
from phalanx.train.evaluate.rows import ScoreRequest
from phalanx.train.evaluate.score import GangScorer
from phalanx.train.parity.prove import make_trainer, whole_weights
from phalanx.train.trainer import Trainer
from tests.parallel.random_jobs.draw import Cell
from tests.parallel.random_jobs.plain_training import PlainRun, PlainTraining
from tests.shared_ranks import SharedRanks

LOSS, NORM = 3e-6, 3e-5
SCORE = 1e-5
WAY = 2e-3  # of the way that a weight went
UNDECIDED = 2e-7  # in scores of experts: rounding may choose another one for some token
ROUNDING = 1e-7  # of fp32 masters near one, over a few steps


class Found(NamedTuple):
    """What a rank comes to."""

    steps: list[tuple[float, float]]
    tensors: dict[str, Tensor]  # weights, averages, biases and shares, whole
    validated: float
    scores: list[float]  # log-probabilities of texts, by the gang
    digests: str  # of all state


def first_weights(job: Job) -> dict[str, Tensor]:
    trainer = make_trainer(job)
    trainer.close()
    return {name: value.detach().clone() for name, value in whole_weights(trainer)}


def run_first(job: Job, saved: int, folder: Path) -> tuple[Found, str]:
    """Train, save on the way, and train on; and once more from what was saved."""
    trainer = make_trainer(job)
    trainer.rebalance(uneven_shares(job))
    steps = _steps(trainer, saved)
    Checkpointer(folder, keep=0).save(trainer.step, trainer.tensors(), trainer.extra())
    steps += _steps(trainer, job.train.steps - saved)
    found = _found(trainer, steps)
    return found, run_then(job, folder, uneven_shares(job)).digests


def run_then(job: Job, folder: Path, shares: tuple[int, ...] = ()) -> Found:
    """Continue from what was saved."""
    trainer = make_trainer(job)
    trainer.rebalance(shares)
    path = latest(folder)
    assert path is not None
    trainer.restore(Checkpointer(folder, keep=0).load(path, trainer.tensors()))
    return _found(trainer, _steps(trainer, job.train.steps - trainer.step))


def uneven_shares(job: Job) -> tuple[int, ...]:
    """Micro-batches by replica, the first with most, where they may differ; else ()."""
    replicas = job.parallel.data
    if not takes_unequal_shares(job) or replicas == 1:
        return ()
    whole = -(-batch_ramp(job).largest // job.train.micro_batch)
    if job.train.sequence_stages or whole < replicas:
        return ()
    return (whole - replicas + 1, *[1] * (replicas - 1))


def _steps(trainer: Trainer, count: int) -> list[tuple[float, float]]:
    outcomes = [trainer.train_step() for _ in range(count)]
    return [(each.loss.item(), each.grad_norm.item()) for each in outcomes]


def _found(trainer: Trainer, steps: list[tuple[float, float]]) -> Found:
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    validated = trainer.validate() if trainer.job.data.validation_fraction else 0.0
    scored = GangScorer(trainer.engine).score(texts(trainer.job))
    kept, state = {}, hashlib.sha256()
    for name, tensor in sorted(trainer.tensors().items()):
        own = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        state.update(
            name.encode() + own.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
        if name.startswith(("model.", "ema.", "balance.")):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            kept[name] = whole.detach().clone()
    trainer.close()
    scores = [each.log_probability for each in scored]
    return Found(steps, kept, validated, scores, state.hexdigest())


def texts(job: Job) -> list[ScoreRequest]:
    """Of many lengths, and not as many as ranks would share out evenly."""
    chance, longest = random.Random(job.data.seed), job.data.sequence
    lengths = [chance.randint(2, longest + 1) for _ in range(5)]
    return [
        ScoreRequest(
            tuple(chance.randrange(job.model.vocab) for _ in range(n)), chance.randint(1, n - 1)
        )
        for n in lengths
    ]


class Expected(NamedTuple):
    """What plain training comes to."""

    run: PlainRun
    start: dict[str, Tensor]  # weights before the first step
    scores: list[float]


def try_cell(cell: Cell, shared_ranks: SharedRanks) -> list[str]:
    """Everything that is wrong with a cell, in words."""
    start = first_weights(cell.alone)
    training = PlainTraining(cell.alone, start)
    expected = Expected(training.run(), start, training.score(texts(cell.alone)))
    if min(training.margins, default=1.0) < UNDECIDED:
        return []
    with tempfile.TemporaryDirectory(prefix="phalanx-cell-") as home:
        folder = Path(home)
        both = shared_ranks.run(cell.first.ranks, run_first, cell.first.job, cell.saved, folder)
        then = shared_ranks.run(cell.then.ranks, run_then, cell.then.job, folder)
    wrong = []
    for rank, (found, again) in enumerate(both):
        wrong += [f"first rank {rank}: {each}" for each in _differences(found, expected, 0)]
        if found.digests != again:
            wrong.append(f"first rank {rank}: resuming is not bitwise")
    for rank, found in enumerate(then):
        wrong += [f"then rank {rank}: {e}" for e in _differences(found, expected, cell.saved)]
    return wrong


def _differences(found: Found, expected: Expected, made: int) -> list[str]:
    """What a rank came to after ``made`` steps of others, against plain training."""
    wrong, plain = [], expected.run
    for number, (got, wanted) in enumerate(zip(found.steps, plain.steps[made:], strict=True), made):
        for what, value, theirs, most in zip(
            ("loss", "norm"), got, wanted, (LOSS, NORM), strict=True
        ):
            if not abs(value - theirs) <= most * max(abs(theirs), 1e-6):
                wrong.append(f"{what} of step {number}: {value:.8g}, not {theirs:.8g}")
    if not math.isclose(found.validated, plain.validated, rel_tol=SCORE) and not (
        math.isnan(found.validated) and math.isnan(plain.validated)  # no token has a label
    ):
        wrong.append(f"validation: {found.validated:.8g}, not {plain.validated:.8g}")
    for value, theirs in zip(found.scores, expected.scores, strict=True):
        if not abs(value - theirs) <= SCORE * abs(theirs):
            wrong.append(f"score of a text: {value:.8g}, not {theirs:.8g}")
    return wrong + [each for name, t in found.tensors.items() for each in _off(name, t, expected)]


def _off(name: str, value: Tensor, expected: Expected) -> list[str]:
    """Where a tensor is not as plain training has it."""
    kind, _, path = name.partition(".")
    if path in expected.start:
        before = expected.start[path].double()
        run = expected.run
        theirs = (run.averages if kind == "ema" else run.weights)[path]
        way, off = (theirs - before).norm().item(), (value.double() - theirs).norm().item()
        if off <= WAY * way + ROUNDING * (1 + before.norm().item()):
            return []
        return [f"{name}: off by {off:.3g} of a way of {way:.3g}"]
    router = path.removesuffix(".expert_bias").removesuffix(".load_share")
    known = expected.run.routers.get(router + ".share" if kind == "balance" else router)
    if known is None or torch.allclose(value.double(), known, rtol=1e-5, atol=ROUNDING):
        return []
    return [f"{name}: {value.tolist()}, not {known.tolist()}"]
