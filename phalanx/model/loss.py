"""The output head and its loss, without ever holding all logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.model import ops

_CHUNK_BYTES = 2 << 30  # logits that exist at once: few chunks for fast matmuls, little memory
_EVEN_TOKENS = 256  # a chunk has a multiple of, so that its matmuls are whole tiles
_CAPPED_BYTES = 8  # of fp32 beside a logit that is capped: its derivative, and a product


class TokenLoss:
    """A loss of one's own, of each token: derive from it and name the class in ``model.loss``.

    It has all logits; ours, below, never holds all of them.
    """

    def of_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [tokens, vocab], labels [tokens] -> losses [tokens]; labels are >= 0."""
        raise NotImplementedError

    def total(self, logits: Tensor, labels: Tensor, token_weight: Tensor) -> Tensor:
        """Sum over real labels, times the weight of a token. logits: [..., vocab]."""
        flat, real = labels.flatten(), labels.flatten() >= 0
        losses = self.of_tokens(logits.flatten(0, -2).float(), flat.clamp(min=0))
        return (losses * real).sum() * token_weight


class VocabSlice(NamedTuple):
    """Says that the weight holds only the vocabulary from ``first`` on, and how to combine."""

    first: int
    total_max: Callable[[Tensor], Tensor]
    total_sum: Callable[[Tensor], Tensor]


class LinearCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies of ``hidden @ weight.T`` times ``scale``, in chunks of tokens.

    Gradients are made in the forward pass, while a chunk's logits exist, so that neither
    logits nor their gradient are ever stored for the whole batch. Those of the weight add up
    in fp32 over the chunks. Labels below zero weigh nothing. With a ``softcap`` the logits are
    softcap * tanh(logits / softcap). ``z_loss`` times the square of their log-sum-exp is in the
    gradients alone: the value stays a cross-entropy.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [tokens, dim]
        weight: Tensor,  # [vocab, dim]
        labels: Tensor,  # [tokens]
        scale: Tensor,  # []
        vocab: VocabSlice | None,
        softcap: float,
        z_loss: float,
    ) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if wanted else None
        grad_weight: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        width = hidden.element_size() + (_CAPPED_BYTES if softcap else 0)
        tokens = chunk_tokens(weight.shape[0], width)
        for start in range(0, hidden.shape[0], tokens):
            chunk = slice(start, start + tokens)
            x = hidden[chunk]
            logits, steepness = _capped(ops.matmul(x, weight, turn_b=True), softcap)
            loss, slope = _cross_entropy(logits, labels[chunk], scale, vocab, wanted, z_loss)
            total += loss
            if slope is not None and steepness is not None:
                slope.mul_(steepness)
            if grad_hidden is not None and slope is not None:
                grad_hidden[chunk] = ops.matmul(slope, weight)
                if ctx.needs_input_grad[1]:  # it may be frozen
                    grad_weight = _added(grad_weight, ops.matmul(slope, x, turn_a=True))
            del logits, slope, steepness  # before the next chunk's exist
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        ctx.gradients, ctx.applied = (grad_hidden, grad_weight), None
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        # Scaled in place. A schedule that splits backward comes here twice with the same
        # gradient: what was applied before is taken back, so that any number of calls is right.
        factor = grad if ctx.applied is None else grad / ctx.applied
        ctx.applied = grad.clone()
        grad_hidden, grad_weight = (g if g is None else _scaled(g, factor) for g in ctx.gradients)
        return grad_hidden, grad_weight, None, None, None, None, None


def chunk_tokens(vocab: int, width: int) -> int:
    """Tokens whose logits exist at once; ``width``: bytes that a logit takes."""
    tokens = _CHUNK_BYTES // (vocab * width)
    return tokens - tokens % _EVEN_TOKENS if tokens > _EVEN_TOKENS else max(1, tokens)


