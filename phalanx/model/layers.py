"""Norm, linear layers, dropout, and the dense feed-forward layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from phalanx.config import Model, gate_up_groups
from phalanx.model import ops
from phalanx.model.declare import BIAS, RESIDUAL, ROWS, SCALE, Declaration, declare
from phalanx.model.init import mix

_GOLDEN = -7046029254386353131  # SplitMix64's increment: keys of neighbouring channels


class Windowed(NamedTuple):
    """What layers with a sliding window see in place of the context's own."""

    cos: Tensor
    sin: Tensor
    mask: Tensor | object | None  # None: the window covers the sequence, plain causal


class ForwardContext(NamedTuple):
    """What every block of one forward pass shares."""

    cos: Tensor  # [seq, rotated / 2]
    sin: Tensor  # [seq, rotated / 2]
    mask: Tensor | object | None  # attention mask of packed documents; None: plain causal
    real: Tensor | None  # [batch, seq] bool, False at weightless padding; None: all real
    token_weight: Tensor  # [] weight of one real token in the loss
    windowed: Windowed | None = None  # where the model has a window
    counted: Tensor | None = None  # [batch] samples with a label, where scores are clipped
    following: Tensor | None = None  # [batch, seq, dim] vectors of later tokens, to predict others
    token_keys: Tensor | None = None  # [batch, seq here] of what dropout draws; None: drops nothing


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32 whatever the input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width))
        declare(self, weight=SCALE)

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x)[1]

    def join(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + branch, its norm). Carry on with the returned x: its gradient then joins the
        norm's in one kernel.
        """
        return ops.add_rms_norm(x, branch, self.weight, self.eps)


class OffsetRMSNorm(RMSNorm):
    """Multiplies by one plus its weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        declare(self, weight=BIAS)

    def join(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm(x, branch, self.weight + 1, self.eps)


def make_norm(config: Model, width: int) -> RMSNorm:
    """A norm of the model's form."""
    return (OffsetRMSNorm if config.norm_offset else RMSNorm)(width, config.norm_eps)


class Linear(nn.Linear):
    """A linear layer without bias; on CUDA each of its matmuls runs by the fastest algorithm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight)


class BiasedLinear(Linear):
    """A linear layer with a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.bias = nn.Parameter(torch.empty(outputs))
        declare(self, bias=BIAS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


def token_keys(samples: Tensor, positions: Tensor) -> Tensor:
    """Keys [batch, seq] of tokens: samples [batch] by their numbers in the run, positions [seq]."""
    return mix(mix(samples)[:, None] + positions)


class Dropout(nn.Module):
    """Drops so many of the values, and enlarges the others, where tokens have keys.

    No generator is drawn from: what is dropped follows from seed, sample, position and place in
    the model, the same on every mesh, in a recomputed block and in a run that was resumed.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("key", torch.zeros((), dtype=torch.int64), persistent=False)
        self.key: Tensor

    def reset(self, key: int, device: torch.device) -> None:
        """``key``: of the run's seed and the place in the model."""
        self.key = torch.tensor(key, device=device)

    def forward(self, x: Tensor, tokens: Tensor | None) -> Tensor:
        if tokens is None:
            return x
        dropped: Tensor = _Drop.apply(x, mix(tokens ^ self.key), self.rate)  # type: ignore[no-untyped-call]
        return dropped


class _Drop(Function):
    """Makes its mask once more in backward, instead of keeping it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, rate: float) -> Tensor:
        ctx.save_for_backward(keys)
        ctx.rate = rate
        return _dropped(x, keys, rate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keys,) = ctx.saved_tensors
        return _dropped(grad, keys, ctx.rate), None, None


def _dropped(x: Tensor, keys: Tensor, rate: float) -> Tensor:
    """x: [batch, seq, width], keys: [batch, seq]."""
    channels = torch.arange(x.shape[-1], device=x.device) * _GOLDEN
    drawn = mix(keys.unsqueeze(-1) + channels)  # even over all of int64
    kept = drawn >= round(rate * 2**64) - 2**63
    return torch.where(kept, x * (1 / (1 - rate)), 0.0)


class GatedMlp(nn.Module):
    """Gated feed-forward. Gate and up rows lie in alternating groups of one matrix.

    A contiguous slice of ``gate_up`` rows therefore holds matching gates and ups, which is
    what lets one matmul serve both and still be split over ranks.
    """

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.group_width = ffn // gate_up_groups(ffn)
        self.gate_up = Linear(dim, 2 * ffn)
        self.down = Linear(ffn, dim)
        pair = (self.group_width, self.group_width)
        declare(self.gate_up, weight=Declaration(split=0, fused=pair))
        declare(self.down, weight=RESIDUAL)


class SwiGLU(GatedMlp):
    """Gated by SiLU."""

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(ops.swiglu(self.gate_up(x), self.group_width))
        return hidden


class ClampedSwiGLU(GatedMlp):
    """Gated by the clamped SiLU of gpt-oss."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).unflatten(-1, (-1, 2, self.group_width)).unbind(-2)
        out: Tensor = self.down(ops.clamped_swiglu(gate, up).flatten(-2))
        return out


class GeGLU(GatedMlp):
    """Gated by GELU."""

    def __init__(self, dim: int, ffn: int, approximate: str) -> None:
        super().__init__(dim, ffn)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        pairs = self.gate_up(x).unflatten(-1, (-1, 2, self.group_width))
        gate, up = pairs.unbind(-2)
        hidden = F.gelu(gate, approximate=self.approximate) * up
        out: Tensor = self.down(hidden.flatten(-2))
        return out


class PlainMlp(nn.Module):
    """Two-matrix feed-forward of the GPT-3 family."""

    def __init__(self, dim: int, ffn: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up = Linear(dim, ffn)
        self.down = Linear(ffn, dim)
        declare(self.up, weight=ROWS)
        declare(self.down, weight=RESIDUAL)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.activation(self.up(x)))
        return hidden


def squared_relu(x: Tensor) -> Tensor:
    """The positive part, squared."""
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "gelu-exact": F.gelu,
    "relu2": squared_relu,
}


SWIGLU_FORMS: dict[str, type[GatedMlp]] = {"swiglu": SwiGLU, "swiglu-clamped": ClampedSwiGLU}


def dense_mlp(config: Model) -> nn.Module:
    """The feed-forward layer of a dense block."""
    if config.mlp in SWIGLU_FORMS:
        return SWIGLU_FORMS[config.mlp](config.dim, config.ffn)
    if config.mlp in ACTIVATIONS:
        return PlainMlp(config.dim, config.ffn, ACTIVATIONS[config.mlp])
    return GeGLU(config.dim, config.ffn, "none" if config.mlp == "geglu-exact" else "tanh")
