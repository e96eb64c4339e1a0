"""A cache of keys and values, for text that is written token by token.

While it is open, the attention cores of a model remember what they were given, so that each token
passes through the model once.
"""

from __future__ import annotations

from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.model.attention import CausalAttention, attention_shares
from phalanx.model.layer import Layer
from phalanx.model.layers import ForwardContext, Windowed
from phalanx.model.rope import rope_tables
from phalanx.model.transformer import Transformer


def can_cache(model: Transformer) -> bool:
    """Whether tokens meet in attention cores alone, and the model's own forward says no more."""
    ours = type(model).forward is Transformer.forward and type(model).run is Transformer.run
    layers = model.layers.values()
    return ours and all(isinstance(each, Layer) and each.splits_sequence for each in layers)


class CachedAttention(nn.Module):
    """Attends from new tokens to all that it was given since it was made."""

    def __init__(self, core: CausalAttention, capacity: int) -> None:
        super().__init__()
        self.scale, self.softcap = core.scale, core.softcap
        self.capacity, self.filled = capacity, 0
        self.keys: Tensor | None = None  # [batch, capacity, heads, head_dim]
        self.values: Tensor | None = None

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        sinks: Tensor | None = None,
        _counted: Tensor | None = None,  # of scores that training keeps small
    ) -> Tensor:
        """q, k, v: [batch, new, heads, head_dim]; mask: [batch or 1, 1, new, all so far]."""
        keys, values = self._remember(k, v)
        new, heads, width = q.shape[1:]
        groups = heads // keys.shape[2]  # queries' heads that share one of the keys'
        # Heads that share keys become rows of one matrix: the cache is read once, and not copied.
        folded = q.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        scores = (folded @ keys.permute(0, 2, 3, 1)).float() * (self.scale or width**-0.5)
        scores = scores.unflatten(2, (groups, new)).flatten(1, 2)
        shares = attention_shares(scores, mask, self.softcap, sinks).to(v.dtype)
        mixed = shares.unflatten(1, (-1, groups)).flatten(2, 3) @ values.transpose(1, 2)
        out: Tensor = mixed.unflatten(2, (groups, new)).permute(0, 3, 1, 2, 4).flatten(2, 3)
        return out

    def _remember(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far."""
        if self.keys is None or self.values is None:
            batch, _, *rest = k.shape
            self.keys = k.new_zeros((batch, self.capacity, *rest))
            self.values = v.new_zeros((batch, self.capacity, *v.shape[2:]))
        past = self.filled + k.shape[1]
        self.keys[:, self.filled : past] = k
        self.values[:, self.filled : past] = v
        return self.keys[:, :past], self.values[:, :past]


class KeyValueCache:
    """Runs a model over the next tokens of sequences whose earlier ones it remembers.

    Rows may have padding in front: ``padding`` [batch] says how much of it, and nobody sees it.
    ``multiple``: the model wants such numbers of tokens at a time (tensor parallelism).
    """

    def __init__(
        self, model: Transformer, capacity: int, padding: Tensor | None = None, multiple: int = 1
    ) -> None:
        assert can_cache(model)
        self.model, self.padding, self.multiple = model, padding, multiple
        self.filled = 0
        self._capacity = capacity + multiple
        self._replaced: list[tuple[nn.Module, str, CausalAttention]] = []
        self._cores: list[CachedAttention] = []
        positions = torch.arange(self._capacity, device=model.token_weight.device)
        self._tables = rope_tables(model.config, positions)
        self._window_tables = rope_tables(model.config, positions, windowed=True)

    def __enter__(self) -> KeyValueCache:
        for module in list(self.model.layers.modules()):
            for name, core in list(module.named_children()):
                if isinstance(core, CausalAttention):
                    self._replaced.append((module, name, core))
                    self._cores.append(CachedAttention(core, self._capacity))
                    setattr(module, name, self._cores[-1])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for module, name, core in self._replaced:
            setattr(module, name, core)

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """The next tokens [batch, new] -> their logits [batch, new, vocab]."""
        new = tokens.shape[1]
        assert self.filled + new <= self._capacity - self.multiple, "more than the cache holds"
        # Padding behind them is seen by none of them, and written over by what comes next.
        tokens = F.pad(tokens, (0, -new % self.multiple))
        logits = self.model.run(tokens, None, self._context(tokens.shape[1]))
        self.filled += new
        for core in self._cores:
            core.filled = self.filled
        return logits[:, :new]

    def _context(self, new: int) -> ForwardContext:
        at, window = slice(self.filled, self.filled + new), self.model.config.window
        windowed = None
        if window is not None:
            cos, sin = self._window_tables
            windowed = Windowed(cos[at], sin[at], self._mask(new, window.size))
        cos, sin = self._tables
        weight = self.model.token_weight
        return ForwardContext(cos[at], sin[at], self._mask(new), None, weight, windowed)

    def _mask(self, new: int, window: int = 0) -> Tensor:
        """Which of all tokens so far each new one sees: [batch or 1, 1, new, all]."""
        device = self.model.token_weight.device
        keys = torch.arange(self.filled + new, device=device)
        queries = keys[self.filled :, None]
        seen = keys <= queries
        if window:
            seen &= queries - keys < window
        if self.padding is None:
            return seen[None, None]
        real = keys >= self.padding[:, None, None, None]
        # Padding sees itself: a row of nothing has no softmax.
        return (seen & real) | (keys == queries)
