"""Low-rank adapters on frozen linear layers: LoRA, and DoRA, which also trains lengths of rows.

Several matrices are stored as one (queries with keys and values, gates with ups): each has an
adapter of its own, as if it were alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from phalanx.config import Adapter
from phalanx.model import ops
from phalanx.model.block import Block
from phalanx.model.declare import Declaration, declare, declared
from phalanx.model.layers import Linear
from phalanx.model.transformer import Transformer

# The matrices that our layers consist of, by their Hugging Face names.
MATRICES: Mapping[str, tuple[str, ...]] = {
    "attention.qkv": ("q_proj", "k_proj", "v_proj"),
    "attention.out": ("o_proj",),
    "mlp.gate_up": ("gate_proj", "up_proj"),
    "mlp.up": ("up_proj",),
    "mlp.down": ("down_proj",),
}
MARK = ".adapter."  # in the name of every parameter of an adapter


class AdapterLayout(NamedTuple):
    """Which matrices of a layer have an adapter, and where their rows lie."""

    names: tuple[str, ...]  # of all of its matrices
    widths: tuple[int, ...]  # rows, in turn, of each, again and again; (): it is one matrix
    adapted: tuple[bool, ...]  # by matrix
    rank: int
    scale: float

    @property
    def matrices(self) -> int:
        """How many of them have an adapter."""
        return sum(self.adapted)

    @property
    def adapted_widths(self) -> list[int]:
        """Rows, in turn, of those."""
        return [w for w, chosen in zip(self.widths, self.adapted, strict=True) if chosen]

    def rows_of_each(self, b: Tensor) -> list[Tensor]:
        """``b`` [rows of adapted matrices, ...] as one tensor for each matrix, in its own order."""
        if not self.widths:
            return [b]
        parts = b.unflatten(0, (-1, sum(self.adapted_widths))).split(self.adapted_widths, 1)
        return [part.flatten(0, 1) for part in parts]

    def together(self, parts: list[Tensor], dim: int) -> Tensor:
        """Rows of each adapted matrix along ``dim`` as the layer has them; elsewhere zeros."""
        if not self.widths:
            return parts[0]
        groups = parts[0].shape[dim] // self.adapted_widths[0]
        waiting = iter([part.unflatten(dim, (groups, -1)) for part in parts])
        # Negative dims count from the end: those stay what they are.
        inner = dim if dim < 0 else dim + 1
        shape = list(parts[0].unflatten(dim, (groups, -1)).shape)
        whole = []
        for width, adapted in zip(self.widths, self.adapted, strict=True):
            shape[inner] = width
            whole.append(next(waiting) if adapted else parts[0].new_zeros(shape))
        return torch.cat(whole, inner).flatten(inner - 1, inner)

    def matrix(self, a: Tensor, b: Tensor) -> Tensor:
        """What an adapter adds to the layer's weight."""
        lows = a.split(self.rank)
        parts = [b_ @ a_ for a_, b_ in zip(lows, self.rows_of_each(b), strict=True)]
        return self.together(parts, 0) * self.scale


class LowRank(nn.Module):
    """An adapter of one layer: b(a(x)) for each of its matrices, times a scale."""

    def __init__(self, linear: nn.Linear, layout: AdapterLayout, *, directed: bool) -> None:
        super().__init__()
        self.layout = layout
        self.on = True
        rows, inputs = linear.weight.shape
        if layout.widths:
            rows = rows // sum(layout.widths) * sum(layout.adapted_widths)
        device = linear.weight.device
        self.a = nn.Parameter(torch.empty(layout.matrices * layout.rank, inputs, device=device))
        self.b = nn.Parameter(torch.empty(rows, layout.rank, device=device))
        # Relative to a row's own length: DoRA's magnitude is (1 + growth) times that.
        self.growth = nn.Parameter(torch.empty(rows, device=device)) if directed else None
        said = declared(linear, "weight")
        assert said is not None
        # Where ranks hold columns of the weight, a reads these and b sees shares of a's results.
        columns = said.split == 1
        declare(
            self,
            a=Declaration(split=1 if columns else None, std=(3 * inputs) ** -0.5, orthogonal=False),
            b=Declaration(split=None if columns else said.split, start=0.0, orthogonal=False),
        )
        if directed:
            declare(self, growth=Declaration(start=0.0, decay=False, orthogonal=False))

    def forward(self, x: Tensor) -> Tensor:
        low = ops.linear(x, self.a) * self.layout.scale
        lows, rows = low.split(self.layout.rank, -1), self.layout.rows_of_each(self.b)
        parts = [ops.linear(a.contiguous(), b) for a, b in zip(lows, rows, strict=True)]
        return self.layout.together(parts, -1)


