"""What the speed comparison trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from msgspec import structs
from torch import Tensor

from phalanx.config import PRESETS, Model


class State(NamedTuple):
    """What a trainer keeps on the device between steps."""

    weights: list[Tensor]
    masters: list[Tensor]  # fp32 copies of the weights, in their order; none where those are fp32
    moments: list[Tensor]

    def park(self) -> None:
        """Give the memory back; the values are not needed again."""
        for tensor in self._all():
            tensor.untyped_storage().resize_(0)

    def unpark(self) -> None:
        """Take the memory again, with the values of a training that begins."""
        for tensor in self._all():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        with torch.no_grad():
            for weight in self.weights:
                weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(0, 0.02)
            for master, weight in zip(self.masters, self.weights, strict=False):
                master.copy_(weight)
            for moment in self.moments:
                moment.zero_()

    def _all(self) -> list[Tensor]:
        return [*self.weights, *self.masters, *self.moments]


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison: a model with the batch, in sequences, that fills one H200 well."""

    name: str
    model: Model
    batch: int
    sequence: int = 8192
    fp8: bool = False
    titan_recompute: str = "none"  # the least with which torchtitan fits

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.sequence


def untied(preset: str) -> Model:
    """A preset whose output layer has weights of its own, as torchtitan's has."""
    return structs.replace(PRESETS[preset], tied_embedding=False)


def mixture() -> Model:
    """A quarter of Qwen3's layers and fewer of its experts, so that one card holds the state."""
    whole = untied("qwen3-moe-30b-a3b")
    assert whole.moe is not None
    return structs.replace(whole, layers=12, moe=structs.replace(whole.moe, experts=48))


ROWS: dict[str, Callable[[str], Row]] = {
    "1b": lambda name: Row(name, untied("llama3-1b"), 4),
    "3b": lambda name: Row(name, untied("llama3-3b"), 2),
    "3b-fp8": lambda name: Row(name, untied("llama3-3b"), 2, fp8=True),
    "moe": lambda name: Row(name, mixture(), 4, sequence=4096),
    "1b-64k": lambda name: Row(
        name, untied("llama3-1b"), 1, sequence=65_536, titan_recompute="selective"
    ),
}


def row(name: str) -> Row:
    """The row of that name."""
    return ROWS[name](name)
