"""Optimizers over the blocks of weights that a rank holds, with fp32 masters.

The update is elementwise (AdamW), or needs whole matrices (Muon), which are gathered for it.
A skip is decided on the device: both read the verdict there and never ask the host.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.config import STATE_BLOCK, ConfigError, StateFormat
from phalanx.config import Optimizer as Settings
from phalanx.config.own_code import load_class
from phalanx.hardware import available_memory
from phalanx.parallel import Weight
from phalanx.parallel.engine import local_part
from phalanx.train.optim.base import WeightOptimizer
from phalanx.train.optim.groups import update_rule
from phalanx.train.optim.guard import GradientVerdict
from phalanx.train.optim.host_state import HostState, rounded
from phalanx.train.optim.kernels import fused_adamw
from phalanx.train.optim.moments import Moments, zero_moments
from phalanx.train.optim.own import ElementwiseOptimizer
from phalanx.train.optim.schedule_free import ScheduleFreeAdamW

# In a checkpoint. Codes have names of their own: nobody takes them for numbers.
NAMES = ("exp_avg", "exp_avg_sq")
BLOCK_NAMES = ("exp_avg_code", "exp_avg_sq_code", "exp_avg_scale", "exp_avg_sq_scale")


class AdamW(WeightOptimizer):
    """AdamW; decay applies to what declares it, which matrices do and norms do not.

    With ``offload`` masters and moments live in host memory and pass through the device.
    """

    def __init__(self, weights: list[Weight], settings: Settings, offload: bool) -> None:
        self.weights, self.settings = weights, settings
        device = weights[0].master.device
        self.step_count = torch.zeros((), device=device)
        self._host: HostState | None = None
        if offload and device.type == "cuda":
            size = _state_bytes(weights, settings.state)
            self._host = HostState(size, device, available_memory() // _ranks_here())
            self.moments = [self._move(weight, self._host) for weight in weights]
        else:
            self.moments = [_fresh_moments(weight, settings.state) for weight in weights]

    def _move(self, weight: Weight, host: HostState) -> Moments:
        moments = _fresh_moments(weight, self.settings.state)
        weight.master = host.take_in(weight.master)
        return Moments(*(host.take_in(each) for each in moments.stored))

    def step(self, learning_rate: float, verdict: GradientVerdict) -> None:
        """Apply one update unless the verdict says skip."""
        self.step_count += (~verdict.skip).to(self.step_count)
        if self._host is not None:
            self._host.begin()
        for weight, moments in zip(self.weights, self.moments, strict=True):
            if weight.frozen:
                continue
            separate = weight.local.data_ptr() != weight.master.data_ptr()
            local = weight.local if separate else None
            if self._host is None:
                self._update(weight, local, weight.master, moments, verdict, learning_rate)
                continue
            assert local is not None
            for first, past, copies in self._host.passing((weight.master, *moments.stored)):
                self._update(
                    weight,
                    local.view(-1)[first:past],
                    copies[0],
                    Moments(*copies[1:]),
                    verdict,
                    learning_rate,
                    slice(first, past),
                )

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
        """Returns when state that lives in host memory is there."""
        if self._host is not None:
            self._host.settle()

    def tensors(self) -> dict[str, Tensor]:
        """State by name, with the layout of the parameters."""
        state = {"optimizer.step": self.step_count}
        for weight, moments in zip(self.weights, self.moments, strict=True):
            names = BLOCK_NAMES if moments.in_blocks else NAMES
            for name, tensor in zip(names, moments.stored, strict=True):
                state[f"optimizer.{name}.{weight.name}"] = weight.like(tensor)
        return state


class Muon(WeightOptimizer):
    """Muon for the matrices inside blocks, AdamW for embedding, head, norms and routers."""

    def __init__(self, weights: list[Weight], settings: Settings, offload: bool) -> None:
        self.matrices = [weight for weight in weights if _is_hidden_matrix(weight)]
        rest = [weight for weight in weights if not _is_hidden_matrix(weight)]
        self.rest = AdamW(rest, settings, offload) if rest else None
        self.settings = settings
        self._host: HostState | None = None
        device = weights[0].parameter.device  # masters of the rest have moved already
        if offload and device.type == "cuda":
            size = sum(2 * rounded(4 * weight.master.numel()) for weight in self.matrices)
            self._host = HostState(size, device, available_memory() // _ranks_here())
        self.momentum = []
        for weight in self.matrices:
            momentum = torch.zeros_like(weight.master)
            if self._host is not None:
                weight.master = self._host.take_in(weight.master)
                momentum = self._host.take_in(momentum)
            self.momentum.append(momentum)

    def step(self, learning_rate: float, verdict: GradientVerdict) -> None:
        """``learning_rate`` is AdamW's; Muon's follows the same schedule."""
        settings = self.settings
        if self.rest is not None:
            self.rest.step(learning_rate, verdict)
        if self._host is not None:
            self._host.begin()
        peak_share = learning_rate / settings.learning_rate
        for weight, kept in zip(self.matrices, self.momentum, strict=True):
            if weight.frozen:
                continue
            rule = update_rule(weight, settings)
            rate = peak_share * settings.muon_learning_rate * rule.rate_factor
            for master, momentum in self._at_hand(weight.master, kept):
                keep = (~verdict.skip).to(master.device)
                gradient = weight.gradient.float() * verdict.multiplier.to(master.device)
                # where, not a product: the gradient of a skipped step may be infinite.
                moved = torch.where(keep, settings.muon_momentum * momentum + gradient, momentum)
                momentum.copy_(moved)
                lookahead = gradient + settings.muon_momentum * momentum
                update = self._orthogonal(weight, lookahead)
                decayed = master * (1 - rate * rule.weight_decay) - rate * update
                master.copy_(torch.where(keep, decayed, master))
                if weight.local.data_ptr() != master.data_ptr():
                    weight.local.copy_(master)

    def _at_hand(self, master: Tensor, momentum: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Once, where the gradient is; what lives in host memory goes back afterwards."""
        if self._host is None:
            yield master, momentum
            return
        for _, _, copies in self._host.passing((master, momentum), master.numel()):
            yield copies[0].view(master.shape), copies[1].view(master.shape)

    def _orthogonal(self, weight: Weight, block: Tensor) -> Tensor:
        """This rank's block of the orthogonalised whole."""
        whole = weight.like(block)
        full = whole.full_tensor() if isinstance(whole, DTensor) else whole
        result = orthogonalize_each(full, weight.declaration.fused)
        if not isinstance(whole, DTensor):
            return result
        spread = DTensor.from_local(result, whole.device_mesh, run_check=False)
        return local_part(spread.redistribute(placements=whole.placements))

    def settle(self) -> None:
        """Returns when state that lives in host memory is there."""
        for home in (self.rest, self._host):
            if home is not None:
                home.settle()

    def tensors(self) -> dict[str, Tensor]:
        state = self.rest.tensors() if self.rest is not None else {}
        for weight, momentum in zip(self.matrices, self.momentum, strict=True):
            state[f"optimizer.momentum.{weight.name}"] = weight.like(momentum)
        return state


