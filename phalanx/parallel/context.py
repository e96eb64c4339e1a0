"""Context parallelism (ring attention, Ulysses): a sequence longer than one device, over ranks.

Ring: keys and values travel round the ranks while each keeps its queries. Every rank holds
one early and one late chunk, so that all do the same work under the causal mask. Ulysses:
an all-to-all swaps the sequence split for a split over heads, and back.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.attention.flex_attention import BlockMask

from phalanx.config import ConfigError
from phalanx.model import CausalAttention, Layer, ScorePeaks, Transformer
from phalanx.parallel.collectives import exchange

Pair = tuple[Tensor, Tensor]


def local_positions(method: str, sequence: int, rank: int, size: int) -> Tensor:
    """Positions of the whole sequence that a rank holds, in its order."""
    positions = torch.arange(sequence)
    if method == "ulysses":
        return positions.chunk(size)[rank]
    chunks = positions.chunk(2 * size)
    return torch.cat((chunks[rank], chunks[2 * size - 1 - rank]))


def apply_context_parallel(part: Transformer, group: dist.ProcessGroup, method: str) -> None:
    """Replace the attention core of every block."""
    if method == "ulysses":
        part.sequence_parts = group.size()
    else:
        part.__class__ = type("RingDocuments", (RingDocuments, type(part)), {})
    if part.config.mtp is not None:
        bound = {"group": group, "method": method}
        part.__class__ = type("SplitLookAhead", (SplitLookAhead, type(part)), bound)
    for layer in part.layers.values():
        _refuse_other_mixing(cast(Layer, layer))
        for module in list(layer.modules()):
            for name, core in list(module.named_children()):
                if isinstance(core, CausalAttention):
                    setattr(module, name, _over_ranks(core, group, method))


class RingDocuments(Transformer):
    """Hands on the documents [batch, seq] themselves: the ring has no mask of all its tokens."""

    def _mask(self, documents: Tensor | None) -> Tensor | object | None:
        return documents


class SplitLookAhead(Transformer):
    """Looks ahead over a sequence of which every rank holds some positions."""

    group: dist.ProcessGroup
    method: str

    def look_ahead(
        self, tokens: Tensor, labels: Tensor, documents: Tensor | None, depth: int
    ) -> tuple[Tensor, Tensor]:
        size, own = self.group.size(), torch.stack((tokens, labels))
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own, self.group)
        sequence = tokens.shape[1] * size
        places = [local_positions(self.method, sequence, rank, size) for rank in range(size)]
        order = torch.cat(places).argsort().to(tokens.device)
        whole = torch.cat(parts, -1)[..., order]
        following, targets = super().look_ahead(whole[0], whole[1], documents, depth)
        held = places[dist.get_rank(self.group)].to(tokens.device)
        return following[:, held], targets[:, held]


def _refuse_other_mixing(layer: Layer) -> None:
    """Tokens that meet elsewhere than in attention would miss those of other ranks."""
    if not layer.splits_sequence:
        rule = f"{type(layer).__name__} does not say that tokens meet in CausalAttention alone"
        fix = "set splits_sequence = True in the class if they do, or parallel.context = 1"
        raise ConfigError("parallel.context", "", rule, fix)


def _over_ranks(core: CausalAttention, group: dist.ProcessGroup, method: str) -> nn.Module:
    if method == "ulysses":
        return UlyssesAttention(group, core.scale, core.softcap, core.peaks)
    plain = not core.softcap and core.peaks is None
    assert plain, "configuration refuses the ring for other scores"
    return RingAttention(group, core.scale)


class UlyssesAttention(CausalAttention):
    """Whole sequence, some heads."""

    def __init__(
        self, group: dist.ProcessGroup, scale: float, softcap: float, peaks: ScorePeaks | None
    ) -> None:
        super().__init__(scale, softcap, peaks)
        self.group, self.size = group, group.size()
        if peaks is not None:
            peaks.part = peaks.part * self.size + dist.get_rank(group)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | BlockMask | None,
        sinks: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Tensor:
        q, k, v = (self._heads_out(t) for t in (q, k, v))
        if counted is not None:  # also those whose labels are on another rank
            counted = functional.all_reduce(counted.int(), "max", self.group) > 0
        if sinks is not None:  # those of the heads that are here
            sinks = sinks.chunk(self.size)[dist.get_rank(self.group)]
        return self._sequence_out(super().forward(q, k, v, mask, sinks, counted))

    def _heads_out(self, x: Tensor) -> Tensor:
        """[batch, seq / n, heads, dim] -> [batch, seq, heads / n, dim]."""
        parts = x.unflatten(2, (self.size, -1)).movedim(2, 0)  # [n, b, s / n, h / n, d]
        received = exchange(parts, self.group, None, None)
        return received.movedim(0, 1).flatten(1, 2)

    def _sequence_out(self, x: Tensor) -> Tensor:
        """[batch, seq, heads / n, dim] -> [batch, seq / n, heads, dim]."""
        parts = x.unflatten(1, (self.size, -1)).movedim(1, 0)
        received = exchange(parts, self.group, None, None)
        return received.movedim(0, 2).flatten(2, 3)


class RingAttention(nn.Module):
    """Some queries against all keys, one rank's keys at a time."""

    def __init__(self, group: dist.ProcessGroup, scale: float = 0.0) -> None:
        super().__init__()
        self.group = group
        self.scale = scale  # of the scores; 0: by the width of a head

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | BlockMask | None,
        sinks: Tensor | None = None,
        counted: Tensor | None = None,
    ) -> Tensor:
        assert mask is None or isinstance(mask, Tensor), "the ring is given documents, not blocks"
        assert sinks is counted is None, "configuration refuses the ring for other scores"
        value_dim = v.shape[-1]
        if value_dim != q.shape[-1]:
            v = F.pad(v, (0, q.shape[-1] - value_dim))
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
        ring: Any = _Ring.apply
        out: Tensor = ring(q, k, v, self.group, self.scale or None, mask)
        return out.transpose(1, 2)[..., :value_dim]


