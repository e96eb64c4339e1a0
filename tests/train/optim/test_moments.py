"""Moments in fewer bits: what they mean, that no rounding goes one way, and how they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.checkpoint import Checkpointer, CheckpointError, latest
from phalanx.config import STATE_BLOCK, STATE_FORMATS, ConfigError, Optimizer
from phalanx.parallel import build_mesh
from phalanx.plan.workload import MOMENT_BYTES
from phalanx.train.optim.moments import Moments, decode, encode, zero_moments
from phalanx.train.optim.optimizer import AdamW
from phalanx.train.trainer import Trainer
from tests.parallel.test_parity import make_job
from tests.shared_ranks import SharedRanks
from tests.train.optim.test_optimizer import set_gradients, verdict, weights

LOW = ("bfloat16", "int8")
ROWS = {"model": {"dim": 256, "ffn": 256, "layers": 1}}


def pair(rows: int = 64, row: int = 2 * STATE_BLOCK) -> tuple[Tensor, Tensor]:
    """Moments whose blocks differ in size and hold small and large numbers."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** torch.empty(rows, 1).uniform_(-9, 0, generator=generator)
    first = size * torch.randn(rows, row, generator=generator)
    return first, (first * torch.rand(rows, row, generator=generator)) ** 2


@pytest.mark.parametrize("format", STATE_FORMATS)
def test_bytes_are_those_that_the_planner_counts(format: Any) -> None:
    master = torch.zeros(4, 4 * STATE_BLOCK)
    stored = zero_moments(master, master.shape[1], format).stored
    held = sum(each.numel() * each.element_size() for each in stored)
    assert held == MOMENT_BYTES[format] * master.numel()


@pytest.mark.parametrize("format", LOW)
def test_what_is_stored_lies_next_to_the_exact_value(format: Any) -> None:
    first, second = pair()
    found = decode(encode(zero_moments(first, first.shape[1], format), first, second, seed=1))
    for one, exact in zip(found, (first, second), strict=True):
        block = exact.view(-1, STATE_BLOCK).abs().amax(1, keepdim=True).expand(-1, STATE_BLOCK)
        share = exact.abs() / block.reshape(exact.shape)
        power, steps = (2, 127) if exact is first else (4, 255)
        step = power * (share ** (1 - 1 / power) + 1 / steps) / steps  # between neighbouring codes
        allowed = step if format == "int8" else share / 64
        off = (one - exact).abs() / block.reshape(exact.shape)
        assert bool((off <= allowed + 1e-7).all())


@pytest.mark.parametrize("format", LOW)
def test_no_rounding_goes_one_way(format: Any) -> None:
    first, second = pair(rows=4)
    kept = zero_moments(first, first.shape[1], format)
    totals = [torch.zeros_like(first), torch.zeros_like(second)]
    draws = 400
    for seed in range(draws):
        for total, one in zip(totals, decode(encode(kept, first, second, seed)), strict=True):
            total += one
    for total, exact in zip(totals, (first, second), strict=True):
        largest = exact.abs().max(1, keepdim=True).values
        fair = exact > 3e-9 * largest if exact is second else exact.abs() >= 0
        off = ((total / draws - exact).abs() / largest)[fair]
        assert off.max() < 2e-3  # of steps of up to 1.6 %


def test_a_small_second_moment_never_becomes_zero() -> None:
    first = torch.full((1, STATE_BLOCK), 1e-6)
    second = torch.full((1, STATE_BLOCK), 1e-20)
    second[0, 0] = 1.0
    for seed in range(20):
        _, found = decode(encode(zero_moments(first, STATE_BLOCK, "int8"), first, second, seed))
        assert bool((found > 0).all())
    nothing = encode(zero_moments(first, STATE_BLOCK, "int8"), first * 0, second * 0, 0)
    assert not any(bool(each.any()) for each in nothing.stored)


@pytest.mark.parametrize("format", LOW)
def test_chance_is_a_function_of_update_and_place(format: Any) -> None:
    first, second = pair()
    kept = zero_moments(first, first.shape[1], format)
    one, same, other = (encode(kept, first, second, seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.stored, same.stored, strict=True))
    assert not torch.equal(one.first, other.first)


def test_small_changes_of_a_large_moment_add_up() -> None:
    """Rounded to the nearest, a moment that changes by less than half a step never would."""
    first, second = torch.ones(1, STATE_BLOCK), torch.ones(1, STATE_BLOCK)
    for format in LOW:
        kept = zero_moments(first, STATE_BLOCK, format)
        held: Moments = encode(kept, first, second, 0)
        for step in range(1, 1001):
            a, b = decode(held)
            a[0, 1:] *= 0.9995  # the largest stays, so that the scale does
            b[0, 1:] *= 0.9995
            held = encode(kept, a, b, step)
        for found in decode(held):
            assert 0.5 < float(found[0, 1:].mean()) / 0.9995**1000 < 1.5


