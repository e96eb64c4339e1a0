"""Tensor parallelism with sequence parallelism.

Between blocks every rank holds its slice of the sequence. Attention and feed-forward gather
the sequence, work on their heads or columns, and scatter the sum back; embedding and loss
are split over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from phalanx.model import (
    Declaration,
    Embedding,
    ForwardContext,
    Head,
    Layer,
    ScorePeaks,
    Transformer,
    VocabSlice,
    declared,
    ops,
)
from phalanx.model.layers import BiasedLinear
from phalanx.model.loss import linear_cross_entropy, row_scores
from phalanx.parallel.collectives import (
    UnknownParameterError,
    gather,
    scatter_sum,
    shard_parameter,
)


def apply_tensor_parallel(part: Transformer, mesh: DeviceMesh) -> None:
    """Split a model part over the ranks of ``mesh``."""
    group = mesh.get_group()
    part.stream_part = (dist.get_rank(group), group.size())
    if (table := part.token_table) is not None:
        shard_parameter(table, "weight", mesh, Shard(0))
        table.__class__ = _bind(type(table), VocabParallelEmbedding, group)
    for layer in part.layers.values():
        assert isinstance(layer, Layer)
        _split_layer(layer, mesh, group)
    if part.norm is not None and part.head is not None:
        shard_parameter(part.norm, "weight", mesh, Replicate(), partial=True)
        part.tie()
        shard_parameter(part.head, "weight", mesh, Shard(0))
        part.head.__class__ = _bind(type(part.head), VocabParallelHead, group)
    if unknown := list(_unknown(part)):
        raise UnknownParameterError("tensor", unknown)


def _unknown(part: Transformer) -> Iterator[str]:
    """Parameters that nobody declared, and so nobody split or replicated."""
    for path, module in part.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor):
                continue
            if (said := declared(module, name)) is None or not said.expert:
                yield f"{path}.{name}"


def _bind(base: type, mixin: type, group: dist.ProcessGroup) -> type:
    return type(mixin.__name__, (mixin, base), {"group": group})


def _split_layer(layer: Layer, mesh: DeviceMesh, group: dist.ProcessGroup) -> None:
    for module in list(layer.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and (said := declared(module, name)) is not None:
                _split_parameter(module, name, said, mesh)
        if isinstance(module, ScorePeaks):
            module.part = dist.get_rank(group)
        if isinstance(module, BiasedLinear) and _sums_over_ranks(module):
            share = {"share": float(dist.get_rank(group) == 0)}
            module.__class__ = type("FirstRankBias", (FirstRankBias, type(module)), share)
    for branch in layer.branches():
        _gather_around(branch, group)
    if layer.moe is not None:
        # Routed tokens stay where they are: each rank routes its slice of the sequence.
        _slice_real_tokens(layer.moe, group)


def _split_parameter(module: nn.Module, name: str, said: Declaration, mesh: DeviceMesh) -> None:
    """What a rank holds of a parameter; of a replicated one it sees part of the gradient.

    Experts are not cut: their tokens come from slices, and FSDP sums over those.
    """
    if said.expert:
        return
    if said.split is None:
        shard_parameter(module, name, mesh, Replicate(), partial=True)
    else:
        shard_parameter(module, name, mesh, Shard(said.split))


def _sums_over_ranks(linear: nn.Linear) -> bool:
    """Whether its results are shares: ranks hold columns of its weight."""
    said = declared(linear, "weight")
    return said is not None and said.split == 1


def _gather_around(branch: nn.Module, group: dist.ProcessGroup) -> None:
    """Whole sequence in, slice of the sequence out."""

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather(args[0], 1, group), *args[1:]

    def after(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
        return scatter_sum(out, 1, group)

    branch.register_forward_pre_hook(before)
    branch.register_forward_hook(after)


def _slice_real_tokens(moe: nn.Module, group: dist.ProcessGroup) -> None:
    """The mask of real tokens covers the sequence; the router sees a slice of it."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)

    def before(_: nn.Module, args: tuple[Tensor, ForwardContext]) -> tuple[Tensor, ForwardContext]:
        x, context = args
        if context.real is not None:
            context = context._replace(real=context.real.chunk(size, dim=1)[rank])
        return x, context

    moe.register_forward_pre_hook(before)


class FirstRankBias(BiasedLinear):
    """Its results are summed over ranks: the bias is in that of one of them."""

    share: float  # one there, elsewhere zero

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight) + self.bias * self.share


class VocabParallelEmbedding(Embedding):
    """Looks up the tokens whose rows are here; the sum over ranks completes the others."""

    group: dist.ProcessGroup

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.weight.shape[0]
        local = tokens - dist.get_rank(self.group) * rows
        here = (local >= 0) & (local < rows)
        found = F.embedding(local.clamp(0, rows - 1), self.weight) * here.unsqueeze(-1)
        return scatter_sum(found, 1, self.group)


class VocabParallelHead(Head):
    """Logits of the vocabulary rows that are here; the loss combines them over ranks."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor, labels: Tensor | None, token_weight: Tensor) -> Tensor:
        x = gather(x, 1, self.group)
        if labels is None:
            return gather(self.logits(x), 2, self.group)
        first = dist.get_rank(self.group) * self.weight.shape[0]
        vocab = VocabSlice(first, self._max, self._sum)
        if self.scores_rows:
            return row_scores(x, self.weight, labels, vocab, self.softcap)
        if self.own_loss is not None:
            loss = self.own_loss.total(self._all_logits(x), labels, token_weight)
            return torch.stack((loss,))
        loss = linear_cross_entropy(
            x, self.weight, labels, token_weight, vocab, self.softcap, self.z_loss
        )
        # Not a view: FSDP hooks onto what a module returns.
        return torch.stack((loss,))

    def _all_logits(self, x: Tensor) -> Tensor:
        """Of the whole vocabulary, on every rank; each makes the same loss of them, and backward
        adds up what the ranks say: their mean counts.
        """
        logits = gather(self.logits(x), 2, self.group)
        constant = logits.detach()
        return constant + (logits - constant) / self.group.size()

    def _max(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, dist.ReduceOp.MAX, self.group)
        return x

    def _sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x


def enable_async_tensor_parallel(mesh: DeviceMesh) -> None:
    """Let the compiler overlap gathers and scatters with the matmuls beside them (CUDA only)."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.get_group().group_name)
