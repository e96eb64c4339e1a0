"""What a parameter is: which dim is split over ranks, how it starts, what the optimizer does to it.

A module declares its parameters where it makes them. Tensor and expert parallelism, the drawing
of initial weights and the optimizers read the declarations; names mean nothing to them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn

STD = 0.02  # of initial values
DECLARED = "declared_parameters"  # the attribute of a module that keeps them by name


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """Of one parameter."""

    split: int | None = None  # dim that tensor parallelism splits; None: every rank holds all
    expert: bool = False  # dim 0 counts experts, which expert parallelism spreads
    start: float | None = None  # of every element; None: normal values
    std: float = STD  # of those
    residual: bool = False  # it adds to the residual stream: starts smaller the deeper the model
    decay: bool | None = None  # whether the optimizer decays it; None: where it has two dims
    orthogonal: bool | None = None  # whether Muon takes it; None: two dims, inside a layer
    fused: tuple[int, ...] = ()  # rows, in turn, of the matrices that are stored as one
    # From the model's width to itself, from it to something fixed, or neither; None: by its dims.
    width: Literal["hidden", "output", "fixed"] | None = None


REPLICATED = Declaration()
ROWS = Declaration(split=0)
RESIDUAL = Declaration(split=1, residual=True)  # the last matrix of a branch
# A bias begins at zero, and nothing pulls it there.
BIAS = Declaration(std=0.0, decay=False, orthogonal=False, width="fixed")
SCALE = Declaration(start=1.0, decay=False, orthogonal=False, width="fixed")


def declare(module: nn.Module, **parameters: Declaration) -> None:
    """Say what parameters of a module are, by their names in it; the last word counts."""
    said: dict[str, Declaration] = module.__dict__.setdefault(DECLARED, {})
    for name, declaration in parameters.items():
        if name not in module._parameters:
            raise KeyError(f"{type(module).__name__} has no parameter {name} to be declared")
        said[name] = declaration


def declared(module: nn.Module, name: str) -> Declaration | None:
    """What was said of a module's own parameter; None: nothing."""
    said: dict[str, Declaration] = module.__dict__.get(DECLARED, {})
    return said.get(name)


def declarations(root: nn.Module) -> Iterator[tuple[str, Declaration]]:
    """Every parameter below a module with what was said of it, or what is usual."""
    named = {id(parameter): name for name, parameter in root.named_parameters()}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and (full := named.pop(id(parameter), "")):
                yield full, declared(module, name) or _usual(module, name)


def is_orthogonalized(name: str, ndim: int, said: Declaration) -> bool:
    """Whether Muon takes a parameter: as declared, else matrices inside layers."""
    inside = ndim == 2 and name.startswith("layers.")
    return inside if said.orthogonal is None else said.orthogonal


def _usual(module: nn.Module, name: str) -> Declaration:
    """Of a parameter that nobody declared: torch's norms start at one, biases at zero."""
    if name == "bias":
        return BIAS
    return SCALE if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm) else REPLICATED