def orthogonalize_each(matrix: Tensor, fused: tuple[int, ...]) -> Tensor:
    """Of matrices that are stored as one, each by itself.

    ``fused``: how many rows each of them has in turn, again and again; (): it is one matrix.
    """
    if not fused:
        return orthogonalize(matrix)
    parts = matrix.unflatten(-2, (-1, sum(fused))).split(fused, dim=-2)
    done = [orthogonalize(part.flatten(-3, -2)).view(part.shape) for part in parts]
    return torch.cat(done, -2).flatten(-3, -2)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix by five Newton-Schulz steps, scaled to an even update size.

    Works on stacks of matrices as well (experts).
    """
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = x.mT if tall else x
    size = max(1.0, matrix.shape[-2] / matrix.shape[-1]) ** 0.5
    evened: Tensor = x.to(matrix.dtype) * size
    return evened


def _is_hidden_matrix(weight: Weight) -> bool:
    """Whether Muon takes it: as declared, else matrices inside layers."""
    declared = weight.declaration.orthogonal
    inside = weight.parameter.ndim == 2 and weight.name.startswith("layers.")
    return inside if declared is None else declared


def _fresh_moments(weight: Weight, format: StateFormat) -> Moments:
    """Raises ``ConfigError`` where an axis cuts through blocks that share a scale."""
    moments = zero_moments(weight.master, weight.parameter.shape[-1], format)
    if moments.in_blocks and (row := weight.master.shape[-1]) % STATE_BLOCK:
        rule = f"keeps blocks of {STATE_BLOCK} in a row, and a rank has {row} of {weight.name}'s"
        fix = 'lower parallel.tensor, or set it to "bfloat16"'
        raise ConfigError("optimizer.state", "int8", rule, fix)
    return moments


def _state_bytes(weights: list[Weight], format: StateFormat) -> int:
    """Of masters and moments."""
    total = 0
    for weight in weights:
        master = torch.empty_like(weight.master, device="meta")
        stored = zero_moments(master, weight.parameter.shape[-1], format).stored
        total += sum(rounded(each.numel() * each.element_size()) for each in (master, *stored))
    return total


def _ranks_here() -> int:
    """Ranks that may share this machine's memory."""
    return min(dist.get_world_size(), torch.cuda.device_count()) if dist.is_initialized() else 1


def build_optimizer(
    weights: list[Weight], settings: Settings, *, offload: bool
) -> AdamW | Muon | ScheduleFreeAdamW | ElementwiseOptimizer:
    """The configured optimizer, with state for the weights that are trained."""
    weights = [weight for weight in weights if weight.parameter.requires_grad]
    if settings.module:
        own = load_class("optimizer.module", settings.module, ElementwiseOptimizer)
        return own(weights, settings, offload)
    if settings.kind == "schedule-free":
        return ScheduleFreeAdamW(weights, settings)
    kind = Muon if settings.kind == "muon" else AdamW
    return kind(weights, settings, offload)
