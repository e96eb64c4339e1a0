"""Batches for a GPU lie in page-locked memory, contiguous, and are those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.config import Data
from phalanx.data import Feed

pytestmark = pytest.mark.gpu


def test_pinned_batches_are_the_same_and_copy_without_the_host() -> None:
    data = Data(sequence=64, prefetch=2)
    with (
        Feed(data, 1000, 10, 4, 1, 2, pin=True) as pinned,
        Feed(data, 1000, 10, 4, 1, 2) as plain,
    ):
        cursor = plain.start()
        for _ in range(8):  # more steps than there are buffers
            ours, theirs = pinned.next(cursor), plain.next(cursor)
            for a, b in zip(ours.micro_batches, theirs.micro_batches, strict=True):
                assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.labels, b.labels)
                tokens = torch.from_numpy(a.tokens)
                assert tokens.is_pinned() and tokens.is_contiguous()
                assert torch.equal(tokens.to("cuda", non_blocking=True).cpu(), tokens)
            cursor = plain.advance(cursor)
