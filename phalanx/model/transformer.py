"""The transformer: embedding, blocks, head. A slice of layers is a model too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config import ConfigError, Model, reforms_scores
from phalanx.config.own_code import load_class
from phalanx.model.attention import document_mask, window_mask
from phalanx.model.block import OWN, drop, make_block, make_dropout
from phalanx.model.declare import ROWS, declare
from phalanx.model.layer import Layer
from phalanx.model.layers import ForwardContext, Windowed, make_norm, token_keys
from phalanx.model.loss import TokenLoss, linear_cross_entropy, row_scores
from phalanx.model.moe import AttachLoss
from phalanx.model.mtp import PredictionLayer, look_ahead
from phalanx.model.ops import soft_cap
from phalanx.model.rope import rope_tables


class Embedding(nn.Module):
    """Token vectors."""

    def __init__(self, vocab: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        declare(self, weight=replace(ROWS, width="fixed"))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class Head(nn.Module):
    """Projects to the vocabulary: logits, or the loss when labels are given."""

    def __init__(
        self,
        dim: int,
        vocab: int,
        softcap: float = 0.0,
        own_loss: TokenLoss | None = None,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.own_loss = own_loss
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        declare(self, weight=replace(ROWS, width="output"))
        self.softcap = softcap  # of the logits; 0: none
        self.z_loss = z_loss  # weight of the loss on large logits
        self.scores_rows = False  # of labels: how likely those of each row are, not a loss

    def forward(self, x: Tensor, labels: Tensor | None, token_weight: Tensor) -> Tensor:
        if labels is None:
            return self.logits(x)
        if self.scores_rows:
            return row_scores(x, self.weight, labels, softcap=self.softcap)
        if self.own_loss is not None:
            return torch.stack((self.own_loss.total(self.logits(x), labels, token_weight),))
        loss = linear_cross_entropy(
            x, self.weight, labels, token_weight, None, self.softcap, self.z_loss
        )
        # Not a view: FSDP hooks onto what a module returns.
        return torch.stack((loss,))

    def logits(self, x: Tensor) -> Tensor:
        """Of the vocabulary rows that are here."""
        logits = F.linear(x, self.weight)
        return soft_cap(logits, self.softcap) if self.softcap else logits


def make_head(config: Model) -> Head:
    """The head, with the loss that a job names."""
    own = load_class("model.loss", config.loss, TokenLoss)() if config.loss else None
    z_loss = config.z_loss_coefficient
    return Head(config.dim, config.vocab, config.logit_softcap, own, z_loss)


class Transformer(nn.Module):
    """Layers ``layers`` of the model, with embedding and head where asked for.

    A part without the embedding takes hidden states [batch, seq, dim] instead of tokens, and
    one without the head returns them. The one with the head has the layers that predict tokens
    further on, and a copy of the embedding for them where another part has the embedding itself.
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
        self.dropout = make_dropout(config) if embed else None  # of token vectors
        indices = [*(range(config.layers) if layers is None else layers)]
        copies = False
        if config.mtp is not None and head:
            indices += range(config.layers, config.layers + config.mtp.layers)
            copies = not embed
        self.embed_copy = Embedding(config.vocab, config.dim) if copies else None
        self.layers = nn.ModuleDict({str(i): make_block(config, i) for i in indices})
        self.norm = make_norm(config, config.dim) if head else None
        self.head = make_head(config) if head else None
        self.tie()
        self.token_weight: Tensor
        self.cos: Tensor
        self.sin: Tensor
        self.window_cos: Tensor
        self.window_sin: Tensor
        self.positions: Tensor
        buffers = ("token_weight", "cos", "sin", "window_cos", "window_sin", "positions")
        for name in buffers:
            self.register_buffer(name, torch.empty(0), persistent=False)
        self.sequence_parts = 1  # of which positions are one, where attention sees them all
        self.stream_part = (0, 1)  # number and count of the slices of what blocks hand on

    def prepare(self, positions: Tensor) -> None:
        """Fill what is not a weight: rotary tables for these positions, and the token weight."""
        self.cos, self.sin = rope_tables(self.config, positions)
        if self.config.window is not None:
            self.window_cos, self.window_sin = rope_tables(self.config, positions, windowed=True)
        self.positions = positions
        self.token_weight = torch.ones((), device=positions.device)

    @property
    def token_table(self) -> Embedding | None:
        """The embedding, or its copy."""
        return self.embed if self.embed is not None else self.embed_copy

    def tie(self) -> None:
        """Have head and embedding be one weight, where they are and both are here."""
        table = self.token_table
        if self.config.tied_embedding and self.head is not None and table is not None:
            self.head._parameters["weight"] = table._parameters["weight"]

    def embedding_copies(self) -> set[str]:
        """Names of parameters that are copies of the embedding, which another part has."""
        if self.embed is not None or self.head is None:
            return set()
        names = {"head.weight"} if self.config.tied_embedding else set()
        return names | {"embed_copy.weight"} if self.embed_copy is not None else names

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
        tokens: Tensor | None = None,
        samples: Tensor | None = None,
    ) -> Tensor:
        """tokens [batch, seq] -> logits [batch, seq, vocab], or with labels the loss [1].

        The loss is the sum over labels >= 0 of cross-entropy times ``token_weight``. ``tokens`` are
        for a part that gets hidden states, and predicts further on. ``samples`` [batch], their
        numbers in the run, are for dropout.
        """
        context = self._context(labels, documents, samples)
        return self.run(x, labels, context, documents, tokens)

    def run(
        self,
        x: Tensor,
        labels: Tensor | None,
        context: ForwardContext,
        documents: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """The same with positions and masks of the caller's."""
        if self.embed is not None:
            tokens = x
            x = drop(self._vectors(tokens), self.dropout, context)
        for layer in self.layers.values():
            if not isinstance(layer, PredictionLayer):
                x = layer(x, context)
        if self.norm is None or self.head is None:
            return x
        x = self.norm(x)
        if self.config.mtp is not None and self.training and labels is not None:
            assert tokens is not None
            loss = self._prediction_loss(x, tokens, labels, documents, context)
            x = AttachLoss.apply(x, loss)  # type: ignore[no-untyped-call]
        out: Tensor = self.head(x, labels, self.token_weight)
        return out

    def _context(
        self, labels: Tensor | None, documents: Tensor | None, samples: Tensor | None
    ) -> ForwardContext:
        return ForwardContext(
            cos=self.cos,
            sin=self.sin,
            mask=self._mask(documents),
            real=None if labels is None else labels >= 0,
            token_weight=self.token_weight,
            windowed=self._windowed(documents),
            counted=self._counted(labels),
            token_keys=self._token_keys(samples),
        )

    def _token_keys(self, samples: Tensor | None) -> Tensor | None:
        """Of those whose values may be dropped, in training."""
        if not self.config.dropout or not self.training:
            return None
        assert samples is not None, "what is dropped follows from the samples' numbers"
        number, count = self.stream_part
        return token_keys(samples, self.positions.chunk(count)[number])

    def _counted(self, labels: Tensor | None) -> Tensor | None:
        """Samples [batch] of which some token here has a label, where anybody asks."""
        return (labels >= 0).any(1) if self.config.qk_clip and labels is not None else None

    def states_ahead(
        self,
        x: Tensor,
        tokens: Tensor,
        labels: Tensor,
        documents: Tensor | None,
        context: ForwardContext,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The states that predict the token after the next, and so on, with their labels.

        ``x`` are those that predict the next one: what the head gets.
        """
        depth = 0
        for layer in self.layers.values():
            if isinstance(layer, PredictionLayer):
                depth += 1
                following, targets = self.look_ahead(tokens, labels, documents, depth)
                vectors = self._vectors(following)
                x = layer(x, context._replace(following=vectors, real=targets >= 0))
                yield x, targets

    def look_ahead(
        self, tokens: Tensor, labels: Tensor, documents: Tensor | None, depth: int
    ) -> tuple[Tensor, Tensor]:
        """The token and the label so many positions further than each that is here."""
        return look_ahead(tokens, labels, documents, depth)

    def _prediction_loss(self, *states: Any) -> Tensor:
        """Of tokens further on, as it counts beside that of the next one."""
        mtp, head = self.config.mtp, self.head
        assert mtp is not None and head is not None
        losses = [head(x, targets, self.token_weight) for x, targets in self.states_ahead(*states)]
        return torch.cat(losses).sum() * (mtp.weight / mtp.layers)

    def _vectors(self, tokens: Tensor) -> Tensor:
        """What the first layer gets of tokens."""
        assert self.token_table is not None
        x: Tensor = self.token_table(tokens)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * scale

    def _mask(self, documents: Tensor | None) -> Tensor | object | None:
        if documents is not None:
            return document_mask(documents)
        if not reforms_scores(self.config):
            return None
        sequence = len(self.cos) * self.sequence_parts
        return window_mask(sequence, sequence, self.cos.device, blocks=True)

    def _windowed(self, documents: Tensor | None) -> Windowed | None:
        if (window := self.config.window) is None:
            return None
        if documents is not None:
            mask = document_mask(documents, window.size)
            return Windowed(self.window_cos, self.window_sin, mask)
        sequence = len(self.window_cos) * self.sequence_parts
        blocks = reforms_scores(self.config)
        mask_of_all = window_mask(window.size, sequence, self.window_cos.device, blocks)
        return Windowed(self.window_cos, self.window_sin, mask_of_all)


def make_model(
    config: Model, layers: Sequence[int] | None = None, *, embed: bool = True, head: bool = True
) -> Transformer:
    """The model that a configuration describes, or some of its layers."""
    own = load_class(OWN, config.module, nn.Module) if config.module else Transformer
    if not issubclass(own, Layer | Transformer):
        rule = f"{own.__name__} is neither a layer nor a model"
        fix = "derive it from phalanx.model.Layer, or from phalanx.model.Transformer"
        raise ConfigError(OWN, f'"{config.module}"', rule, fix)
    whole = own if issubclass(own, Transformer) else Transformer
    if config.mtp is not None and whole.forward is not Transformer.forward:
        rule = f"{whole.__name__} has a forward of its own, which knows nothing of model.mtp"
        raise ConfigError(OWN, f'"{config.module}"', rule, 'set model.mtp = "none"')
    return whole(config, layers, embed=embed, head=head)
