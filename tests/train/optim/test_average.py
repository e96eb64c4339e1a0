"""The moving average of weights: its formula, what leaves it alone, and where it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.checkpoint import Checkpointer, latest
from phalanx.config import Ema
from phalanx.train.optim.average import WeightAverage
from phalanx.train.parity.prove import make_steps, make_trainer
from tests.parallel.test_parity import make_job
from tests.train.optim.test_optimizer import weights

KEPT, SKIPPED = torch.tensor(False), torch.tensor(True)


def after(settings: Ema, skips: list[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The averages after some steps, and the weights before them and after each."""
    found = weights()
    average = WeightAverage(found, settings)
    seen = [[weight.master.clone() for weight in found]]
    for step, skip in enumerate(skips, 1):
        for weight in found:
            weight.master.add_(step)
        seen.append([weight.master.clone() for weight in found])
        average.update(step, skip)
    assert [*average.tensors()] == [f"ema.{weight.name}" for weight in found]
    return list(average.tensors().values()), seen


def test_each_update_keeps_a_share_of_the_average() -> None:
    averages, (start, first, second) = after(Ema(decay=0.75), [KEPT, KEPT])
    for average, w0, w1, w2 in zip(averages, start, first, second, strict=True):
        expected = 0.75 * (0.75 * w0 + 0.25 * w1) + 0.25 * w2
        torch.testing.assert_close(average, expected)


def test_a_skipped_step_and_steps_between_updates_leave_every_bit() -> None:
    averages, (start, *_) = after(Ema(decay=0.5), [SKIPPED, SKIPPED])
    assert all(map(torch.equal, averages, start))
    averages, (start, *_) = after(Ema(decay=0.5, every=3), [KEPT, KEPT])
    assert all(map(torch.equal, averages, start))


def test_until_it_begins_the_average_is_the_weights() -> None:
    averages, (_, _, second) = after(Ema(decay=0.5, begin_step=2), [KEPT, KEPT])
    assert all(map(torch.equal, averages, second))


def test_without_settings_there_is_none() -> None:
    average = WeightAverage(weights(), None)
    average.update(1, KEPT)
    assert average.tensors() == {}


@pytest.mark.parametrize("saved_with", [False, True])
def test_a_run_goes_on_with_its_average_or_begins_one_from_its_weights(
    saved_with: bool, tmp_path: Path
) -> None:
    ema = {"ema": {"decay": 0.5}}
    first = make_trainer(make_job(1, {"model": {"layers": 1}, "train": ema if saved_with else {}}))
    make_steps(first, 2)
    Checkpointer(tmp_path).save(2, first.tensors(), first.extra())
    then = make_trainer(make_job(1, {"model": {"layers": 1}, "train": ema}))
    make_steps(then, 1)  # its average is not that of the weights to come
    path = latest(tmp_path)
    assert path is not None
    then.restore(Checkpointer(tmp_path).load(path, then.tensors()))
    for name, tensor in then.average.tensors().items():
        source = first.tensors()[name if saved_with else name.replace("ema.", "model.", 1)]
        assert torch.equal(tensor, source), name
    for trainer in (first, then):
        trainer.close()


def test_weights_from_elsewhere_begin_the_average() -> None:
    trainer = make_trainer(make_job(1, {"model": {"layers": 1}, "train": {"ema": {"decay": 0.5}}}))
    for weight in trainer.engine.weights:
        weight.master.add_(1.0)
    trainer.start_from_weights()
    for weight in trainer.engine.weights:
        assert torch.equal(trainer.average.tensors()[f"ema.{weight.name}"], weight.master)
    trainer.close()


def test_validation_takes_the_average_where_it_is_asked_to() -> None:
    losses = {}
    for decay, validate in ((0.5, False), (0.5, True), (0.0, True)):
        sections = {
            "model": {"layers": 1},
            "data": {"validation_fraction": 0.5},
            "train": {"validate_samples": 4, "ema": {"decay": decay, "validate": validate}},
        }
        trainer = make_trainer(make_job(1, sections))
        make_steps(trainer, 2)
        before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
        losses[decay, validate] = trainer.validate()
        assert all(torch.equal(t, before[name]) for name, t in trainer.tensors().items())
        trainer.close()
    assert losses[0.5, True] != losses[0.5, False]
    assert losses[0.0, True] == losses[0.5, False], "then the average is the weights"
