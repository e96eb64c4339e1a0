"""A plan is scored part by part: what fails or comes too late is no other part's trouble."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.train.evaluate.generate import Sampling
from phalanx.train.evaluate.lead import TimeIsUpError
from phalanx.train.evaluate.plan import NOT_FINISHED, Evaluation, EvaluationPlan
from phalanx.train.evaluate.rows import ScoreRequest, TokenScore
from phalanx.train.evaluate.text import open_codec


class Impatient:
    """Scores so many requests, and then its time is up."""

    sequence, rows_at_once = 64, 4

    def __init__(self, patience: int) -> None:
        self.left, self.nats = patience, 1.0

    def score(self, requests: Sequence[ScoreRequest]) -> list[TokenScore]:
        self.left -= len(requests)
        if self.left < 0:
            raise TimeIsUpError
        return [TokenScore(-self.nats * each.scored, False) for each in requests]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        raise TimeIsUpError


def test_domains_after_the_deadline_are_named(corpus: Path, tmp_path: Path) -> None:
    codec = open_codec({"data": {"path": str(corpus)}})
    (tmp_path / "empty.txt").write_text("")
    sets = {"first": str(corpus), "none": str(tmp_path), "second": str(corpus)}
    evaluation = Evaluation(EvaluationPlan(perplexity=sets, limit=2), codec, 300)
    found = evaluation.run(Impatient(5))
    assert found.scores["first.loss"] == pytest.approx(1.0)
    assert "has no token to score" in found.problems["none"]
    assert found.problems["second"] == NOT_FINISHED and len(found.problems) == 2
    assert all(math.isfinite(value) for value in found.scores.values())


def test_a_score_that_is_not_finite_is_a_problem(corpus: Path) -> None:
    codec = open_codec({"data": {"path": str(corpus)}})
    evaluation = Evaluation(EvaluationPlan(perplexity={"all": str(corpus)}), codec, 300)
    diverged = Impatient(100)
    diverged.nats = math.nan
    found = evaluation.run(diverged)
    assert set(found.scores) == {"all.tokens"}
    assert found.problems["all.loss"] == "is not finite"


def test_a_domain_has_not_the_name_of_a_task(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="give the domain another name"):
        Evaluation(EvaluationPlan(tasks=("arc",), perplexity={"arc": str(corpus)}), None, 300)


def test_tasks_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="the task arc_easy needs the run's tokenizer"):
        Evaluation(EvaluationPlan(tasks=("arc_easy",)), None, 300)
