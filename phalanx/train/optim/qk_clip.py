"""QK-clip, as MuonClip has it: heads whose scores grow too large have their weights scaled down.

A head's largest score of the global batch stays on the device; all ranks of a stage take its
maximum once a step, and each scales the rows that it holds.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.model import GroupedQueryAttention, LatentAttention, ScorePeaks
from phalanx.parallel import Engine, Weight

KINDS = ("weight", "bias")  # parameters of a linear layer


class ClippedLayer(NamedTuple):
    """A layer's attention, and the weights of its parts by module."""

    attention: GroupedQueryAttention | LatentAttention
    peaks: ScorePeaks
    weights: dict[str, list[Weight]]


class QkClip:
    """Nothing where the job does not ask for it. Frozen weights stay as they are."""

    def __init__(self, engine: Engine) -> None:
        self.limit = engine.job.model.qk_clip
        self._group = engine.mesh.stage_group
        self._layers = list(_clipped_layers(engine)) if self.limit else []

    @torch.no_grad()
    def apply(self, skip: Tensor) -> None:
        """After an update; one that was skipped leaves the weights."""
        if not self._layers:
            return
        peaks = torch.stack([layer.peaks.peaks for layer in self._layers])
        if self._group is not None:
            dist.all_reduce(peaks, dist.ReduceOp.MAX, self._group)
        clipped = (peaks > self.limit) & torch.isfinite(peaks) & ~skip
        shrinks = torch.where(clipped, self.limit / peaks, 1.0)
        for layer, shrink in zip(self._layers, shrinks, strict=True):
            for module, rows in layer.attention.clip_factors(shrink).items():
                for weight in layer.weights[module]:
                    _scale_rows(weight, rows)
            layer.peaks.peaks.zero_()


def _scale_rows(weight: Weight, factors: Tensor) -> None:
    """Multiply the rows of a block by their factors of the whole parameter's."""
    block = weight.master
    own = factors[weight.first_row : weight.first_row + len(block)]
    block.mul_(own.view(-1, *[1] * (block.dim() - 1)))
    weight.publish()


def _clipped_layers(engine: Engine) -> list[ClippedLayer]:
    by_name = {weight.name: weight for weight in engine.weights}
    layers = []
    for part in engine.parts:
        for path, module in part.named_modules():
            if not isinstance(module, GroupedQueryAttention | LatentAttention):
                continue
            peaks = module.core.peaks
            assert isinstance(peaks, ScorePeaks)
            clipped = module.clip_factors(torch.ones_like(peaks.peaks))
            names = {name: [f"{path}.{name}.{kind}" for kind in KINDS] for name in clipped}
            found = {
                name: [by_name[key] for key in keys if key in by_name]
                for name, keys in names.items()
            }
            if not any(weight.frozen for weights in found.values() for weight in weights):
                layers.append(ClippedLayer(module, peaks, found))
    return layers