class AdaptedLinear(Linear):
    """A frozen linear layer with an adapter beside it."""

    adapter: LowRank

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        return out + self.adapter(x) if self.adapter.on else out


class DirectedLinear(AdaptedLinear):
    """DoRA: adapted rows keep their direction's length apart, which is trained by itself."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.adapter.on:
            return super().forward(x)
        adapter = self.adapter
        assert adapter.growth is not None
        with torch.no_grad():  # as published: lengths count as constants in backward
            before = row_lengths(self.weight)
            after = row_lengths(self.weight, adapter.layout.matrix(adapter.a, adapter.b))
        # Less one: in bf16 a factor near one would lose what is learned of it.
        change = (before / after * (1 + adapter.growth.float()) - 1).to(x.dtype)
        out: Tensor = ops.linear(x, self.weight) + adapter(x)
        out = out + out * change
        return out if self.bias is None else out + self.bias


def row_lengths(weight: Tensor, added: Tensor | None = None) -> Tensor:
    """Euclidean length of each row, in fp32."""
    rows = weight.float() if added is None else weight.float() + added.float()
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return lengths


def add_adapters(part: Transformer, settings: Adapter) -> Transformer:
    """Freeze a model part and put adapters beside the matrices that the settings name."""
    if settings.kind == "none":
        return part
    for parameter in part.parameters():
        parameter.requires_grad_(False)
    for layer in part.layers.values():
        assert isinstance(layer, Block)
        for path, names in MATRICES.items():
            adapted = tuple(name in settings.targets for name in names)
            linear = find_linear(layer, path)
            if any(adapted) and linear is not None:
                _adapt(linear, names, adapted, settings)
    return part


def find_linear(layer: Block, path: str) -> nn.Linear | None:
    """A linear layer inside of a block; None where it has none of that name."""
    branch, name = path.split(".")
    found = getattr(getattr(layer, branch), name, None)
    return cast("nn.Linear | None", found)


def _adapt(
    linear: nn.Linear, names: tuple[str, ...], adapted: tuple[bool, ...], settings: Adapter
) -> None:
    said = declared(linear, "weight")
    assert said is not None
    scale = settings.alpha / settings.rank
    layout = AdapterLayout(names, said.fused, adapted, settings.rank, scale)
    directed = settings.kind == "dora"
    adapter = LowRank(linear, layout, directed=directed)
    form = DirectedLinear if directed else AdaptedLinear
    base: type = type(linear)
    linear.__class__ = _adapted_form(form, base)
    linear.add_module("adapter", adapter)


@functools.cache
def _adapted_form(form: type, base: type) -> type:
    """One class for all layers of a form: a compiler takes each class for other code."""
    return type(form.__name__, (form, base), {})


def adapters_of(part: nn.Module) -> dict[str, LowRank]:
    """Every adapter by the name of the layer that it belongs to."""
    return {
        path.removesuffix(MARK.rstrip(".")): module
        for path, module in part.named_modules()
        if isinstance(module, LowRank)
    }


@contextmanager
def without_adapters(part: nn.Module) -> Iterator[None]:
    """Inside, the model is what it was before any adapter was trained."""
    adapters = [module for module in part.modules() if isinstance(module, LowRank)]
    for adapter in adapters:
        adapter.on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.on = True


def merged(weight: Tensor, layout: AdapterLayout, tensors: Mapping[str, Tensor]) -> Tensor:
    """A weight with its adapter in it; ``tensors`` are the adapter's: a, b and any growth."""
    whole = weight.float() + layout.matrix(tensors["a"].float(), tensors["b"].float())
    if "growth" in tensors:
        whole = whole * (magnitude(weight, tensors["growth"]) / row_lengths(whole))[:, None]
    return whole.to(weight.dtype)


def magnitude(weight: Tensor, growth: Tensor) -> Tensor:
    """DoRA's own: the length of each adapted row."""
    return row_lengths(weight) * (1 + growth.float())