class _Ring(Function):
    """Ring attention over [batch, heads, seq, dim]; partial results merge by log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: dist.ProcessGroup,
        scale: float | None,
        documents: Tensor | None,
    ) -> Tensor:
        rank, size = dist.get_rank(group), group.size()
        out = torch.zeros_like(q, dtype=torch.float32)
        total = torch.full(q.shape[:-1], -torch.inf, device=q.device)
        travelling = torch.stack((k, v))
        for step in range(size):
            arriving = _Rotation(travelling, group) if step < size - 1 else None
            source = (rank - step) % size
            queries, keys = _visible(q.shape[2], rank, source)
            block_out, weight = _attend(
                q[:, :, queries],
                travelling[0][:, :, keys],
                travelling[1][:, :, keys],
                step == 0,
                scale,
                _hidden(documents, rank, source, size, queries, keys),
            )
            _merge(out[:, :, queries], total[:, :, queries], block_out, weight)
            if arriving is not None:
                travelling = arriving.wait()
        result = out.to(q.dtype)
        ctx.group, ctx.scale, ctx.documents = group, scale, documents
        ctx.save_for_backward(q, k, v, result, total)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, total = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.group), ctx.group.size()
        grad = grad.contiguous()
        grad_q = torch.zeros_like(q, dtype=torch.float32)
        travelling = torch.stack((k, v))
        # Gradients of keys and values ride along and are home after a full round.
        slopes = torch.zeros_like(travelling, dtype=torch.float32)
        for step in range(size):
            arriving = _Rotation(travelling, ctx.group) if step < size - 1 else None
            source = (rank - step) % size
            queries, keys = _visible(q.shape[2], rank, source)
            dq, dk, dv = _attend_backward(
                grad[:, :, queries],
                q[:, :, queries],
                travelling[0][:, :, keys],
                travelling[1][:, :, keys],
                out[:, :, queries],
                total[:, :, queries],
                step == 0,
                ctx.scale,
                _hidden(ctx.documents, rank, source, size, queries, keys),
            )
            grad_q[:, :, queries] += dq
            slopes[0][:, :, keys] += dk
            slopes[1][:, :, keys] += dv
            slopes = _Rotation(slopes, ctx.group).wait()
            if arriving is not None:
                travelling = arriving.wait()
        grads = (grad_q.to(q.dtype), slopes[0].to(k.dtype), slopes[1].to(v.dtype))
        return *grads, None, None, None


class _Rotation:
    """A tensor on its way to the next rank, and another arriving from the previous one."""

    def __init__(self, sent: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = dist.get_rank(group), group.size()
        self._received = torch.empty_like(sent)
        ahead = dist.get_global_rank(group, (rank + 1) % size)
        behind = dist.get_global_rank(group, (rank - 1) % size)
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, ahead, group),
                dist.P2POp(dist.irecv, self._received, behind, group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self._work:
            work.wait()
        return self._received


def _visible(length: int, rank: int, source: int) -> tuple[slice, slice]:
    """Queries and keys that meet when the keys come from ``source``.

    Own keys: all, causally. From an earlier rank: all queries see its early chunk. From a
    later rank: the late queries see both of its chunks.
    """
    half = length // 2
    if source == rank:
        return slice(None), slice(None)
    if source < rank:
        return slice(None), slice(0, half)
    return slice(half, None), slice(None)


def _hidden(
    documents: Tensor | None, rank: int, source: int, size: int, queries: slice, keys: slice
) -> Tensor | None:
    """Pairs [batch, 1, queries, keys] of tokens that do not see each other, where any are known."""
    if documents is None:
        return None
    places = [local_positions("ring", documents.shape[1], r, size) for r in (rank, source)]
    query_positions, key_positions = (place.to(documents.device) for place in places)
    own, theirs = documents[:, query_positions][:, queries], documents[:, key_positions][:, keys]
    hidden = own[:, None, :, None] != theirs[:, None, None, :]
    if source == rank:
        hidden = hidden | (query_positions[queries, None] < key_positions[None, keys])
    return hidden


def _bias(hidden: Tensor, like: Tensor) -> Tensor:
    """What is added to the scores of every head; rows begin where CUDA's kernels can read them."""
    batch, _, queries, keys = hidden.shape
    row = -(-keys // 8) * 8
    bias = torch.zeros(batch, 1, queries, row, dtype=like.dtype, device=like.device)[..., :keys]
    return bias.masked_fill_(hidden, -torch.inf).expand(batch, like.shape[1], queries, keys)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Key/value heads repeated to the number of query heads."""
    return x.repeat_interleave(heads // x.shape[1], dim=1).contiguous()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, hidden: Tensor | None
) -> Pair:
    """Attention of one block of keys and its log-sum-exp [batch, heads, queries].

    Queries that see none of the keys add nothing.
    """
    heads = q.shape[1]
    q, k, v = q.contiguous(), _spread(k, heads), _spread(v, heads)
    if hidden is not None:
        part, weight = _attend_biased(q, k, v, _bias(hidden, q), scale)
        blind = hidden.all(-1)  # [batch, 1, queries]
        return part.masked_fill(blind.unsqueeze(-1), 0.0), weight.masked_fill(blind, -torch.inf)
    if q.is_cuda:
        attend = torch.ops.aten._scaled_dot_product_flash_attention
    else:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found = attend(q, k, v, 0.0, causal, scale=scale)
    return found[0], found[1]


def _attend_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None) -> Pair:
    if q.is_cuda:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        outputs = efficient(q, k, v, bias, True, 0.0, False, scale=scale)
        return outputs[0], outputs[1][..., : q.shape[2]]  # padded
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    outputs = flash(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
    return outputs[0], outputs[1]


def _merge(out: Tensor, total: Tensor, block_out: Tensor, weight: Tensor) -> None:
    """Fold one block's result into the running one, in place."""
    combined = torch.logaddexp(total, weight)
    out *= (total - combined).exp().unsqueeze(-1)
    out += block_out * (weight - combined).exp().unsqueeze(-1)
    total.copy_(combined)


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    causal: bool,
    scale: float | None,
    hidden: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one block, given the merged output and log-sum-exp of all blocks."""
    heads, kv_heads = q.shape[1], k.shape[1]
    full = [t.contiguous() for t in (grad, q)] + [_spread(k, heads), _spread(v, heads)]
    full += [out.contiguous(), total.contiguous()]
    if hidden is not None:
        dq, dk, dv = _biased_backward(full, _bias(hidden, q), scale)
    elif q.is_cuda:
        seed = torch.empty(0, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *full, *lengths, 0.0, causal, seed, seed, scale=scale
        )
    else:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *full, 0.0, causal, scale=scale
        )
    dk, dv = (t.float().unflatten(1, (kv_heads, -1)).sum(2) for t in (dk, dv))
    return dq, dk, dv


def _biased_backward(
    full: list[Tensor], bias: Tensor, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``full``: gradient, queries, keys, values, output and log-sum-exp."""
    if not bias.is_cuda:
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = backward(*full, 0.0, False, attn_mask=bias, scale=scale)
        return dq, dk, dv
    *inputs, out, total = full
    queries = total.shape[-1]
    # As the kernel's own forward pass leaves them; of the result it does not ask for strides.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    total = F.pad(total, (0, -queries % 32))
    seed = torch.empty(0, dtype=torch.int64, device=bias.device)
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    wanted = [True, True, True, False]
    dq, dk, dv, _ = backward(*inputs, bias, out, total, seed, seed, 0.0, wanted, False, scale=scale)
    return dq, dk, dv
