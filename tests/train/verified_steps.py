"""Steps of a sharded job that are verified, and gradients that go wrong on the way: for tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from phalanx.config import job_from_table, resolve
from phalanx.parallel.mesh import build_mesh
from phalanx.train.optim.verification import GradientDivergence, GradientVerification
from phalanx.train.trainer import StepOutcome, Trainer


def make_trainer(world: int, device: str = "cpu", **sections: dict[str, Any]) -> Trainer:
    """Two micro-batches a step on each of ``world`` ranks, weights sharded over all of them."""
    table: dict[str, Any] = {
        "name": "x",
        "model": {"dim": 32, "layers": 2, "heads": 2, "ffn": 64, "vocab": 64},
        "data": {"sequence": 16},
        "parallel": {"data": world, "zero": 3},
        "precision": {"compute": "float32"},
        "train": {"steps": 40, "global_batch": 4 * world, "micro_batch": 2, "device": device},
    }
    for section, values in sections.items():
        table[section] = {**table.get(section, {}), **values}
    job = resolve(job_from_table(table), world)
    on = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return Trainer(job, build_mesh(job, on), on)


def verified_step(trainer: Trainer, verification: GradientVerification) -> StepOutcome:
    """One step, verified; raises what is found."""
    step = trainer.step + 1
    return trainer.train_step(
        before_update=lambda: verification.compare(step),
        before_forward=lambda batches, weight: verification.recompute(
            trainer, step, batches, weight
        ),
    )


def make_step(trainer: Trainer, verification: GradientVerification) -> GradientDivergence | None:
    """One step, or what is wrong with it: found before any of the state changes."""
    try:
        verified_step(trainer, verification)
    except GradientDivergence as finding:
        trainer.engine.clear_gradients()
        return finding
    return None


def state(trainer: Trainer) -> dict[str, Tensor]:
    kept = {name: getattr(x, "_local_tensor", x).clone() for name, x in trainer.tensors().items()}
    return kept | {"rng": torch.get_rng_state()}


def unsharded(trainer: Trainer) -> list[Tensor]:
    """The parameters that a backward of FSDP fills, once they have been gathered."""
    units = [m for m in trainer.engine.parts[0].modules() if isinstance(m, FSDPModule)]
    states: list[Any] = [unit._get_fsdp_state() for unit in units]
    # torch 2.11 has one group a unit or none, later versions have several.
    groups = [
        group
        for each in states
        for group in getattr(each, "_fsdp_param_groups", None) or [each._fsdp_param_group]
    ]
    return [each.unsharded_param for group in groups if group for each in group.fsdp_params]


def flipping(element: int, bit: int, backward: int) -> Callable[[Tensor], Tensor]:
    """Flips one bit of a gradient in one backward: 0 is the recomputation, 1, 2 … the step's."""
    calls = 0

    def flip(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls - 1 != backward:
            return gradient
        wrong = gradient.detach().clone()
        raw = wrong.view(-1).view(torch.uint8)
        at = element % wrong.numel() * wrong.element_size() + bit // 8
        raw[at] ^= 1 << bit % 8
        return wrong

    return flip


class Flips(NamedTuple):
    """What became of steps that were made with a flipped bit, and then again without."""

    named: list[tuple[int, ...]]  # who was, at each of them
    culprits: list[int]
    alarms: int  # at steps without
    copies: list[tuple[tuple[int, int], ...]]


def make_flipped_steps(trainer: Trainer, flips: int, seed: int, bits: int = 32) -> Flips:
    """Flip a drawn bit of a drawn parameter's gradient, in the micro-batch whose turn it is."""
    world, draw = trainer.mesh.world_size, random.Random(seed)
    verification = GradientVerification(trainer, 1)
    made = Flips([], [], 0, [])
    alarms = int(make_step(trainer, verification) is not None)
    while len(made.named) < flips:
        turn, culprit = divmod(trainer.step + 1, world)
        parameters = unsharded(trainer)
        parameter = parameters[draw.randrange(len(parameters))]
        flip = flipping(draw.randrange(1 << 20), draw.randrange(bits), 1 + turn % 2)
        hook = parameter.register_hook(flip) if dist.get_rank() == culprit else None
        before = state(trainer)
        finding = make_step(trainer, verification)
        after = state(trainer)
        assert all(torch.equal(before[name], after[name]) for name in before)
        if hook is not None:
            hook.remove()
        made.named.append(finding.changed if finding is not None else ())
        made.copies.append(finding.copies if finding is not None else ())
        made.culprits.append(culprit)
        alarms += make_step(trainer, verification) is not None
    return made._replace(alarms=alarms)
