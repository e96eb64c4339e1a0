"""Norm, rotary positions and the dense feed-forward layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config import Model, gate_up_groups
from phalanx.model import ops


class ForwardContext(NamedTuple):
    """What every block of one forward pass shares."""

    cos: Tensor  # [seq, rotated / 2]
    sin: Tensor  # [seq, rotated / 2]
    mask: Tensor | object | None  # attention mask of packed documents; None: plain causal
    real: Tensor | None  # [batch, seq] bool, False at weightless padding; None: all real
    token_weight: Tensor  # [] weight of one real token in the loss


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 whatever the input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x)[1]

    def join(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + branch, its norm). Carry on with the returned x: its gradient then joins the
        norm's in one kernel.
        """
        return ops.add_rms_norm(x, branch, self.weight, self.eps)


class Linear(nn.Linear):
    """A linear layer without bias; on CUDA each of its matmuls runs by the fastest algorithm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight)


def rope_tables(config: Model, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, rotated / 2] in fp32, with Llama-3 scaling if configured."""
    rotated = config.latent.rope_head_dim if config.latent else config.head_dim
    exponent = torch.arange(0, rotated, 2, dtype=torch.float32, device=positions.device) / rotated
    frequency = config.rope_theta**-exponent
    if (scaling := config.rope_scaling) is not None:
        wavelength = 2 * math.pi / frequency
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept = ((scaling.original_context / wavelength - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (kept + (1 - kept) / scaling.factor)
    angle = positions.to(torch.float32)[:, None] * frequency
    return angle.cos(), angle.sin()


class SwiGLU(nn.Module):
    """Gated feed-forward. Gate and up rows lie in alternating groups of one matrix.

    A contiguous slice of ``gate_up`` rows therefore holds matching gates and ups, which is
    what lets one matmul serve both and still be split over ranks.
    """

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.group_width = ffn // gate_up_groups(ffn)
        self.gate_up = Linear(dim, 2 * ffn)
        self.down = Linear(ffn, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(ops.swiglu(self.gate_up(x), self.group_width))
        return hidden


class GeluMlp(nn.Module):
    """Two-matrix feed-forward of the GPT-3 family."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.up = Linear(dim, ffn)
        self.down = Linear(ffn, dim)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return hidden


def dense_mlp(config: Model) -> nn.Module:
    """The feed-forward layer of a dense block."""
    kind = SwiGLU if config.mlp == "swiglu" else GeluMlp
    return kind(config.dim, config.ffn)
