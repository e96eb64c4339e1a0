"""An evaluation's plan: tasks and domains, prepared once, scored repeatedly."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from phalanx.config import ConfigError
from phalanx.train.evaluate.lead import TimeIsUpError
from phalanx.train.evaluate.perplexity import domain_score, open_domain
from phalanx.train.evaluate.score import Scorer
from phalanx.train.evaluate.tasks import HarnessTasks
from phalanx.train.evaluate.text import TextCodec, needed_codec

NOT_FINISHED = "not finished within its time limit"
# What a task, its data or its metrics raise: no reason to end whatever is evaluated.
TASK_ERRORS = (ConfigError, ValueError, LookupError, TypeError, ArithmeticError, AttributeError)


class EvaluationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to score."""

    tasks: tuple[str, ...] = ()
    task_folder: str = ""  # of task files of one's own; "": none
    few_shot: int | None = None  # solved samples before each; None: as a task says
    perplexity: dict[str, str] = {}  # domains: where their texts or tokens are
    limit: int = 0  # of each, the first so many samples or documents; 0: all


class Findings(NamedTuple):
    """Scores by ``task.metric``, and errors by the name of what could not be scored."""

    scores: dict[str, float]
    problems: dict[str, str]


class Evaluation:
    """A plan whose tasks are loaded; ``ConfigError`` says what is missing."""

    def __init__(self, plan: EvaluationPlan, codec: TextCodec | None, vocab: int) -> None:
        self.plan, self._vocab = plan, vocab
        self.tasks: HarnessTasks | None = None
        for name in sorted(plan.perplexity.keys() & set(plan.tasks)):
            rule = "is both a task and a domain: their scores would have the same name"
            raise ConfigError("perplexity", name, rule, "give the domain another name")
        if plan.tasks:
            codec = needed_codec(codec, f"the task {plan.tasks[0]}")
            self.tasks = HarnessTasks(plan.tasks, plan.task_folder, plan.few_shot)
        self._codec = codec
        for name, path in plan.perplexity.items():
            open_domain(name, path, codec, vocab)  # refuses now what cannot be read

    def run(self, scorer: Scorer) -> Findings:
        """Score all in turn; an error in one is recorded and does not stop the others."""
        findings = Findings({}, {})
        for name in (*self.plan.perplexity, *self.plan.tasks):
            try:
                scores = self._scores(name, scorer)
            except TimeIsUpError:
                findings.problems[name] = NOT_FINISHED
            except TASK_ERRORS as error:
                findings.problems[name] = f"{type(error).__name__}: {error}"
            else:
                good = {key: value for key, value in scores.items() if math.isfinite(value)}
                findings.scores.update(good)
                for key in scores.keys() - good.keys():
                    findings.problems[key] = "is not finite"
        return findings

    def _scores(self, name: str, scorer: Scorer) -> dict[str, float]:
        """Of a domain or of a task."""
        if name not in self.plan.perplexity:
            assert self.tasks is not None and self._codec is not None
            return self.tasks.scores(name, scorer, self._codec, self.plan.limit)
        path = self.plan.perplexity[name]
        domain = open_domain(name, path, self._codec, self._vocab)
        score = domain_score(domain, scorer, self.plan.limit)
        if score is None:
            rule, fix = "has no token to score", "give texts that are not empty"
            raise ConfigError(f"perplexity.{name}", f'"{path}"', rule, fix)
        return {f"{name}.{key}": value for key, value in score.numbers.items()}