def test_vectors_and_odd_rows_keep_fp32() -> None:
    for shape in ((STATE_BLOCK,), (8, STATE_BLOCK + 1)):
        kept = zero_moments(torch.zeros(shape), shape[-1], "int8")
        assert not kept.in_blocks and kept.first.dtype == torch.float32


@pytest.mark.parametrize("format", LOW)
def test_a_skipped_step_leaves_every_bit(format: Any) -> None:
    found = weights()
    optimizer = AdamW(found, Optimizer(state=format), offload=False)
    set_gradients(found, 0)
    optimizer.step(0.01, verdict())
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    set_gradients(found, 1, size=float("nan"))
    optimizer.step(0.01, verdict(skip=True))
    after = optimizer.tensors()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def _last_loss(state: str) -> float:
    """The loss after some steps with moments in a format."""
    sections: dict[str, Any] = {"optimizer": {"state": state}, **ROWS}
    sections["train"] = {"steps": 30, "micro_batch": 8}
    job = make_job(1, sections)
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    losses = [trainer.train_step().loss.item() for _ in range(30)]
    trainer.close()
    return losses[-1]


def test_it_learns_as_with_fp32() -> None:
    exact = _last_loss("float32")
    for state in LOW:
        assert abs(_last_loss(state) / exact - 1) < 0.005, state


def _whole_state(trainer: Trainer) -> dict[str, bytes]:
    """Every tensor of the optimizer, put together from all ranks."""
    found = {}
    for name, tensor in sorted(trainer.tensors().items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if name.startswith("optimizer."):
            found[name] = whole.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return found


def _trained(folder: Path, ranks: int, parallel: dict[str, int], load: bool) -> dict[str, bytes]:
    sections = {"parallel": parallel, "optimizer": {"state": "int8"}, **ROWS}
    job = make_job(ranks, sections | {"train": {"micro_batch": 4}})
    device = torch.device("cpu")
    trainer = Trainer(job, build_mesh(job, device), device)
    checkpointer = Checkpointer(folder, keep=0)
    if load:
        path = latest(folder)
        assert path is not None
        trainer.restore(checkpointer.load(path, trainer.tensors()))
    else:
        for _ in range(2):
            trainer.train_step()
        checkpointer.save(trainer.step, trainer.tensors(), trainer.extra())
    trainer.close()
    return _whole_state(trainer)


def test_codes_and_scales_are_resharded(shared_ranks: SharedRanks, tmp_path: Path) -> None:
    saved, alone, sharded = (
        shared_ranks.run(ranks, _trained, tmp_path, ranks, parallel, ranks != 4)[0]
        for ranks, parallel in ((4, {"tensor": 2, "zero": 3}), (1, {}), (2, {"zero": 3}))
    )
    assert any("_code" in name for name in saved) and saved == alone == sharded


def test_another_format_is_converted_or_refused(tmp_path: Path) -> None:
    def state(format: str) -> Trainer:
        job = make_job(1, {"optimizer": {"state": format}, **ROWS})
        return Trainer(job, build_mesh(job, torch.device("cpu")), torch.device("cpu"))

    full, half, eight = state("float32"), state("bfloat16"), state("int8")
    full.train_step()
    checkpointer = Checkpointer(tmp_path, keep=0)
    checkpointer.save(full.step, full.tensors(), full.extra())
    path = latest(tmp_path)
    assert path is not None
    checkpointer.load(path, half.tensors())
    name = "optimizer.exp_avg.embed.weight"
    assert torch.equal(half.tensors()[name], full.tensors()[name].bfloat16())
    with pytest.raises(CheckpointError) as caught:
        checkpointer.load(path, eight.tensors())
    assert "optimizer.exp_avg_code" in str(caught.value) and "weights_only" in str(caught.value)
    for trainer in (full, half, eight):
        trainer.close()


def test_rows_cut_through_blocks_are_refused() -> None:
    found = weights()[:1]
    found[0].parameter = torch.nn.Parameter(torch.zeros(13, 2 * STATE_BLOCK))
    found[0].master = torch.zeros(13, STATE_BLOCK // 2)
    with pytest.raises(ConfigError, match="blocks of 128"):
        AdamW(found, Optimizer(state="int8"), offload=False)
