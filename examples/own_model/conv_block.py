"""A layer of one's own: gated causal convolutions in place of attention.

Each parameter is declared once: which dim tensor parallelism splits, how it starts, whether it
decays. Every axis that the declarations allow then works, in checkpoints and in recovery.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config import Model
from phalanx.model import RESIDUAL, ROWS, Declaration, ForwardContext, Layer, RMSNorm, declare
from phalanx.model.layers import Linear

WIDTH = 4  # tokens that a convolution sees, itself included


class GatedConvolution(nn.Module):
    """Mixes each channel over the nearest earlier tokens, and gates it by the token itself."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate, self.value = Linear(dim, dim), Linear(dim, dim)
        self.kernel = nn.Parameter(torch.empty(dim, WIDTH))
        self.out = Linear(dim, dim)
        # Channels do not meet before `out`: a rank takes some of them.
        declare(self.gate, weight=ROWS)
        declare(self.value, weight=ROWS)
        declare(self, kernel=Declaration(split=0, std=0.5, decay=False, orthogonal=False))
        declare(self.out, weight=RESIDUAL)

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, seq, dim], of the whole sequence."""
        channels = F.pad(self.value(x).mT, (WIDTH - 1, 0))
        mixed = F.conv1d(channels, self.kernel.unsqueeze(1), groups=len(self.kernel)).mT
        out: Tensor = self.out(F.silu(self.gate(x)) * mixed)
        return out


class SquaredMlp(nn.Module):
    """Two matrices around a squared ReLU."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.up, self.down = Linear(dim, ffn), Linear(ffn, dim)
        declare(self.up, weight=ROWS)
        declare(self.down, weight=RESIDUAL)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.relu(self.up(x)).square())
        return out


class ConvBlock(Layer):
    """Both branches side by side, behind one norm."""

    def __init__(self, config: Model, index: int) -> None:
        super().__init__()
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.mixer = GatedConvolution(config.dim)
        self.mlp = SquaredMlp(config.dim, config.ffn)

    def branches(self) -> list[nn.Module]:
        return [self.mixer, self.mlp]

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        normed = self.norm(x)
        out: Tensor = x + self.mixer(normed) + self.mlp(normed)
        return out