def _capped(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """The logits that count, and their derivative by those given; None: they are the same."""
    if not softcap:
        return logits, None
    squashed = logits.float().div_(softcap).tanh_()
    return (squashed * softcap).to(logits.dtype), squashed.square_().neg_().add_(1)


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    """The sum over chunks, which is fp32 from the second on: one chunk needs no other copy."""
    return part if total is None else total.float().add_(part)


def _scaled(gradient: Tensor, factor: Tensor) -> Tensor:
    if ops.HAS_KERNELS and gradient.is_cuda:
        return ops.kernels.scale_unless_one(gradient, factor)
    return gradient.mul_(factor)


def _cross_entropy(
    logits: Tensor,
    labels: Tensor,
    scale: Tensor,
    vocab: VocabSlice | None,
    wanted: bool,
    z_loss: float,
) -> tuple[Tensor, Tensor | None]:
    """Scaled loss sum of one chunk and, if wanted, its gradient with respect to the logits."""
    if ops.HAS_KERNELS and logits.is_cuda:
        return _cross_entropy_in_place(logits, labels, scale, vocab, wanted, z_loss)
    values = logits.float()
    real = labels >= 0
    local = labels.clamp(min=0)
    is_local = real
    if vocab is not None:
        local = local - vocab.first
        is_local = real & (local >= 0) & (local < values.shape[1])
        local = local.clamp(0, values.shape[1] - 1)
    peak = values.amax(-1)
    if vocab is not None:
        peak = vocab.total_max(peak)
    exponentials = (values - peak[:, None]).exp_()
    target = values.gather(1, local[:, None]).squeeze(1) * is_local
    sums = torch.stack((exponentials.sum(-1), target))
    if vocab is not None:
        sums = vocab.total_sum(sums)
    normalizer, target = sums.unbind(0)
    loss = ((normalizer.log() + peak - target) * real).sum() * scale
    if not wanted:
        return loss, None
    factor = pull = real * scale
    if z_loss:
        pull = factor * (1 + 2 * z_loss * (normalizer.log() + peak))
    slope = exponentials.mul_((pull / normalizer)[:, None])
    slope.scatter_add_(1, local[:, None], -(is_local * factor)[:, None])
    return loss, slope.to(logits.dtype)


def _cross_entropy_in_place(
    logits: Tensor,
    labels: Tensor,
    scale: Tensor,
    vocab: VocabSlice | None,
    wanted: bool,
    z_loss: float,
) -> tuple[Tensor, Tensor | None]:
    """The same by kernels; the gradient takes the logits' place."""
    statistics = torch.empty((3, logits.shape[0]), dtype=torch.float32, device=logits.device)
    run = functools.partial(ops.kernels.cross_entropy_rows, z_loss=z_loss)
    if vocab is None:
        run(logits, labels, scale, statistics, 0, measure=True, gradient=wanted)
    else:
        run(logits, labels, scale, statistics, vocab.first, measure=True, gradient=False)
        peak = vocab.total_max(statistics[0].clone())
        statistics[1] *= (statistics[0] - peak).exp()
        statistics[0] = peak
        statistics[1:] = vocab.total_sum(statistics[1:])
        if wanted:
            run(logits, labels, scale, statistics, vocab.first, measure=False, gradient=True)
    peak, normalizer, target = statistics.unbind(0)
    loss = ((normalizer.log() + peak - target) * (labels >= 0)).sum() * scale
    return loss, logits if wanted else None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: Tensor,
    vocab: VocabSlice | None = None,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Loss sum over real labels, times scale. hidden: [..., dim], labels: [...]."""
    flat: Tensor = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2), weight, labels.flatten(), scale, vocab, softcap, z_loss
    )
    return flat


@torch.no_grad()
def row_scores(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab: VocabSlice | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Of each row [rows, 2]: the log-probability of its labels together, and how many of them are
    not the likeliest token. hidden: [rows, seq, dim], labels: [rows, seq], below zero: none.
    """
    real = labels >= 0
    rows, wanted, vectors = real.nonzero()[:, 0], labels[real], hidden[real]
    scores = torch.zeros((len(labels), 2), dtype=torch.float64, device=hidden.device)
    step = max(1, _CHUNK_BYTES // (weight.shape[0] * (4 + hidden.element_size())))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        logits = _capped(vectors[part] @ weight.t(), softcap)[0].float()
        scores.index_add_(0, rows[part], _token_scores(logits, wanted[part], vocab).double())
    return scores


def _token_scores(logits: Tensor, labels: Tensor, vocab: VocabSlice | None) -> Tensor:
    """The log-probability of each label, and one where another token is likelier: [tokens, 2]."""
    first = 0 if vocab is None else vocab.first
    peak, best = logits.max(-1)
    local = labels - first
    here = (local >= 0) & (local < logits.shape[1])
    target = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1) * here
    if vocab is not None:
        highest = vocab.total_max(peak.clone())
        # Of equal logits the first token counts, wherever its row is.
        number = torch.where(peak == highest, best + first, torch.iinfo(torch.int64).max)
        best, peak = -vocab.total_max(-number), highest
    else:
        best = best + first
    sums = torch.stack(((logits - peak[:, None]).exp().sum(-1), target))
    if vocab is not None:
        sums = vocab.total_sum(sums)
    return torch.stack((sums[1] - peak - sums[0].log(), (best != labels).float()), -1)
