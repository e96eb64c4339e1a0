"""Evaluation led by rank 0, which has tasks and texts; the others compute what it broadcasts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from phalanx.train.evaluate.generate import Sampling
from phalanx.train.evaluate.rows import ScoreRequest, TokenScore
from phalanx.train.evaluate.score import Scorer

ROUNDS_AT_ONCE = 16  # forward passes between two looks at the clock

T = TypeVar("T")


class TimeIsUpError(Exception):
    """An evaluation exceeded its time limit."""


class LeadScorer:
    """The scorer of rank 0: broadcasts every request to the ranks that ``follow``."""

    def __init__(self, scorer: Scorer, device: torch.device, deadline: float = 0.0) -> None:
        """``deadline``: by the monotonic clock; 0: none."""
        self._scorer, self._device, self._deadline = scorer, device, deadline
        self.sequence, self.rows_at_once = scorer.sequence, scorer.rows_at_once

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenScore]:
        # The longest come first, so that those of one forward pass are alike.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens))
        scores: dict[int, TokenScore] = {}
        step = self.rows_at_once * ROUNDS_AT_ONCE
        for first in range(0, len(order), step):
            numbers = order[first : first + step]
            self._refuse_late()
            asked = [requests[i] for i in numbers]
            agreed(("score", asked), self._device)
            scores |= zip(numbers, self._scorer.score(asked), strict=True)
        return [scores[i] for i in range(len(requests))]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        self._refuse_late()
        agreed(("generate", prompts, sampling), self._device)
        return self._scorer.generate(prompts, sampling)

    def _refuse_late(self) -> None:
        if self._deadline and time.monotonic() > self._deadline:
            raise TimeIsUpError


@contextmanager
def leading(scorer: Scorer, device: torch.device, deadline: float = 0.0) -> Iterator[LeadScorer]:
    """Lead the other ranks, which ``follow``; releases them on exit, also after an error."""
    try:
        yield LeadScorer(scorer, device, deadline)
    finally:
        agreed(None, device)


def follow(scorer: Scorer, device: torch.device) -> None:
    """Compute what rank 0 broadcasts until it releases this rank."""
    while True:
        order: Any = agreed(None, device)
        if order is None:
            return
        call, *arguments = order
        getattr(scorer, call)(*arguments)


def agreed(value: T, device: torch.device) -> T:
    """Broadcast rank 0's value (collective)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0, device=device)
    said: T = box[0]
    return said
