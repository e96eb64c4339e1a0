"""Schedule-Free AdamW against its three sequences written out, and what it evaluates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.checkpoint import Checkpointer, latest
from phalanx.checkpoint.format.tier import open_source
from phalanx.checkpoint.read.load import StoredTensors
from phalanx.checkpoint.tools.convert import EvaluatedTensors
from phalanx.config import Optimizer
from phalanx.train.optim.schedule_free import ScheduleFreeAdamW
from phalanx.train.parity.prove import make_steps, make_trainer
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import make_job
from tests.train.optim.test_optimizer import set_gradients, verdict, weights

SETTINGS = Optimizer(kind="schedule-free", weight_decay=0.1, beta1=0.8)
RATES = (0.01, 0.02, 0.02)  # a warmup, as the mean weighs steps by their rates


class Sequences:
    """By the paper: fast weights, their mean, and the point in between; of one weight."""

    def __init__(self, start: Tensor, decay: float) -> None:
        self.fast, self.mean, self.second = start.clone(), start.clone(), torch.zeros_like(start)
        self.decay, self.steps, self.squares = decay, 0, 0.0

    @property
    def between(self) -> Tensor:
        return (1 - SETTINGS.beta1) * self.fast + SETTINGS.beta1 * self.mean

    def step(self, gradient: Tensor, rate: float) -> None:
        self.steps += 1
        self.squares += rate**2
        self.second = SETTINGS.beta2 * self.second + (1 - SETTINGS.beta2) * gradient.square()
        known = self.second / (1 - SETTINGS.beta2**self.steps)
        direction = gradient / (known.sqrt() + SETTINGS.eps) + self.decay * self.between
        self.fast = self.fast - rate * direction
        share = rate**2 / self.squares
        self.mean = (1 - share) * self.mean + share * self.fast


def test_it_follows_its_three_sequences() -> None:
    found = weights()
    optimizer = ScheduleFreeAdamW(found, SETTINGS)
    expected = [Sequences(w.master, 0.1 if w.parameter.ndim > 1 else 0.0) for w in found]
    for decays, weight in zip(expected, found, strict=True):
        if weight.declaration.decay is False:
            decays.decay = 0.0
    for step, rate in enumerate(RATES):
        set_gradients(found, step)
        for weight, sequences in zip(found, expected, strict=True):
            assert weight.parameter.grad is not None
            sequences.step(weight.parameter.grad, rate)
        optimizer.step(rate, verdict())
    for weight, sequences in zip(found, expected, strict=True):
        torch.testing.assert_close(weight.master, sequences.between)
    trained = [weight.master.clone() for weight in found]
    with optimizer.evaluated():
        for weight, sequences in zip(found, expected, strict=True):
            torch.testing.assert_close(weight.master, sequences.mean)
    assert all(torch.equal(w.master, was) for w, was in zip(found, trained, strict=True))


def test_a_skipped_step_leaves_every_bit() -> None:
    found = weights()
    optimizer = ScheduleFreeAdamW(found, SETTINGS)
    set_gradients(found, 0)
    optimizer.step(0.01, verdict())
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    masters = [weight.master.clone() for weight in found]
    for weight in found:
        weight.parameter.grad = torch.full_like(weight.parameter, torch.inf)
    optimizer.step(0.01, verdict(skip=True))
    assert all(torch.equal(before[name], t) for name, t in optimizer.tensors().items())
    assert all(torch.equal(w.master, was) for w, was in zip(found, masters, strict=True))


def make() -> Trainer:
    sections = {
        "model": {"layers": 1},
        "optimizer": {"kind": "schedule-free"},
        "schedule": {"kind": "constant", "warmup_steps": 2},
        "data": {"validation_fraction": 0.5},
        "train": {"steps": 4, "validate_samples": 4},
    }
    return make_trainer(make_job(1, sections))


def test_a_run_continues_to_the_bit_and_its_export_is_what_was_validated(tmp_path: Path) -> None:
    whole, then = make(), make()
    make_steps(whole, 2)
    Checkpointer(tmp_path).save(2, whole.tensors(), whole.extra())
    path = latest(tmp_path)
    assert path is not None
    then.restore(Checkpointer(tmp_path).load(path, then.tensors()))
    exported = EvaluatedTensors(StoredTensors(open_source(path)), lambda _: None, 0.9)
    with then.optimizer.evaluated():
        for weight in then.engine.weights:
            assert torch.equal(exported[weight.name], weight.master)
    assert then.validate() == whole.validate()
    assert make_steps(then, 2) == make_steps(whole, 2)
    assert all(torch.equal(t, whole.tensors()[name]) for name, t in then.tensors().items())
    for trainer in (whole, then):
        trainer.close()


def test_weights_from_elsewhere_begin_all_sequences() -> None:
    trainer = make()
    make_steps(trainer, 1)
    for weight in trainer.engine.weights:
        weight.master.fill_(0.5)
    trainer.start_from_weights()
    with trainer.optimizer.evaluated():
        for weight in trainer.engine.weights:
            assert weight.master.unique().tolist() == pytest.approx([0.5])
    trainer.close()
