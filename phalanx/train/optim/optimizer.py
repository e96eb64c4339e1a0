"""Optimizers over the blocks of weights that a rank holds, with fp32 masters.

A skip is decided on the device: updates read the verdict there and never ask the host.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.config import STATE_BLOCK, ConfigError, StateFormat
from phalanx.config import Optimizer as Settings
from phalanx.config.own_code import load_class
from phalanx.parallel import Weight
from phalanx.train.optim.away.host_state import HostState, host_share
from phalanx.train.optim.away.nvme_state import NvmeState
from phalanx.train.optim.base import WeightOptimizer
from phalanx.train.optim.groups import update_rule
from phalanx.train.optim.guard import GradientVerdict
from phalanx.train.optim.kernels import fused_adamw
from phalanx.train.optim.moments import Moments, zero_moments
from phalanx.train.optim.muon import Muon, takes
from phalanx.train.optim.own import ElementwiseOptimizer
from phalanx.train.optim.schedule_free import ScheduleFreeAdamW

# In a checkpoint. Codes have names of their own: nobody takes them for numbers.
NAMES = ("exp_avg", "exp_avg_sq")
BLOCK_NAMES = ("exp_avg_code", "exp_avg_sq_code", "exp_avg_scale", "exp_avg_sq_scale")


class AdamW(WeightOptimizer):
    """AdamW; decay applies to what declares it, which matrices do and norms do not.

    With ``offload`` masters and moments live in host memory, or in a file in ``folder``, and pass
    through the device.
    """

    def __init__(
        self,
        weights: list[Weight],
        settings: Settings,
        offload: bool,
        folder: Path | None = None,
    ) -> None:
        self.weights, self.settings = weights, settings
        device = weights[0].master.device
        self.step_count = torch.zeros((), device=device)
        self._away: HostState | NvmeState | None = None
        if offload and folder is not None:
            size = _state_bytes(weights, settings.state, NvmeState.rounded)
            self._away = NvmeState(size, device, folder)
        elif offload and device.type == "cuda":
            size = _state_bytes(weights, settings.state, HostState.rounded)
            self._away = HostState(size, device, host_share())
        self.moments = [self._home(weight) for weight in weights]

    def _home(self, weight: Weight) -> Moments:
        """A weight's fresh moments where they live; its master goes there, too."""
        moments = _fresh_moments(weight, self.settings.state)
        if self._away is None:
            return moments
        weight.master = self._away.take_in(weight.master)
        return Moments(*(self._away.take_in(each) for each in moments.stored))

    def step(self, learning_rate: float, verdict: GradientVerdict) -> None:
        """Apply one update unless the verdict says skip."""
        self.step_count += (~verdict.skip).to(self.step_count)
        each = zip(self.weights, self.moments, strict=True)
        trained = [(weight, moments) for weight, moments in each if not weight.frozen]
        if self._away is not None:
            self._step_away(self._away, trained, learning_rate, verdict)
            return
        for weight, moments in trained:
            separate = weight.local.data_ptr() != weight.master.data_ptr()
            local = weight.local if separate else None
            self._update(weight, local, weight.master, moments, verdict, learning_rate)

    def _step_away(
        self,
        away: HostState | NvmeState,
        trained: list[tuple[Weight, Moments]],
        learning_rate: float,
        verdict: GradientVerdict,
    ) -> None:
        away.begin()
        homes = [(weight.master, *moments.stored) for weight, moments in trained]
        for group, first, past, copies in away.passing(homes):
            weight, stretch = trained[group][0], slice(first, past)
            local = weight.local.view(-1)[stretch]
            moments = Moments(*copies[1:])
            self._update(weight, local, copies[0], moments, verdict, learning_rate, stretch)

    def _update(
        self,
        weight: Weight,
        local: Tensor | None,
        master: Tensor,
        moments: Moments,
        verdict: GradientVerdict,
        learning_rate: float,
        stretch: slice | None = None,
    ) -> None:
        """Of a weight, or of one stretch of it."""
        settings, gradient = self.settings, weight.gradient
        rule = update_rule(weight, settings)
        fused_adamw(
            local,
            master,
            moments,
            gradient if stretch is None else gradient.view(-1)[stretch],
            learning_rate=learning_rate * rule.rate_factor * weight.width_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            eps=settings.eps,
            weight_decay=rule.weight_decay,
            step=self.step_count,
            multiplier=verdict.multiplier.to(master.device),
            skip=verdict.skip.to(master.device),
            salt=zlib.crc32(weight.name.encode()),
            start=stretch.start if stretch else 0,
        )

    def settle(self) -> None:
        """Returns when state that lives away is there."""
        if self._away is not None:
            self._away.settle()

    def tensors(self) -> dict[str, Tensor]:
        """State by name, with the layout of the parameters."""
        state = {"optimizer.step": self.step_count}
        for weight, moments in zip(self.weights, self.moments, strict=True):
            names = BLOCK_NAMES if moments.in_blocks else NAMES
            for name, tensor in zip(names, moments.stored, strict=True):
                state[f"optimizer.{name}.{weight.name}"] = weight.like(tensor)
        return state


def _fresh_moments(weight: Weight, format: StateFormat) -> Moments:
    """Raises ``ConfigError`` where an axis cuts through blocks that share a scale."""
    moments = zero_moments(weight.master, weight.parameter.shape[-1], format)
    if moments.in_blocks and (row := weight.master.shape[-1]) % STATE_BLOCK:
        rule = f"keeps blocks of {STATE_BLOCK} in a row, and a rank has {row} of {weight.name}'s"
        fix = 'lower parallel.tensor, or set it to "bfloat16"'
        raise ConfigError("optimizer.state", "int8", rule, fix)
    return moments


def _state_bytes(weights: list[Weight], format: StateFormat, rounded: Callable[[int], int]) -> int:
    """Of masters and moments."""
    total = 0
    for weight in weights:
        master = torch.empty_like(weight.master, device="meta")
        stored = zero_moments(master, weight.parameter.shape[-1], format).stored
        total += sum(rounded(each.numel() * each.element_size()) for each in (master, *stored))
    return total


def build_optimizer(
    weights: list[Weight],
    settings: Settings,
    *,
    offload: bool,
    folder: Path | None = None,
    group: dist.ProcessGroup | None = None,
) -> WeightOptimizer:
    """The configured optimizer, with state for the weights that are trained.

    ``offload``: it lives in host memory, or in a file in ``folder``, which AdamW alone can.
    ``group``: all ranks that hold parts of these weights; None: this one alone.
    """
    weights = [weight for weight in weights if weight.parameter.requires_grad]
    if settings.module:
        own = load_class("optimizer.module", settings.module, ElementwiseOptimizer)
        return own(weights, settings, offload)
    if settings.kind == "schedule-free":
        return ScheduleFreeAdamW(weights, settings)
    if settings.kind == "adamw":
        return AdamW(weights, settings, offload, folder)
    matrices = [weight for weight in weights if takes(weight)]
    others = [weight for weight in weights if not takes(weight)]
    rest = AdamW(others, settings, offload) if others else None
    return Muon(matrices, rest, settings, offload, group)
