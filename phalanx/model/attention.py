"""Attention: grouped-query and latent projections around one replaceable core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)

from phalanx.config import Model, has_window, rotated_width
from phalanx.model.cuda.attention import causal_attention
from phalanx.model.declare import BIAS, REPLICATED, RESIDUAL, ROWS, Declaration, declare
from phalanx.model.layers import BiasedLinear, ForwardContext, Linear, Windowed, make_norm
from phalanx.model.ops import apply_rope, soft_cap, split_heads, split_rope
from phalanx.model.score_peaks import ScorePeaks


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled on its own, once for all layers; other documents are other data, not other code."""
    return torch.compile(function, dynamic=False)


def document_mask(documents: Tensor, window: int = 0) -> Tensor | BlockMask:
    """Causal mask inside each packed document. documents: [batch, seq] numbers.

    With a window, a token sees so many tokens at most, itself included.
    """
    batch, sequence = documents.shape
    if documents.is_cuda:

        def visible(b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents[b, query] == documents[b, key])

        def near(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return visible(b, h, query, key) & (query - key < window)

        make = compiled(create_block_mask)  # uncompiled it would ask of every pair of tokens
        seen = near if window else visible
        mask: BlockMask = make(seen, batch, None, sequence, sequence, device=documents.device)
        return mask
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & _band(window or sequence, sequence, documents.device)


@functools.lru_cache(maxsize=8)
def window_mask(
    window: int, sequence: int, device: torch.device, blocks: bool = False
) -> Tensor | BlockMask | None:
    """Causal mask of the nearest tokens; None where they are all, or their blocks on CUDA where
    attention needs some. Made once, not once a step.
    """
    cuda = device.type == "cuda"
    if window >= sequence and not (blocks and cuda):
        return None
    if not cuda:
        return _band(window, sequence, device)

    def visible(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    mask: BlockMask = compiled(create_block_mask)(
        visible, None, None, sequence, sequence, device=device
    )
    return mask


def _band(window: int, sequence: int, device: torch.device) -> Tensor:
    """True on the diagonal and so many less one below it."""
    lower = torch.ones(sequence, sequence, dtype=torch.bool, device=device).tril()
    return lower.triu(1 - window)


@functools.cache
def capped(softcap: float) -> Callable[..., Tensor]:
    """What FlexAttention does with each score; one function for all layers of a cap."""

    def cap(score: Tensor, _b: Tensor, _h: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return soft_cap(score, softcap)

    return cap


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    largest_seen: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """By the textbook, every score held: for what fused kernels of the CPU do not know.

    ``largest_seen`` is told of the largest score of each query.
    """
    if mask is None:
        mask = _band(q.shape[2], q.shape[2], q.device)
    shares = attention_shares((q @ k.mT).float() * scale, mask, softcap, sinks, largest_seen)
    return shares.to(v.dtype) @ v


def attention_shares(
    scores: Tensor,
    mask: Tensor,
    softcap: float,
    sinks: Tensor | None,
    largest_seen: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """What each token takes of every other, of scores [batch, heads, queries, keys]."""
    if softcap:
        scores = soft_cap(scores, softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if largest_seen is not None:
        largest_seen(scores.detach().amax(-1))
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


class CausalAttention(nn.Module):
    """The core: softmax(q k^T) v over [batch, seq, heads, head_dim] tensors.

    On CUDA, scores of another form than a softmax of products need a mask of blocks.
    """

    def __init__(
        self, scale: float = 0.0, softcap: float = 0.0, peaks: ScorePeaks | None = None
    ) -> None:
        super().__init__()
        self.scale = scale  # of the scores; 0: by the width of a head
        self.softcap = softcap  # of the scores; 0: none
        self.peaks = peaks  # is told of the largest scores; None: nobody asks
        self.score_form = capped(softcap) if softcap else None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | BlockMask | None,
        sinks: Tensor | None = None,  # [heads]
        counted: Tensor | None = None,  # [batch] samples whose scores count in the peaks
    ) -> Tensor:
        key_dim, value_dim = q.shape[-1], v.shape[-1]
        scale = self.scale or key_dim**-0.5
        if value_dim < key_dim:  # latent attention: fused kernels want one head size
            v = F.pad(v, (0, key_dim - value_dim))
        elif value_dim > key_dim:
            q, k = (F.pad(t, (0, value_dim - key_dim)) for t in (q, k))
        if not q.is_cuda and k.shape[2] != q.shape[2]:  # the CPU kernel has no grouped heads
            repeat = q.shape[2] // k.shape[2]
            k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
        peaks = self.peaks if self.training else None
        largest_seen = None if peaks is None else functools.partial(peaks.take, counted=counted)
        if q.is_cuda and not isinstance(mask, BlockMask):
            plain = not self.softcap and sinks is None and peaks is None
            assert plain, "other forms need a mask of blocks"
            return causal_attention(q, k, v, scale)[..., :value_dim]
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if isinstance(mask, BlockMask):
            out = self._flex(q, k, v, mask, scale, sinks, largest_seen)
        elif self.softcap or sinks is not None or peaks is not None:
            out = plain_attention(q, k, v, mask, scale, self.softcap, sinks, largest_seen)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scale)
        return out.transpose(1, 2)[..., :value_dim]

    def _flex(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        scale: float,
        sinks: Tensor | None,
        largest_seen: Callable[[Tensor], None] | None,
    ) -> Tensor:
        """By blocks of scores. A sink takes its share of each row after the fact."""
        # Uncompiled it would hold every score of the whole sequence, forward and backward.
        inside = torch.compiler.is_compiling()  # of a block that is compiled as a whole
        attend: Any = flex_attention if inside else compiled(flex_attention)
        options = {"block_mask": mask, "scale": scale, "enable_gqa": _grouped(q, k)}
        if sinks is None and largest_seen is None:
            out: Tensor = attend(q, k, v, self.score_form, **options)
            return out
        asked = AuxRequest(lse=sinks is not None, max_scores=largest_seen is not None)
        out, extras = attend(q, k, v, self.score_form, **options, return_aux=asked)
        if largest_seen is not None:
            largest_seen(extras.max_scores)
        if sinks is None:
            return out
        kept = torch.sigmoid(extras.lse - sinks.float()[:, None])
        return (out * kept.unsqueeze(-1)).to(v.dtype)


def make_core(config: Model) -> CausalAttention:
    """The core of a model's attention."""
    peaks = ScorePeaks(config.heads) if config.qk_clip else None
    return CausalAttention(config.attention_scale, config.attention_softcap, peaks)


def _grouped(q: Tensor, k: Tensor) -> bool:
    """Whether several of the queries' heads share one of the keys'. [batch, heads, seq, dim]"""
    return k.shape[1] != q.shape[1]


class GroupedQueryAttention(nn.Module):
    """Multi-head attention with shared key/value heads.

    Rows of ``qkv`` are ordered by key/value head: its queries, its key, its value. A
    contiguous slice of rows is therefore a complete set of heads.
    """

    def __init__(self, config: Model, layer: int = 0) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rotated = rotated_width(config, layer)
        self.windowed = has_window(config, layer)
        self.queries = config.heads // config.kv_heads  # per key/value head
        rows = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = (BiasedLinear if config.attention_bias else Linear)(config.dim, rows)
        out = BiasedLinear if config.attention_out_bias else Linear
        self.out = out(config.heads * config.head_dim, config.dim)
        self.sinks = nn.Parameter(torch.empty(config.heads)) if config.attention_sinks else None
        self.norms_all = config.qk_norm_over == "all"
        wide = (config.heads, config.kv_heads) if self.norms_all else (1, 1)
        norms = [make_norm(config, n * config.head_dim) if config.qk_norm else None for n in wide]
        self.q_norm, self.k_norm = norms
        self.core = make_core(config)
        heads = (self.queries * self.head_dim, self.head_dim, self.head_dim)
        declare(self.qkv, weight=Declaration(split=0, fused=heads))
        declare(self.out, weight=RESIDUAL)
        if config.attention_bias:
            declare(self.qkv, bias=replace(BIAS, split=0))
        if self.sinks is not None:
            declare(self, sinks=Declaration(split=0, decay=False))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        return self.attend(self.qkv(x), context)

    def attend(self, packed: Tensor, context: ForwardContext) -> Tensor:
        """Everything after the fused projection: packed [batch, seq, rows] -> [batch, seq, dim]."""
        seen = context.windowed if self.windowed and context.windowed is not None else context
        if self.q_norm is None and self.rotated == self.head_dim:
            q, k, v = split_rope(packed, seen.cos, seen.sin, self.queries, self.head_dim)
        else:
            q, k, v = split_heads(packed, self.queries, self.head_dim)
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
            q, k = self._rotate(q, seen), self._rotate(k, seen)
        mixed = self.core(q, k, v, seen.mask, self.sinks, context.counted)
        attended: Tensor = self.out(mixed.flatten(2))
        return attended

    def clip_factors(self, shrink: Tensor) -> dict[str, Tensor]:
        """Factors [rows], by module, that multiply the scores of each head by ``shrink`` [heads].

        Half of it is the keys'. Where heads share a key, that takes the root of the smallest, and
        each head's query what is left of its own.
        """
        by_key = shrink.view(-1, self.queries)
        key = by_key.amin(1, keepdim=True).sqrt()
        rows = torch.cat((by_key / key, key, torch.ones_like(key)), 1)
        return {"qkv": rows.flatten().repeat_interleave(self.head_dim)}

    def _normed(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is None:
            return x
        normed: Tensor = norm(x.flatten(2)).view_as(x) if self.norms_all else norm(x)
        return normed

    def _rotate(self, x: Tensor, seen: ForwardContext | Windowed) -> Tensor:
        """Turn the leading part of each head, which may be all of it or none."""
        if self.rotated == 0:
            return x
        turned, rest = x[..., : self.rotated], x[..., self.rotated :]
        turned = apply_rope(turned, seen.cos, seen.sin)
        return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values from a low-rank latent, one shared rope key."""

    def __init__(self, config: Model, layer: int = 0) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None
        self.content, self.rope = latent.content_head_dim, latent.rope_head_dim
        self.value, self.key_value_rank = latent.value_head_dim, latent.key_value_rank
        query_rows = config.heads * (self.content + self.rope)
        query_in = latent.query_rank or config.dim
        self.q_down = Linear(config.dim, query_in) if latent.query_rank else None
        self.q_norm = make_norm(config, query_in) if latent.query_rank else None
        self.q_up = Linear(query_in, query_rows)
        self.kv_down = Linear(config.dim, self.key_value_rank + self.rope)
        self.kv_norm = make_norm(config, self.key_value_rank)
        kv_rows = config.heads * (self.content + self.value)
        self.kv_up = Linear(self.key_value_rank, kv_rows)
        self.out = Linear(config.heads * self.value, config.dim)
        self.core = make_core(config)
        if self.q_down is not None:
            declare(self.q_down, weight=REPLICATED)
        for linear, held in ((self.q_up, ROWS), (self.kv_down, REPLICATED), (self.kv_up, ROWS)):
            declare(linear, weight=held)
        declare(self.out, weight=RESIDUAL)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        low = self.q_norm(self.q_down(x)) if self.q_down and self.q_norm else x
        q = self.q_up(low).unflatten(-1, (-1, self.content + self.rope))
        q_content, q_rope = q.split((self.content, self.rope), dim=-1)
        latent, k_rope = self.kv_down(x).split((self.key_value_rank, self.rope), dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (-1, self.content + self.value))
        k_content, v = kv.split((self.content, self.value), dim=-1)
        q_rope = apply_rope(q_rope, context.cos, context.sin)
        k_rope = apply_rope(k_rope.unsqueeze(2), context.cos, context.sin)
        k_rope = k_rope.expand(-1, -1, k_content.shape[2], -1)
        q, k = torch.cat((q_content, q_rope), -1), torch.cat((k_content, k_rope), -1)
        mixed = self.core(q, k, v, context.mask, None, context.counted)
        attended: Tensor = self.out(mixed.flatten(2))
        return attended

    def clip_factors(self, shrink: Tensor) -> dict[str, Tensor]:
        """Factors [rows], by module, that multiply the scores of each head by ``shrink`` [heads].

        All heads share the rotated part of the keys: there the queries take the whole of it.
        """
        root, whole, one = (each[:, None] for each in (shrink.sqrt(), shrink, shrink.new_ones(1)))
        heads = len(shrink)
        queries = torch.cat((root.expand(-1, self.content), whole.expand(-1, self.rope)), 1)
        keys = torch.cat((root.expand(-1, self.content), one.expand(heads, self.value)), 1)
        return {"q_up": queries.flatten(), "kv_up": keys.flatten()}
