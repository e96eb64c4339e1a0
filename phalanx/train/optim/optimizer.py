"""Optimizers over the blocks of weights that a rank holds, with fp32 state.

The update is elementwise (AdamW), or needs whole matrices (Muon), which are gathered for it.
A skip is decided on the device: both read the verdict there and never ask the host.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.config import Optimizer as Settings
from phalanx.parallel import Weight
from phalanx.parallel.engine import local_part
from phalanx.train.optim.guard import GradientVerdict
from phalanx.train.optim.kernels import fused_adamw


class AdamW:
    """AdamW; decay applies to matrices, not to norms."""

    def __init__(self, weights: list[Weight], settings: Settings, offload: bool) -> None:
        self.weights, self.settings, self.offload = weights, settings, offload
        device = weights[0].master.device
        self.step_count = torch.zeros((), device=device)
        if offload:
            for weight in weights:
                weight.master = _on_host(weight.master)
        self.exp_avg = [torch.zeros_like(weight.master) for weight in weights]
        self.exp_avg_sq = [torch.zeros_like(weight.master) for weight in weights]

    def step(self, learning_rate: float, verdict: GradientVerdict) -> None:
        """Apply one update unless the verdict says skip."""
        settings = self.settings
        self.step_count += (~verdict.skip).to(self.step_count)
        home = self.weights[0].master.device
        multiplier, skip = verdict.multiplier.to(home), verdict.skip.to(home)
        count = self.step_count.to(home)
        for weight, mean, square in zip(self.weights, self.exp_avg, self.exp_avg_sq, strict=True):
            separate = weight.local.data_ptr() != weight.master.data_ptr()
            together = separate and weight.local.device == home
            fused_adamw(
                weight.local if together else None,
                weight.master,
                mean,
                square,
                weight.gradient.to(home),
                learning_rate=learning_rate,
                beta1=settings.beta1,
                beta2=settings.beta2,
                eps=settings.eps,
                weight_decay=settings.weight_decay if weight.parameter.ndim > 1 else 0.0,
                step=count,
                multiplier=multiplier,
                skip=skip,
            )
            if separate and not together:
                weight.publish()

    def tensors(self) -> dict[str, Tensor]:
        """State by name, with the layout of the parameters."""
        state = {"optimizer.step": self.step_count}
        for weight, mean, square in zip(self.weights, self.exp_avg, self.exp_avg_sq, strict=True):
            state[f"optimizer.exp_avg.{weight.name}"] = weight.like(mean)
            state[f"optimizer.exp_avg_sq.{weight.name}"] = weight.like(square)
        return state


class Muon:
    """Muon for the matrices inside blocks, AdamW for embedding, head, norms and routers."""

    def __init__(self, weights: list[Weight], settings: Settings, offload: bool) -> None:
        self.matrices = [weight for weight in weights if _is_hidden_matrix(weight)]
        rest = [weight for weight in weights if not _is_hidden_matrix(weight)]
        self.rest = AdamW(rest, settings, offload) if rest else None
        self.settings = settings
        if offload:
            for weight in self.matrices:
                weight.master = _on_host(weight.master)
        self.momentum = [torch.zeros_like(weight.master) for weight in self.matrices]

    def step(self, learning_rate: float, verdict: GradientVerdict) -> None:
        """``learning_rate`` is AdamW's; Muon's follows the same schedule."""
        settings = self.settings
        if self.rest is not None:
            self.rest.step(learning_rate, verdict)
        rate = learning_rate / settings.learning_rate * settings.muon_learning_rate
        for weight, momentum in zip(self.matrices, self.momentum, strict=True):
            home = weight.master.device
            keep = (~verdict.skip).to(home)
            gradient = weight.gradient.to(home).float() * verdict.multiplier.to(home)
            # where, not a product: the gradient of a skipped step may be infinite.
            moved = torch.where(keep, settings.muon_momentum * momentum + gradient, momentum)
            momentum.copy_(moved)
            lookahead = gradient + settings.muon_momentum * momentum
            # Where the gradient is: the host is slow at matmuls, and its memory has no NCCL.
            update = self._orthogonal(weight, lookahead.to(weight.gradient.device)).to(home)
            decayed = weight.master * (1 - rate * settings.weight_decay) - rate * update
            weight.master.copy_(torch.where(keep, decayed, weight.master))
            weight.publish()

    def _orthogonal(self, weight: Weight, block: Tensor) -> Tensor:
        """This rank's block of the orthogonalised whole."""
        whole = weight.like(block)
        full = whole.full_tensor() if isinstance(whole, DTensor) else whole
        result = orthogonalize(full)
        if not isinstance(whole, DTensor):
            return result
        spread = DTensor.from_local(result, whole.device_mesh, run_check=False)
        return local_part(spread.redistribute(placements=whole.placements))

    def tensors(self) -> dict[str, Tensor]:
        state = self.rest.tensors() if self.rest is not None else {}
        for weight, momentum in zip(self.matrices, self.momentum, strict=True):
            state[f"optimizer.momentum.{weight.name}"] = weight.like(momentum)
        return state


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
    return (
        weight.parameter.ndim >= 2
        and weight.name.startswith("layers.")
        and ".router." not in weight.name
    )


def _on_host(x: Tensor) -> Tensor:
    host = x.to("cpu", copy=True)
    return host.pin_memory() if x.is_cuda else host


def build_optimizer(weights: list[Weight], settings: Settings, *, offload: bool) -> AdamW | Muon:
    """The configured optimizer."""
    kind = Muon if settings.kind == "muon" else AdamW
    return kind(weights, settings, offload)
