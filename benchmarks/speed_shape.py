"""What the speed comparison trains."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from phalanx.config import PRESETS, Model

SEQUENCE = 8192


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
class Shape:
    """A preset with the batch, in sequences, that fills one H200 well."""

    name: str
    batch: int

    @property
    def model(self) -> Model:
        return msgspec.structs.replace(PRESETS[self.name], tied_embedding=False)


SHAPES = {shape.name: shape for shape in (Shape("llama3-1b", 4), Shape("llama3-3b", 2))}
