"""Rank 0 asks and all ranks compute; whatever happens to it, the others are let go."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from phalanx.train.evaluate.generate import Sampling
from phalanx.train.evaluate.lead import TimeIsUpError, agreed, follow, leading
from phalanx.train.evaluate.rows import ScoreRequest
from phalanx.train.evaluate.score import ModelScorer
from tests.shared_ranks import SharedRanks
from tests.train.evaluate.small_checkpoint import opened

CPU = torch.device("cpu")
REQUESTS = [ScoreRequest(tuple(range(1, 4 + n)), 2) for n in range(40)]


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def together(checkpoint: Path) -> tuple[object, object]:
    scorer = ModelScorer(opened(checkpoint), rows=1)
    if rank():
        follow(scorer, CPU)
        return None, None
    with leading(scorer, CPU) as lead:
        return lead.score(REQUESTS), lead.generate([[5, 6], [7]], Sampling(most_tokens=4))


def test_what_one_asks_all_compute(checkpoint: Path, shared_ranks: SharedRanks) -> None:
    alone = together(checkpoint)
    first, second = shared_ranks.run(2, together, checkpoint)
    assert second == (None, None) and first[1] == alone[1]
    values = [each.log_probability for each in alone[0]]  # type: ignore[attr-defined]
    assert [each.log_probability for each in first[0]] == pytest.approx(values, abs=2e-5)


def _lead_into_an_error(scorer: ModelScorer) -> None:
    with leading(scorer, CPU) as lead:
        lead.score(REQUESTS[:2])
        raise LookupError


def fails(checkpoint: Path) -> int:
    scorer = ModelScorer(opened(checkpoint), rows=1)
    if rank():
        follow(scorer, CPU)
    else:
        with pytest.raises(LookupError):
            _lead_into_an_error(scorer)
    return agreed(rank() + 7, CPU)


def test_an_error_lets_the_others_go(checkpoint: Path, shared_ranks: SharedRanks) -> None:
    assert shared_ranks.run(2, fails, checkpoint) == [7, 7]


def test_after_its_deadline_nothing_more_is_asked(checkpoint: Path) -> None:
    scorer = ModelScorer(opened(checkpoint))
    with leading(scorer, CPU, time.monotonic() - 1) as late:
        with pytest.raises(TimeIsUpError):
            late.score(REQUESTS)
        with pytest.raises(TimeIsUpError):
            late.generate([[5]], Sampling())
    with leading(scorer, CPU, time.monotonic() + 3600) as early:
        assert len(early.score(REQUESTS)) == 40
