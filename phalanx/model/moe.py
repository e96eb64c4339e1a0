"""Mixture of experts: routing, balancing and grouped expert matmuls, without capacity limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config import Moe, has_balance_loss, has_expert_bias
from phalanx.model.declare import BIAS, Declaration, declare
from phalanx.model.layers import SWIGLU_FORMS, ForwardContext, Linear
from phalanx.model.ops import clamped_swiglu


class AttachLoss(torch.autograd.Function):
    """Identity on ``x`` whose backward also sends gradient one into ``loss``.

    An auxiliary loss reaches its parameters this way from any pipeline stage, without being
    carried to the last one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)


class Router(nn.Module):
    """Chooses ``top_k`` experts a token and keeps them balanced."""

    def __init__(self, dim: int, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.experts, dim))
        self.bias = nn.Parameter(torch.empty(moe.experts)) if moe.biases else None
        declare(self, weight=Declaration(orthogonal=False, width="output"))
        if moe.biases:
            declare(self, bias=BIAS)
        self.register_buffer("expert_bias", torch.zeros(moe.experts, dtype=torch.float32))
        # Tokens each expert received in the step so far; read and cleared by `end_step`.
        self.register_buffer(
            "load", torch.zeros(moe.experts, dtype=torch.float32), persistent=False
        )
        self.expert_bias: Tensor
        self.load: Tensor
        # What each expert had of the last global batch, where the balance loss is over batches.
        over_batch = has_balance_loss(moe) and moe.auxiliary_over == "batch"
        even = torch.full((moe.experts,), 1 / moe.experts) if over_batch else None
        self.register_buffer("load_share", even, persistent=False)
        self.load_share: Tensor | None

    @property
    def counts_load(self) -> bool:
        """Whether the loads of a step decide about the next one."""
        return has_expert_bias(self.moe) or self.load_share is not None

    def reset(self, device: torch.device) -> None:
        """What is no weight, as it is before the first step."""
        self.expert_bias = torch.zeros_like(self.expert_bias, device=device)
        self.load = torch.zeros_like(self.load, device=device)
        if self.load_share is not None:
            even = 1 / self.moe.experts
            self.load_share = torch.full_like(self.load_share, even, device=device)

    def forward(self, x: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """x: [batch, seq, dim] -> x with balance loss attached, weights and experts [b, s, k]."""
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(x.float(), self.weight.float(), bias)
        scores = logits.softmax(-1) if self.moe.score == "softmax" else logits.sigmoid()
        biased = scores + self.expert_bias if has_expert_bias(self.moe) else scores
        if self.moe.groups > 1:
            biased = self._in_best_groups(biased)
        experts = biased.topk(self.moe.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.moe.normalize_top_k:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        x = self._balance(x, scores, experts, context)
        if self.moe.z_loss_coefficient and self.training:
            x = self._keep_logits_small(x, logits, context)
        return x, weights * self.moe.route_scale, experts

    def _in_best_groups(self, scores: Tensor) -> Tensor:
        """Scores in the groups whose two best experts score highest together, elsewhere none."""
        grouped = scores.unflatten(-1, (self.moe.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.moe.top_groups, dim=-1).indices
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        within: Tensor = grouped.masked_fill(closed.unsqueeze(-1), -torch.inf)
        return within.flatten(-2)

    def _keep_logits_small(self, x: Tensor, logits: Tensor, context: ForwardContext) -> Tensor:
        """Attach the z-loss: each token's, so that it adds up over any split of the tokens."""
        each = logits.logsumexp(-1).square()
        if context.real is not None:
            each = each * context.real
        loss = each.sum() * self.moe.z_loss_coefficient * context.token_weight
        return AttachLoss.apply(x, loss)  # type: ignore[no-any-return, no-untyped-call]

    def _balance(
        self, x: Tensor, scores: Tensor, experts: Tensor, context: ForwardContext
    ) -> Tensor:
        """Count loads; attach the auxiliary loss where it is part of the balancing method."""
        if not self.training or self.moe.balance == "none":
            return x
        chosen = torch.zeros_like(scores).scatter_(-1, experts, 1.0)
        if context.real is not None:
            chosen = chosen * context.real.unsqueeze(-1)
            scores = scores * context.real.unsqueeze(-1)
        if self.counts_load:
            with torch.no_grad():
                # Recompute counts all of it twice, which changes neither sign nor share.
                self.load += chosen.sum((0, 1))
        if not has_balance_loss(self.moe):
            return x
        if self.load_share is not None:
            return self._balance_batch(x, scores, self.load_share, context)
        tokens = chosen.new_full((x.shape[0], 1), x.shape[1])
        if context.real is not None:
            tokens = context.real.sum(1, keepdim=True).to(chosen.dtype)
        share = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        sums = torch.cat((chosen.sum(1), share.sum(1), tokens), dim=-1)  # [batch, 2 E + 1]
        routed, probability, tokens = self.over_sequence(sums).split(
            (self.moe.experts, self.moe.experts, 1), dim=-1
        )
        # Per sequence: E * sum(fraction routed * mean probability), weighted by its real tokens.
        balance = (routed * probability).sum(-1) / tokens.squeeze(-1).clamp(min=1)
        scale = self.moe.auxiliary_coefficient * self.moe.experts / self.moe.top_k
        loss = balance.sum() * scale * context.token_weight
        return AttachLoss.apply(x, loss)  # type: ignore[no-any-return, no-untyped-call]

    def _balance_batch(
        self, x: Tensor, scores: Tensor, load_share: Tensor, context: ForwardContext
    ) -> Tensor:
        """E * sum(fraction routed * probability) of each token, with the fractions of the last
        global batch: it adds up over any split of the tokens, and no rank waits for another.
        """
        share = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        scale = self.moe.auxiliary_coefficient * self.moe.experts
        loss = (share.sum((0, 1)) * load_share).sum() * scale * context.token_weight
        return AttachLoss.apply(x, loss)  # type: ignore[no-any-return, no-untyped-call]

    def over_sequence(self, sums: Tensor) -> Tensor:
        """Totals over the whole sequence from totals over the part that is here."""
        return sums

    @torch.no_grad()
    def end_step(self) -> None:
        """Nudge the bias of over- and underloaded experts, and remember what each had.

        Loads of zero, as of a skipped step, change neither.
        """
        if has_expert_bias(self.moe):
            self.expert_bias += self.moe.bias_rate * torch.sign(self.load.mean() - self.load)
        if self.load_share is not None:
            total = self.load.sum()
            share = self.load / total.clamp(min=1)
            self.load_share.copy_(torch.where(total > 0, share, self.load_share))
        self.load.zero_()


class Experts(nn.Module):
    """All experts as two stacked matrices, applied to tokens sorted by expert."""

    def __init__(self, dim: int, moe: Moe, mlp: str = "swiglu") -> None:
        super().__init__()
        self.clamped = mlp == "swiglu-clamped"
        self.gate_up = nn.Parameter(torch.empty(moe.experts, 2 * moe.ffn, dim))
        self.down = nn.Parameter(torch.empty(moe.experts, dim, moe.ffn))
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if moe.biases:
            self.gate_up_bias = nn.Parameter(torch.empty(moe.experts, 2 * moe.ffn))
            self.down_bias = nn.Parameter(torch.empty(moe.experts, dim))
            bias = replace(BIAS, expert=True)
            declare(self, gate_up_bias=bias, down_bias=bias)
        stacked = Declaration(expert=True, decay=True, orthogonal=True)
        declare(self, gate_up=replace(stacked, fused=(moe.ffn, moe.ffn)))
        declare(self, down=replace(stacked, residual=True))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """x: [tokens, dim] sorted by expert; counts: [experts] tokens of each."""
        pairs = grouped_linear(x, self.gate_up, counts, self.gate_up_bias)
        gate, up = pairs.chunk(2, dim=-1)
        hidden = clamped_swiglu(gate, up) if self.clamped else F.silu(gate) * up
        return grouped_linear(hidden, self.down, counts, self.down_bias)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Rows of x times their expert's matrix, plus its bias; on CUDA by one kernel."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        ends = counts.cumsum(0)
        out = F.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32))
        if bias is None:
            return out
        # A lookup, whose backward adds up the rows of an expert without a race.
        rows = torch.arange(x.shape[0], device=x.device)
        return out + F.embedding(torch.searchsorted(ends, rows, right=True), bias)
    parts = x.split(counts.tolist())
    biases = [None] * len(parts) if bias is None else bias.unbind(0)
    return torch.cat([F.linear(part, weight[i], biases[i]) for i, part in enumerate(parts)])


class MoeLayer(nn.Module):
    """Routed experts plus optional shared ones."""

    def __init__(self, dim: int, moe: Moe, mlp: str = "swiglu") -> None:
        super().__init__()
        self.router = Router(dim, moe)
        self.experts = Experts(dim, moe, mlp)
        shared = moe.shared_ffn or moe.shared_experts * moe.ffn
        self.shared = SWIGLU_FORMS[mlp](dim, shared) if shared else None
        self.shared_gate = Linear(dim, 1) if moe.shared_gate else None
        if self.shared_gate is not None:
            declare(self.shared_gate, weight=Declaration(orthogonal=False, width="output"))
        if self.shared is not None:  # whole on every rank: it sees a slice of the sequence
            pair = (self.shared.group_width, self.shared.group_width)
            declare(self.shared.gate_up, weight=Declaration(fused=pair))
            declare(self.shared.down, weight=Declaration(residual=True))

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        x, weights, experts = self.router(x, context)
        tokens, top_k = x.flatten(0, 1), experts.shape[-1]
        by_expert, order = experts.flatten().sort(stable=True)
        routed = self.experts(tokens[order // top_k], self._counts(by_expert))
        restored = torch.empty_like(routed).index_copy(0, order, routed)
        combined = (restored.unflatten(0, (-1, top_k)) * weights.flatten(0, 1).unsqueeze(-1)).sum(1)
        out: Tensor = combined.to(x.dtype).view_as(x)
        return out if self.shared is None else out + self._from_shared(x)

    def _from_shared(self, x: Tensor) -> Tensor:
        assert self.shared is not None
        added: Tensor = self.shared(x)
        return added if self.shared_gate is None else added * self.shared_gate(x).sigmoid()

    def _counts(self, by_expert: Tensor) -> Tensor:
        """How often each expert occurs in a sorted list; bincount would make the host wait."""
        numbers = torch.arange(self.router.moe.experts, device=by_expert.device)
        ends = torch.searchsorted(by_expert, numbers, right=True)
        return ends.diff(prepend=ends.new_zeros(1))
