"""Gradients of FSDP's units, added up over virtual replicas in the order of the tree.

FSDP reduces a unit when a virtual replica ends: over the shards by a reduce-scatter
of ours, and after it by a hook that knows what other virtual replicas and other copies have.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from phalanx.parallel.virtual import tree


class UnitGradients(DefaultReduceScatter):
    """The sum of one unit; called by FSDP for each of this rank's virtual replicas.

    What FSDP makes of the output before the ``last`` one is thrown away.
    """

    def __init__(self, copies: dist.ProcessGroup | None, *, scatter_once: bool) -> None:
        self.last = True
        self._copies, self._scatter_once = copies, scatter_once
        self._sum = tree.TreeSum()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **named: Any
    ) -> Any:
        """FSDP's reduce-scatter, called where there is more than one shard."""
        if self._scatter_once:
            self._sum.add(input_tensor)
            if not self.last:
                return
            input_tensor = self._sum.take()
        group = args[0] if args else named["group"]
        tree.reduce_scatter(output_tensor, input_tensor, group)

    def after_scatter(self, output: Tensor) -> None:
        """FSDP's hook, called with this rank's shard, which becomes the gradient."""
        if output.is_cuda:  # made on the stream of the reduce-scatter, read on this one
            output.record_stream(torch.cuda.current_stream())
        if not self._scatter_once:
            self._sum.add(output)
            if not self.last:
                return
            total = self._sum.take()
            if total is not output:
                output.copy_(total)
        if self.last and self._copies is not None:
            output.copy_(tree.all_reduce(output, self._copies))


def sum_fsdp_gradients(
    part: nn.Module, copies: dist.ProcessGroup | None, *, scatter_once: bool
) -> list[UnitGradients]:
    """Have all units of a model part summed in the order of the tree."""
    units = []
    for module in part.modules():
        if isinstance(module, FSDPModule):
            unit = UnitGradients(copies, scatter_once=scatter_once)
            module.set_custom_reduce_scatter(unit)
            module.set_all_reduce_hook(unit.after_scatter)
            units.append(unit)
    return units
