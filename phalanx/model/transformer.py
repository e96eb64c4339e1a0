"""The transformer: embedding, blocks, head. A slice of layers is a model too."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config import Model
from phalanx.model.attention import GroupedQueryAttention, LatentAttention, document_mask
from phalanx.model.layers import ForwardContext, RMSNorm, dense_mlp, rope_tables
from phalanx.model.loss import linear_cross_entropy
from phalanx.model.moe import MoeLayer


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: Model, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        attention = LatentAttention if config.latent else GroupedQueryAttention
        self.attention = attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        sparse = config.moe is not None and index >= config.moe.first_dense_layers
        self.moe = MoeLayer(config.dim, config.moe) if sparse and config.moe else None
        self.mlp = None if sparse else dense_mlp(config)

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        x, normed = self.attention_norm.join(x)
        x, normed = self.mlp_norm.join(x, self.attention(normed, context))
        if self.moe is not None:
            mixed: Tensor = self.moe(normed, context)
        else:
            assert self.mlp is not None
            mixed = self.mlp(normed)
        return x + mixed


class Embedding(nn.Module):
    """Token vectors."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    """Projects to the vocabulary: logits, or the loss when labels are given."""

    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))

    def forward(self, x: Tensor, labels: Tensor | None, token_weight: Tensor) -> Tensor:
        if labels is None:
            return F.linear(x, self.weight)
        # Not a view: FSDP hooks onto what a module returns.
        return torch.stack((linear_cross_entropy(x, self.weight, labels, token_weight),))


class Transformer(nn.Module):
    """Layers ``layers`` of the model, with embedding and head where asked for.

    A part without the embedding takes hidden states [batch, seq, dim] instead of tokens, and
    one without the head returns them.
    """

    def __init__(
        self,
        config: Model,
        layers: Sequence[int] | None = None,
        *,
        embed: bool = True,
        head: bool = True,
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.dim) if embed else None
        indices = range(config.layers) if layers is None else layers
        self.layers = nn.ModuleDict({str(i): Block(config, i) for i in indices})
        self.norm = RMSNorm(config.dim, config.norm_eps) if head else None
        self.head = Head(config.dim, config.vocab) if head else None
        if config.tied_embedding and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.weight
        self.token_weight: Tensor
        self.cos: Tensor
        self.sin: Tensor
        for name in ("token_weight", "cos", "sin"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    def prepare(self, positions: Tensor) -> None:
        """Fill what is not a weight: rotary tables for these positions, and the token weight."""
        self.cos, self.sin = rope_tables(self.config, positions)
        self.token_weight = torch.ones((), device=positions.device)

    def forward(
        self, x: Tensor, labels: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """tokens [batch, seq] -> logits [batch, seq, vocab], or with labels the loss [1].

        The loss is the sum over labels >= 0 of cross-entropy times ``token_weight``.
        """
        context = ForwardContext(
            cos=self.cos,
            sin=self.sin,
            mask=None if documents is None else document_mask(documents),
            real=None if labels is None else labels >= 0,
            token_weight=self.token_weight,
        )
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x, context)
        if self.norm is None or self.head is None:
            return x
        out: Tensor = self.head(self.norm(x), labels, self.token_weight)
        return out
