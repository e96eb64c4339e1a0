"""Expert parallelism: each rank holds some experts, and tokens travel to them and back."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from phalanx.model import Experts, Layer, MoeLayer, Router, Transformer, declared
from phalanx.parallel.collectives import (
    UnknownParameterError,
    exchange,
    shard_parameter,
    sum_over,
)


def moe_layers(part: Transformer) -> list[MoeLayer]:
    """The MoE layers of a model part."""
    found = [cast(Layer, layer).moe for layer in part.layers.values()]
    return [moe for moe in found if moe is not None]


def apply_expert_parallel(part: Transformer, mesh: DeviceMesh) -> None:
    """Spread the experts of every MoE layer over the ranks of ``mesh``."""
    for layer in moe_layers(part):
        names = [name for name, _ in layer.experts.named_parameters()]
        said = {name: declared(layer.experts, name) for name in names}
        if unknown := [name for name, one in said.items() if one is None or not one.expert]:
            raise UnknownParameterError("expert", [f"moe.experts.{name}" for name in unknown])
        for name in names:
            shard_parameter(layer.experts, name, mesh, Shard(0))
        base = type(layer.experts)
        namespace = {"group": mesh.get_group()}
        layer.experts.__class__ = type("SpreadExperts", (SpreadExperts, base), namespace)


class SpreadExperts(Experts):
    """Sends tokens to the ranks of their experts, applies those here, and sends them back.

    The sizes of the exchange are data and must reach the host: one synchronisation a layer,
    as with every all-to-all whose splits NCCL takes from the host.
    """

    group: dist.ProcessGroup

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        ranks = self.group.size()
        wanted = counts.view(ranks, -1)  # [rank, expert there] tokens I send
        arriving = torch.empty_like(wanted)  # [rank, my expert] tokens I receive
        dist.all_to_all_single(arriving, wanted.contiguous(), group=self.group)
        sizes = torch.stack((wanted.sum(1), arriving.sum(1))).tolist()
        received = exchange(x, self.group, sizes[1], sizes[0])
        by_expert = _expert_order(arriving)
        worked = super().forward(received[by_expert], arriving.sum(0))
        restored = torch.empty_like(worked).index_copy(0, by_expert, worked)
        return exchange(restored, self.group, sizes[0], sizes[1])


def _expert_order(arriving: Tensor) -> Tensor:
    """Permutation that brings rows sorted by (rank, expert) into order of experts."""
    expert = torch.arange(arriving.shape[1], device=arriving.device).repeat(arriving.shape[0])
    return expert.repeat_interleave(arriving.flatten()).argsort(stable=True)


def share_balance_statistics(part: Transformer, group: dist.ProcessGroup) -> None:
    """Make the balance loss see the whole sequence where ranks hold slices of it."""
    for layer in moe_layers(part):
        base = type(layer.router)

        def over_sequence(_: Router, sums: Tensor) -> Tensor:
            return sum_over(sums, group)

        layer.router.__class__ = type(base.__name__, (base,), {"over_sequence": over_sequence})


@torch.no_grad()
def balance_experts(
    parts: list[Transformer], group: dist.ProcessGroup | None, skip: Tensor
) -> None:
    """Sum the loads of the step over the ranks of the stage; biases and balance losses follow.

    ``skip`` [] bool is the step's verdict: a skipped one leaves them as they are.
    """
    routers: list[Any] = [layer.router for part in parts for layer in moe_layers(part)]
    routers = [router for router in routers if router.counts_load]
    if not routers:
        return
    loads = torch.stack([router.load for router in routers])
    if group is not None:
        dist.all_reduce(loads, group=group)
    loads = loads * ~skip  # equal loads move nothing
    for router, load in zip(routers, loads, strict=True):
        router.load.copy_(load)
        router.end_step()
