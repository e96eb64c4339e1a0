"""A transformer by the textbook, in fp64 and without any of the trainer's code.

It is a function of a dict of weights under the trainer's names. How fused matrices are laid out is
read here anew, so that a mistake in one reading shows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.config import Adapter, Model
from tests.parallel.random_jobs.plain_dropout import kept_share
from tests.parallel.random_jobs.plain_parts import (
    frequencies,
    gate_groups,
    is_each,
    kept_widths,
    rows_of,
)

Weights = dict[str, Tensor]
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "gelu-exact": F.gelu,
    "relu2": lambda x: F.relu(x) ** 2,
}


class Sample(NamedTuple):
    """Rows of one step, or of a part of it."""

    tokens: Tensor  # [batch, seq]
    labels: Tensor  # [batch, seq], below zero: none
    documents: Tensor  # [batch, seq]
    numbers: Tensor  # [batch] of samples in the run


class Extras(NamedTuple):
    """What a forward pass leaves beside its logits."""

    losses: list[Tensor]  # sums over tokens, not divided by their number
    loads: dict[str, Tensor]  # tokens that each expert had, by router
    peaks: dict[str, Tensor]  # largest score of each head, by layer


class PlainModel:
    """The model of a job in one of its stages. ``frozen_adapters`` computes without them."""

    def __init__(self, model: Model, adapter: Adapter, weights: Weights) -> None:
        self.model, self.adapter, self.weights = model, adapter, weights
        self.biases: Weights = {}  # of routers, by prefix
        self.shares: Weights = {}  # of the last batch, by router
        self.adapted = True
        self.drops: int | None = None  # by which seed; None: nothing is dropped
        self.margins: list[float] = []  # by which experts were chosen

    def loss(self, sample: Sample) -> tuple[Tensor, Tensor, Extras]:
        """Sum of the cross-entropies, what else is minimised with it, and the rest."""
        extras = Extras([], {}, {})
        states = self.states(sample, sample.labels >= 0, extras)
        value, more = self.cross_entropy(states, sample.labels)
        extras.losses.append(more)
        if (mtp := self.model.mtp) is not None:
            for depth in range(1, mtp.layers + 1):
                states, labels = self._ahead(states, sample, depth, extras)
                each, more = self.cross_entropy(states, labels)
                extras.losses.append((each + more) * mtp.weight / mtp.layers)
        return value, torch.stack(extras.losses).sum(), extras

    def logits(self, states: Tensor) -> Tensor:
        logits = states @ self.head.T
        cap = self.model.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    @property
    def head(self) -> Tensor:
        return self.weights["embed.weight" if self.model.tied_embedding else "head.weight"]

    def cross_entropy(self, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Its sum, and that of the loss on large logits."""
        logits, real = self.logits(states), labels >= 0
        peak = logits.logsumexp(-1)
        chosen = logits.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        z_loss = self.model.z_loss_coefficient * (peak.square() * real).sum()
        return ((peak - chosen) * real).sum(), z_loss

    def states(self, sample: Sample, real: Tensor, extras: Extras) -> Tensor:
        """What the head gets."""
        x = self._dropped(self._vectors(sample.tokens), "dropout", sample)
        for number in range(self.model.layers):
            x = self._layer(number, x, sample, real, extras)
        return self._norm(x, "norm")

    def _dropped(self, x: Tensor, place: str, sample: Sample) -> Tensor:
        if self.drops is None or not self.model.dropout:
            return x
        return x * kept_share(x, self.model.dropout, self.drops, place, sample.numbers)

    def _vectors(self, tokens: Tensor) -> Tensor:
        return self.weights["embed.weight"][tokens] * self.model.embedding_scale

    def _ahead(
        self, states: Tensor, sample: Sample, depth: int, extras: Extras
    ) -> tuple[Tensor, Tensor]:
        number, length = self.model.layers + depth - 1, sample.tokens.shape[1]
        place = torch.arange(length)
        later = (place + depth).clamp(max=length - 1)
        labels = sample.labels[:, later]
        apart = sample.documents[:, later] != sample.documents
        labels = labels.masked_fill(apart | (place + depth >= length), -100)
        path = f"layers.{number}."
        following = self._vectors(sample.tokens[:, later])
        both = torch.cat(
            (self._norm(following, path + "token_norm"), self._norm(states, path + "state_norm")),
            -1,
        )
        x = both @ self.weights[path + "merge.weight"].T
        x = self._layer(number, x, sample, labels >= 0, extras)
        return self._norm(x, path + "out_norm"), labels

    def _norm(self, x: Tensor, path: str) -> Tensor:
        weight = self.weights[path + ".weight"] + float(self.model.norm_offset)
        return x * (x.square().mean(-1, keepdim=True) + self.model.norm_eps).rsqrt() * weight

    def _layer(
        self, number: int, x: Tensor, sample: Sample, real: Tensor, extras: Extras
    ) -> Tensor:
        path, form, scale = f"layers.{number}.", self.model.norm, self.model.residual_scale

        def branch(x: Tensor, name: str) -> Tensor:
            normed = x if form == "post" else self._norm(x, f"{path}{name}_norm")
            if name == "attention":
                out = self._attention(number, normed, sample.documents, real, extras)
            else:
                out = self._feed_forward(number, normed, real, extras)
            if form == "post":
                out = self._norm(out, f"{path}{name}_norm")
            if form == "sandwich":
                out = self._norm(out, f"{path}{name}_out_norm")
            return x + self._dropped(out * scale, f"{path}{name}_dropout", sample)

        return branch(branch(x, "attention"), "mlp")

    # Attention

    def _linear(self, x: Tensor, path: str) -> Tensor:
        out = x @ self.weights[path + ".weight"].T
        bias = self.weights.get(path + ".bias")
        return out if bias is None else out + bias

    def _attention(
        self, number: int, x: Tensor, documents: Tensor, real: Tensor, extras: Extras
    ) -> Tensor:
        model, path = self.model, f"layers.{number}.attention"
        windowed = model.window is not None and not is_each(number, model.window.full_every)
        q, k, v = (self._latent if model.latent else self._grouped)(number, x, windowed)
        scale = model.attention_scale or q.shape[-1] ** -0.5
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
        if cap := model.attention_softcap:
            scores = torch.tanh(scores / cap) * cap
        place = torch.arange(x.shape[1])
        back = place[:, None] - place[None]
        seen = (back >= 0) & (documents[:, :, None] == documents[:, None, :])
        if windowed and model.window is not None:
            seen &= back < model.window.size
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        if model.qk_clip and self.adapted:
            counted = real.any(1)
            peaks = scores.detach().amax((2, 3)).masked_fill(~counted[:, None], 0).amax(0)
            extras.peaks[path] = peaks.clamp(min=0)
        if model.attention_sinks:
            sink = self.weights[path + ".sinks"][None, :, None, None]
            scores = torch.cat((scores, sink.expand(*scores.shape[:3], 1)), -1)
        shares = scores.softmax(-1)[..., : x.shape[1]]
        mixed = torch.einsum("bhqk,bkhd->bqhd", shares, v).flatten(2)
        return self._adapted_linear(mixed, path + ".out", ("o_proj",), None)

    def _grouped(self, number: int, x: Tensor, windowed: bool) -> tuple[Tensor, Tensor, Tensor]:
        model, path = self.model, f"layers.{number}.attention"
        each, width, kv = model.heads // model.kv_heads, model.head_dim, model.kv_heads
        widths = (each * width, width, width)
        packed = self._adapted_linear(x, path + ".qkv", ("q_proj", "k_proj", "v_proj"), widths)
        parts = packed.view(*x.shape[:2], kv, each + 2, width)
        q, k, v = parts[..., :each, :].flatten(2, 3), parts[..., each, :], parts[..., each + 1, :]
        if model.qk_norm:
            q, k = (
                self._norm(t.flatten(2) if model.qk_norm_over == "all" else t, f"{path}.{n}_norm")
                for t, n in ((q, "q"), (k, "k"))
            )
            q, k = (t.reshape(*x.shape[:2], -1, width) for t in (q, k))
        rotated = 0 if is_each(number, model.nope_every) else int(width * model.rotary_fraction)
        q, k = (self._turn(t, rotated, windowed) for t in (q, k))
        return q, k.repeat_interleave(each, 2), v.repeat_interleave(each, 2)

    def _latent(self, number: int, x: Tensor, _: bool) -> tuple[Tensor, Tensor, Tensor]:
        model, latent, path = self.model, self.model.latent, f"layers.{number}.attention."
        assert latent is not None
        content, rope, heads = latent.content_head_dim, latent.rope_head_dim, model.heads
        low = x
        if latent.query_rank:
            low = self._norm(self._linear(x, path + "q_down"), path + "q_norm")
        q = self._linear(low, path + "q_up").unflatten(-1, (heads, content + rope))
        down = self._linear(x, path + "kv_down")
        rank = latent.key_value_rank
        up = self._linear(self._norm(down[..., :rank], path + "kv_norm"), path + "kv_up")
        up = up.unflatten(-1, (heads, -1))
        shared = self._turn(down[..., None, rank:], rope, False).expand(-1, -1, heads, -1)
        q = torch.cat((q[..., :content], self._turn(q[..., content:], rope, False)), -1)
        return q, torch.cat((up[..., :content], shared), -1), up[..., content:]

    def _turn(self, x: Tensor, rotated: int, windowed: bool) -> Tensor:
        """Rotate the leading dimensions of heads [batch, seq, heads, width] by position."""
        if not rotated:
            return x
        frequency, factor = frequencies(self.model, rotated, windowed)
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequency
        cos, sin = angle.cos()[:, None] * factor, angle.sin()[:, None] * factor
        a, b = x[..., : rotated // 2], x[..., rotated // 2 : rotated]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rotated:]), -1)

    # Feed-forward

    def _feed_forward(self, number: int, x: Tensor, real: Tensor, extras: Extras) -> Tensor:
        model, path = self.model, f"layers.{number}."
        if model.moe is not None and number >= model.moe.first_dense_layers:
            return self._experts(path + "moe.", x, real, extras)
        if model.mlp in PLAIN:
            up = self._adapted_linear(x, path + "mlp.up", ("up_proj",), None)
            hidden = PLAIN[model.mlp](up)
        else:
            hidden = self._gated(x, path + "mlp.", model.ffn)
        return self._adapted_linear(hidden, path + "mlp.down", ("down_proj",), None)

    def _gated(self, x: Tensor, path: str, ffn: int) -> Tensor:
        """Gates and ups lie in alternating groups: as many as divide the width, up to 64."""
        groups = gate_groups(ffn)
        width = ffn // groups
        names = ("gate_proj", "up_proj")
        pairs = self._adapted_linear(x, path + "gate_up", names, (width, width))
        pairs = pairs.unflatten(-1, (groups, 2, width))
        return self._gate(pairs[..., 0, :].flatten(-2), pairs[..., 1, :].flatten(-2))

    def _gate(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.model.mlp == "swiglu-clamped":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        kinds = {"geglu": "tanh", "geglu-exact": "none"}
        if self.model.mlp in kinds:
            return F.gelu(gate, approximate=kinds[self.model.mlp]) * up
        return F.silu(gate) * up

    def _experts(self, path: str, x: Tensor, real: Tensor, extras: Extras) -> Tensor:
        moe, weights = self.model.moe, self.weights
        assert moe is not None
        chosen, shares = self._route(path, x, real, extras)
        out = torch.zeros_like(x)
        for expert in range(moe.experts):
            picked = (chosen == expert).any(-1)
            if not picked.any():
                continue
            pair = x[picked] @ weights[path + "experts.gate_up"][expert].T
            if moe.biases:
                pair = pair + weights[path + "experts.gate_up_bias"][expert]
            hidden = self._gate(pair[..., : moe.ffn], pair[..., moe.ffn :])
            result = hidden @ weights[path + "experts.down"][expert].T
            if moe.biases:
                result = result + weights[path + "experts.down_bias"][expert]
            weight = (shares * (chosen == expert)).sum(-1)[picked]
            out = out.index_put((picked,), result * weight[:, None], accumulate=True)
        if moe.shared_experts:
            shared = self._gated(x, path + "shared.", moe.shared_ffn)
            added = shared @ weights[path + "shared.down.weight"].T
            if moe.shared_gate:
                added = added * torch.sigmoid(x @ weights[path + "shared_gate.weight"].T)
            out = out + added
        return out

    def _route(self, path: str, x: Tensor, real: Tensor, extras: Extras) -> tuple[Tensor, Tensor]:
        """The experts of each token, and what each weighs."""
        moe, path = self.model.moe, path + "router"
        assert moe is not None
        logits = self._linear(x, path)
        scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
        choice = scores.detach()
        if moe.balance in ("bias", "bias-auxiliary") and path in self.biases:
            choice = choice + self.biases[path]
        if moe.groups > 1:
            grouped = choice.unflatten(-1, (moe.groups, -1))
            best = grouped.sort(-1, descending=True).values[..., :2].sum(-1)
            ranked = best.sort(-1, descending=True).values
            margins = ranked[..., moe.top_groups - 1] - ranked[..., moe.top_groups]
            self.margins.append(margins.min().item())
            kept = best >= ranked[..., moe.top_groups - 1, None]
            choice = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
        ranked = choice.sort(-1, descending=True).values
        if moe.top_k < moe.experts:
            margins = ranked[..., moe.top_k - 1] - ranked[..., moe.top_k]
            self.margins.append(margins.min().item())
        chosen = choice.topk(moe.top_k, -1).indices
        shares = scores.gather(-1, chosen)
        if moe.normalize_top_k:
            shares = shares / shares.sum(-1, keepdim=True)
        counts = F.one_hot(chosen, moe.experts).sum(-2).double() * real[..., None]
        extras.loads[path] = extras.loads.get(path, 0) + counts.sum((0, 1))
        extras.losses.append(moe.z_loss_coefficient * (logits.logsumexp(-1) ** 2 * real).sum())
        if moe.balance in ("auxiliary", "bias-auxiliary"):
            extras.losses.append(self._balance(path, scores, counts, real))
        return chosen, shares * moe.route_scale

    def _balance(self, path: str, scores: Tensor, counts: Tensor, real: Tensor) -> Tensor:
        moe = self.model.moe
        assert moe is not None
        probability = scores / scores.sum(-1, keepdim=True) * real[..., None]
        if moe.auxiliary_over == "batch":
            share = self.shares.get(path, torch.full((moe.experts,), 1 / moe.experts))
            loss = (probability * share).sum()
        else:
            tokens = real.sum(1).clamp(min=1)[:, None]
            routed = counts.sum(1) / (moe.top_k * tokens)
            loss = (routed * probability.sum(1)).sum()
        return loss * moe.experts * moe.auxiliary_coefficient

    # Adapters

    def _adapted_linear(
        self, x: Tensor, path: str, names: tuple[str, ...], widths: tuple[int, ...] | None
    ) -> Tensor:
        """A linear layer with its adapters merged; ``widths``: rows, in turn, of its matrices."""
        weight, given = self.weights[path + ".weight"], self.adapter
        key = path + ".adapter.a"
        if key in self.weights and self.adapted:
            adapted = [name for name in names if name in given.targets]
            a, b = self.weights[key], self.weights[path + ".adapter.b"]
            rows = rows_of(names, adapted, widths, len(weight))
            added = torch.zeros_like(weight)
            of_b = rows_of(tuple(adapted), adapted, kept_widths(names, adapted, widths), len(b))
            for turn, name in enumerate(adapted):
                low = a[turn * given.rank : (turn + 1) * given.rank]
                added = added.index_add(0, rows[name], b[of_b[name]] @ low)
            whole = weight + added * (given.alpha / given.rank)
            if (growth := self.weights.get(path + ".adapter.growth")) is not None:
                length = weight.norm(dim=1) * (1 + growth)
                whole = whole * (length / whole.norm(dim=1).detach())[:, None]
            weight = whole
        out = x @ weight.T
        bias = self.weights.get(path + ".bias")
        return out if bias is None else out + bias
