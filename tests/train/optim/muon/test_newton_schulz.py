"""Newton-Schulz steps of many matrices at once are those of each."""

from __future__ import annotations

import pytest
import torch

from phalanx.train.optim.muon import newton_schulz
from phalanx.train.optim.muon.newton_schulz import orthogonalize, orthogonalize_stacks

SHAPES = ((1, 24, 24), (3, 24, 24), (1, 40, 12), (2, 24, 24), (1, 12, 40), (1, 12, 40))


@pytest.mark.parametrize("most", [2000, 1 << 20])
def test_equal_shapes_are_computed_together(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(newton_schulz, "BATCH_ELEMENTS", most)
    generator = torch.Generator().manual_seed(3)
    stacks = [torch.randn(shape, generator=generator) for shape in SHAPES]
    together = orthogonalize_stacks(stacks, together=True)
    apart = orthogonalize_stacks(stacks, together=False)
    assert [tuple(each.shape) for each in together] == list(SHAPES)
    for one, other, stack in zip(together, apart, stacks, strict=True):
        torch.testing.assert_close(one, other)
        size = max(1.0, stack.shape[1] / stack.shape[2]) ** 0.5
        torch.testing.assert_close(other * size, orthogonalize(stack))
