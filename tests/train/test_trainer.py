"""The trainer in one process: bad steps leave no trace, batches do not change the mathematics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config import Job, check, job_from_table, resolve
from phalanx.data import Feed, StepBatches
from phalanx.data.feed import WEIGHTLESS
from phalanx.parallel import build_mesh
from phalanx.train.trainer import StepOutcome, Trainer
from tests.train.host_reads import no_host_reads

CPU = torch.device("cpu")
MOE = {"experts": 4, "top_k": 2, "ffn": 16, "shared_experts": 1}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "moe": {"moe": MOE},
    "moe-bias": {"moe": {**MOE, "balance": "bias", "score": "sigmoid", "bias_rate": 0.01}},
}


def make_job(**sections: dict[str, Any]) -> Job:
    """A small fp32 job with ``sections`` laid over it."""
    table: dict[str, Any] = {
        "model": {"dim": 16, "layers": 2, "heads": 2, "ffn": 32, "vocab": 48},
        "data": {"sequence": 16, "prefetch": 0},
        "precision": {"compute": "float32"},
        "train": {"steps": 10, "global_batch": 4, "micro_batch": 2, "device": "cpu"},
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"kind": "constant"},
    }
    for section, values in sections.items():
        table[section] = {**table.get(section, {}), **values}
    job = resolve(job_from_table(table), 1)
    check(job, 1)
    return job


def make_trainer(**sections: dict[str, Any]) -> Trainer:
    job = make_job(**sections)
    return Trainer(job, build_mesh(job, CPU), CPU)


def same_batch_again(trainer: Trainer) -> None:
    """Let every step read the first batch, so that learning shows in a few of them."""
    trainer.feed.advance = lambda cursor: cursor  # type: ignore[method-assign]


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Every bit that a skipped step must leave, the low-precision weights included."""
    kept = {k: v for k, v in trainer.tensors().items() if not k.startswith("scale.")}
    kept |= {f"local.{w.name}": w.local for w in trainer.engine.weights}
    return {name: value.clone() for name, value in kept.items()}


def poisoned_step(trainer: Trainer, value: float, layer: str = "0") -> StepOutcome:
    """A step whose backward meets ``value`` in one block."""

    def poison(_: Any, __: Any, out: Tensor) -> Tensor:
        out.register_hook(lambda gradient: gradient * value)
        return out

    block = trainer.engine.parts[0].layers[layer]
    with block.register_forward_hook(poison):
        return trainer.train_step()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", ["dense", "moe-bias"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_gradient_that_is_not_finite_changes_nothing_but_is_told(
    value: float, compute: str, model: str, kind: str
) -> None:
    trainer = make_trainer(
        precision={"compute": compute, "initial_loss_scale": 256.0},
        model=MODELS[model],
        optimizer={"kind": kind},
    )
    assert not trainer.train_step().skipped
    before = state(trainer)
    outcome = poisoned_step(trainer, value)
    assert outcome.skipped
    assert not torch.isfinite(outcome.grad_norm)
    after = state(trainer)
    for name, kept in before.items():
        assert torch.equal(kept, after[name]), name
    # The run goes on: the batch counts as consumed, and nothing of the bad step remains.
    assert (trainer.step, trainer.cursor.consumed) == (2, 8)
    following = trainer.train_step()
    assert not following.skipped
    assert torch.isfinite(following.grad_norm)
    changed = state(trainer)
    assert all(not torch.equal(before[n], changed[n]) for n in before if n.startswith("model."))


