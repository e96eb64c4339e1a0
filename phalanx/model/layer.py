"""A layer of a model as the axes see it; a block of your own derives from it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from phalanx.model.layers import ForwardContext
from phalanx.model.moe import MoeLayer


class Layer(nn.Module):
    """One layer: hidden states [batch, seq, dim] in, the same shape out.

    It is made with ``(config, index)``. Under tensor parallelism it works on a slice of the
    sequence, but for its ``branches``.
    """

    splits_sequence = False  # True: tokens meet in `CausalAttention` alone, which axes replace

    def __init__(self) -> None:
        super().__init__()
        self.moe: MoeLayer | None = None  # experts, where the layer has some

    def branches(self) -> Sequence[nn.Module]:
        """Modules that get the whole sequence as their first argument, and with slices of their
        weights give a share of the result: tensor parallelism adds the shares up.
        """
        return ()

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        raise NotImplementedError
