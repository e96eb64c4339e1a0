"""The largest score of each attention head in a step, by which queries and keys are clipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ScorePeaks(nn.Module):
    """Over all micro-batches of the step so far, on the device; below zero counts as zero.

    ``part`` is the number of the equal part of the heads that is computed here.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.register_buffer("peaks", torch.zeros(heads, dtype=torch.float32), persistent=False)
        self.peaks: Tensor
        self.part = 0

    def reset(self, device: torch.device) -> None:
        """As before the first step."""
        self.peaks = torch.zeros_like(self.peaks, device=device)

    @torch.no_grad()
    def take(self, largest: Tensor, counted: Tensor | None) -> None:
        """largest: [batch, heads here, seq] of each query; counted: [batch] samples with a label.

        Padding depends on the number of replicas, and so must not count.
        """
        by_sample = largest.detach().float().amax(2)
        if counted is not None:
            by_sample = by_sample.masked_fill(~counted[:, None], 0.0)
        by_head = by_sample.amax(0)
        here = self.peaks.narrow(0, self.part * len(by_head), len(by_head))
        here.copy_(torch.maximum(here, by_head))