def without_labels(batches: StepBatches) -> StepBatches:
    """The same tokens, none of which counts."""
    silent = [
        msgspec.structs.replace(batch, labels=np.full_like(batch.labels, WEIGHTLESS))
        for batch in batches.micro_batches
    ]
    return msgspec.structs.replace(batches, micro_batches=silent, real_tokens=0)


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", ["dense", "moe", "moe-bias"])
def test_a_batch_without_labels_has_no_loss_no_gradient_and_changes_nothing(
    compute: str, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(
        precision={"compute": compute, "initial_loss_scale": 256.0},
        model=MODELS[model],
        optimizer={"spike_factor": 3.0},
    )
    assert trainer.train_step().labels > 0
    before, read = state(trainer), trainer.feed.next
    trainer.feed.next = lambda cursor: without_labels(read(cursor))  # type: ignore[method-assign]
    outcome = trainer.train_step()
    assert (outcome.loss.item(), outcome.grad_norm.item()) == (0.0, 0.0)
    assert outcome.skipped and outcome.labels == 0
    assert "step 2: no token of its batch has a label" in caplog.text
    after = state(trainer)
    for name, kept in before.items():
        assert torch.equal(kept, after[name]), name
    trainer.feed.next = read  # type: ignore[method-assign]
    assert not trainer.train_step().skipped


def test_a_validation_without_labels_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(data={"validation_fraction": 0.5}, train={"validate_samples": 4})
    read = Feed.next
    monkeypatch.setattr(Feed, "next", lambda feed, cursor: without_labels(read(feed, cursor)))
    assert math.isnan(trainer.validate())


def test_a_nan_weight_is_reported_by_every_step_and_spreads_nowhere() -> None:
    trainer = make_trainer()
    trainer.engine.weights[-1].master[0, 0] = math.nan
    before = state(trainer)
    outcomes = [trainer.train_step() for _ in range(3)]
    assert all(outcome.skipped and outcome.loss.isnan() for outcome in outcomes)
    for name, kept in before.items():
        assert torch.equal(kept.nan_to_num(7.0), state(trainer)[name].nan_to_num(7.0)), name


def test_with_the_guard_off_a_bad_step_is_applied() -> None:
    trainer = make_trainer(optimizer={"skip_non_finite": False})
    outcome = poisoned_step(trainer, math.nan)
    assert not outcome.skipped
    assert any(weight.master.isnan().any() for weight in trainer.engine.weights)


def test_a_spike_is_skipped_after_the_warm_up() -> None:
    trainer = make_trainer(optimizer={"spike_factor": 4.0}, train={"steps": 40})
    assert not poisoned_step(trainer, 1e4).skipped
    while trainer.step < 39:
        assert not trainer.train_step().skipped
    # The early spike is in the mean; a larger one stands out.
    before = state(trainer)
    assert poisoned_step(trainer, 1e7).skipped
    for name, kept in before.items():
        learned = name.startswith("guard.")  # what is usual, of spikes too
        assert learned or torch.equal(kept, state(trainer)[name]), name


def test_clipping_bounds_the_update_but_not_the_reported_norm() -> None:
    """With beta1 = 0 the first moment is the gradient that the optimizer saw."""
    trainer = make_trainer(optimizer={"clip_norm": 0.01, "beta1": 0.0})
    outcome = trainer.train_step()
    assert outcome.grad_norm > 0.1
    tensors = trainer.tensors()
    seen = [v for k, v in tensors.items() if k.startswith("optimizer.exp_avg.")]
    norm = torch.stack([v.norm() for v in seen]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_fp16_halves_its_scale_on_overflow_and_doubles_it_after_good_steps() -> None:
    trainer = make_trainer(
        precision={
            "compute": "float16",
            "initial_loss_scale": 256.0,
            "loss_scale_growth_steps": 3,
        },
        train={"steps": 20},
    )
    scale = trainer.loss_scale

    def after(step: Callable[[], StepOutcome]) -> float:
        step()
        return float(scale.value)

    assert [after(trainer.train_step) for _ in range(3)] == [256.0, 256.0, 512.0]
    assert after(lambda: poisoned_step(trainer, math.inf)) == 256.0
    # An overflow starts the count afresh.
    assert [after(trainer.train_step) for _ in range(3)] == [256.0, 256.0, 512.0]


def test_fp16_finds_a_scale_it_can_train_with() -> None:
    trainer = make_trainer(
        precision={"compute": "float16", "initial_loss_scale": 2.0**24},
        optimizer={"learning_rate": 1e-2},
        train={"steps": 40},
    )
    same_batch_again(trainer)
    outcomes = [trainer.train_step() for _ in range(32)]
    skipped = [bool(outcome.skipped) for outcome in outcomes]
    assert skipped[0] and not skipped[-1]
    assert trainer.loss_scale.value == 2.0 ** (24 - sum(skipped))
    assert sum(skipped) < 20
    assert outcomes[-1].loss < outcomes[0].loss - 0.3


def test_fp16_tells_the_true_loss_and_norm_whatever_the_scale() -> None:
    plain = make_trainer().train_step()
    for scale in (1.0, 4096.0):
        found = make_trainer(
            precision={"compute": "float16", "initial_loss_scale": scale}
        ).train_step()
        assert found.loss.item() == pytest.approx(plain.loss.item(), rel=1e-3)
        assert found.grad_norm.item() == pytest.approx(plain.grad_norm.item(), rel=2e-2)


def trained(steps: int = 4, **sections: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and gradient norms of each step, and the state at the end."""
    trainer = make_trainer(**sections)
    outcomes = [trainer.train_step() for _ in range(steps)]
    values = [torch.stack((outcome.loss, outcome.grad_norm)) for outcome in outcomes]
    return values, state(trainer)


@pytest.mark.parametrize("model", MODELS)
def test_the_micro_batch_does_not_change_the_step(model: str) -> None:
    expected, _ = trained(model=MODELS[model], train={"micro_batch": 4})
    for micro_batch in (1, 2, 3):  # three: the last micro-batch is padded with weightless samples
        found, _ = trained(model=MODELS[model], train={"micro_batch": micro_batch})
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("document_mask", [False, True])
def test_a_step_has_the_mean_loss_and_the_gradient_norm_of_its_batch(document_mask: bool) -> None:
    trainer = make_trainer(data={"document_mask": document_mask})
    job, model = trainer.job, trainer.engine.parts[0]
    feed = Feed(job.data, job.model.vocab, 4, 4, 0, 1, "train")
    (batch,) = feed.next(feed.start()).micro_batches
    documents = None if batch.documents is None else torch.from_numpy(batch.documents)
    logits = model(torch.from_numpy(batch.tokens), documents=documents)
    loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    outcome = trainer.train_step()
    torch.testing.assert_close(outcome.loss, loss, rtol=1e-5, atol=0)
    torch.testing.assert_close(outcome.grad_norm, norm, rtol=1e-5, atol=0)
    assert (outcome.first_sample, outcome.samples, outcome.tokens) == (0, 4, 64)


MEMORY: dict[str, dict[str, Any]] = {
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "offload-activations": {"offload_activations": True},
    "full-and-offload": {"recompute": "full", "offload_activations": True},
}


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("model", MODELS)
def test_saving_memory_does_not_change_a_bit(memory: str, model: str) -> None:
    values, expected = trained(model=MODELS[model])
    found_values, found = trained(model=MODELS[model], memory=MEMORY[memory])
    torch.testing.assert_close(found_values, values, rtol=1e-6, atol=0)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_bf16_accumulates_micro_batches_in_fp32() -> None:
    """Many small gradients beside a large one: a bf16 sum would lose them."""
    job_of = {"precision": {"compute": "bfloat16"}, "train": {"micro_batch": 1}}
    trainer = make_trainer(**job_of)
    weight = trainer.engine.weights[0]
    sizes = iter((1.0, 2.0**-9, 2.0**-9, 2.0**-9))
    seen: list[Tensor] = []

    def known_gradient(gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, next(sizes))

    weight.parameter.register_hook(known_gradient)
    judge = trainer.guard.judge

    def look(*args: Tensor) -> Any:
        seen.append(weight.gradient.clone())
        return judge(*args)

    trainer.guard.judge = look  # type: ignore[method-assign]
    trainer.train_step()
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], torch.full_like(seen[0], 1 + 3 * 2.0**-9))
    trainer.guard.judge = judge  # type: ignore[method-assign]
    assert weight.gradient.count_nonzero() == 0


def test_bf16_weights_are_the_rounded_masters() -> None:
    trainer = make_trainer(precision={"compute": "bfloat16"})
    for _ in range(3):
        trainer.train_step()
    for weight in trainer.engine.weights:
        assert weight.local.dtype == torch.bfloat16
        assert weight.master.dtype == torch.float32
        assert torch.equal(weight.local, weight.master.bfloat16())
        assert not torch.equal(weight.local.float(), weight.master) or weight.master.ndim == 1


@pytest.mark.parametrize("document_mask", [False, True])
def test_validation_is_the_mean_loss_of_the_held_out_samples(document_mask: bool) -> None:
    trainer = make_trainer(
        data={"validation_fraction": 0.25, "document_mask": document_mask},
        train={"validate_samples": 8},
    )
    trainer.train_step()
    job = trainer.job
    feed = Feed(job.data, job.model.vocab, 8, 8, 0, 1, "validation")
    (batch,) = feed.next(feed.start()).micro_batches
    documents = None if batch.documents is None else torch.from_numpy(batch.documents)
    with torch.no_grad():
        logits = trainer.engine.parts[0](torch.from_numpy(batch.tokens), documents=documents)
    expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.labels).flatten())
    assert trainer.validate() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_validation_leaves_training_as_it_was(model: str) -> None:
    sections = {"data": {"validation_fraction": 0.25}, "model": MODELS[model]}
    expected, _ = trained(**sections)
    trainer = make_trainer(**sections)
    found = []
    for _ in range(4):
        first = trainer.validate()
        assert trainer.validate() == first
        outcome = trainer.train_step()
        found.append(torch.stack((outcome.loss, outcome.grad_norm)))
    assert torch.equal(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("model", MODELS)
def test_training_learns_a_batch_by_heart(kind: str, model: str) -> None:
    trainer = make_trainer(
        model=MODELS[model], optimizer={"kind": kind, "learning_rate": 2e-2}, train={"steps": 20}
    )
    same_batch_again(trainer)
    losses = [trainer.train_step().loss.item() for _ in range(20)]
    assert losses[0] == pytest.approx(math.log(48), abs=0.1)
    assert losses[-1] < losses[0] - 0.7


@pytest.mark.parametrize("compute", ["float32", "float16"])
def test_no_saved_state_changes_before_a_running_copy_is_waited_for(compute: str) -> None:
    trainer = make_trainer(precision={"compute": compute}, model=MODELS["moe-bias"])
    trainer.train_step()
    before = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    seen: list[dict[str, Tensor]] = []

    def copy() -> None:
        seen.append({name: tensor.clone() for name, tensor in trainer.tensors().items()})

    trainer.train_step(before_update=copy)
    assert [name for name in before if not torch.equal(seen[0][name], before[name])] == []
    assert any(not torch.equal(t, before[name]) for name, t in trainer.tensors().items())


def test_the_learning_rate_follows_the_schedule() -> None:
    trainer = make_trainer(
        schedule={"kind": "wsd", "warmup_steps": 2, "decay_steps": 4, "final_fraction": 0.5}
    )
    rates = [trainer.train_step().learning_rate / 3e-3 for _ in range(10)]
    expected = [0.5, 1, 1, 1, 1, 1, 0.875, 0.75, 0.625, 0.5]
    assert rates == pytest.approx(expected)


def test_the_update_of_a_step_reads_nothing_on_the_host() -> None:
    trainer = make_trainer(model=MODELS["moe-bias"], optimizer={"spike_factor": 3.0})
    trainer.train_step()
    update = trainer._update

    def watched(*args: Any) -> StepOutcome:
        with no_host_reads():
            return update(*args)

    trainer._update = watched  # type: ignore[method-assign]
    outcome = trainer.train_step()
    assert all(isinstance(t, Tensor) for t in (outcome.loss, outcome.grad_norm, outcome.skipped))
