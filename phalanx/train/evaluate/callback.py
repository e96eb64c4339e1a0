"""Evaluation during training: all ranks score together, without changing a bit of training.

Attached where a job's ``evaluate.every`` says so.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from phalanx.checkpoint.format.tier import step_of
from phalanx.config import ConfigError, ConfigProblem, Evaluate
from phalanx.config.errors import problem
from phalanx.train.callback import Callback, TrainingRun
from phalanx.train.evaluate.lead import agreed, follow, leading
from phalanx.train.evaluate.plan import Evaluation, EvaluationPlan, Findings
from phalanx.train.evaluate.score import GangScorer
from phalanx.train.evaluate.scores import Scores, write_scores
from phalanx.train.evaluate.text import open_codec
from phalanx.train.report.records import EvaluationRecord

if TYPE_CHECKING:
    from phalanx.train.trainer import StepOutcome

IS_EVALUATING = "an evaluation is under way"

log = logging.getLogger(__name__)


class GangEvaluation(Callback):
    """Scores tasks and domains every ``evaluate.every`` steps; no part of a step."""

    def __init__(self) -> None:
        self._evaluation: Evaluation | None = None  # on rank 0

    def begin(self, run: TrainingRun) -> None:
        """Load tasks now, so that a missing one is an error before the first step on every rank."""
        problems: tuple[ConfigProblem, ...] = ()
        if run.rank == 0:
            with _same_random(run.trainer.device):
                try:
                    self._evaluation = _prepared(run)
                except ConfigError as error:
                    problems = error.problems
        if found := agreed(problems, run.trainer.device):
            raise ConfigError.of(found)

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        settings = run.job.evaluate
        if run.step % settings.every:
            return
        run.orders.busy(IS_EVALUATING, run.step)
        began, device = time.monotonic(), run.trainer.device
        scorer = GangScorer(run.trainer.engine)
        run.checkpointer.before_update()  # an average may take the place of what is copied
        # Of the weights that validation takes, too: an average of them, where there is one.
        evaluated = run.trainer.optimizer.evaluated(), run.trainer.average.evaluated()
        with _same_random(device), evaluated[0], evaluated[1]:
            if self._evaluation is None:
                follow(scorer, device)
            else:
                deadline = began + 60 * settings.minutes
                with leading(scorer, device, deadline) as lead:
                    found = self._evaluation.run(lead)
                _report(run, found, time.monotonic() - began)
        run.trainer.timer.restart()


def _prepared(run: TrainingRun) -> Evaluation:
    """Tasks and domains of the job, read once."""
    codec = open_codec(msgspec.to_builtins(run.job))
    evaluation = Evaluation(plan_of(run.job.evaluate), codec, run.job.model.vocab)
    if evaluation.tasks is not None and (writing := evaluation.tasks.writing()):
        rule = "needs text generation, which is not available during training"
        fix = "score it with `phalanx eval` on checkpoints, and remove it here"
        raise ConfigError.of([problem("evaluate.tasks", name, rule, fix) for name in writing])
    return evaluation


def plan_of(settings: Evaluate) -> EvaluationPlan:
    """The job's evaluation settings as a plan."""
    return EvaluationPlan(
        tasks=settings.tasks,
        task_folder=settings.task_folder,
        few_shot=None if settings.few_shot < 0 else settings.few_shot,
        perplexity=settings.perplexity,
        limit=settings.limit,
    )


def _report(run: TrainingRun, found: Findings, seconds: float) -> None:
    """Report to trackers and the agent, and write the scores file that gates read."""
    record = EvaluationRecord(
        job=run.job.name,
        generation=run.trainer.generation,
        step=run.step,
        scores=found.scores,
        problems=found.problems,
        seconds=seconds,
    )
    run.sinks.write([record])
    saved = run.checkpoint if step_of(run.checkpoint.rpartition("/")[2]) == run.step else ""
    scores = Scores(checkpoint=saved, step=run.step, scores=found.scores, problems=found.problems)
    path = run.folder.scores / f"step-{run.step:08d}.json"
    try:
        write_scores(path, scores)
    except OSError as error:
        log.warning("%s cannot be written (%s); training goes on", path, error)


@contextmanager
def _same_random(device: torch.device) -> Iterator[None]:
    """Restore the state of random number generators on exit."""
    devices = [device] if device.type == "cuda" else []
    python, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)
