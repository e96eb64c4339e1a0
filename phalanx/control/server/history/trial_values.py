"""What trials of sweeps came to: the metric of each at the step that it is judged at."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.cluster.job_relations import SweepTrial
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.observe.store.journal import Journal
from phalanx.observe.store.metric_store import MetricStore
from phalanx.observe.store.recorder import JOB_TABLES, owner_of
from phalanx.observe.tracker.runs import EVALUATION, VALIDATION

LATE_NS = 60 * 10**9  # after a job's end; what was not told by then will not be
EVER_NS, RAW_TIER = 1 << 62, 0


class TrialValues:
    """Values of trials that have ended, each looked for until it is known."""

    def __init__(self, journal: Journal, metrics: MetricStore) -> None:
        self._journal, self._metrics = journal, metrics
        self._known: dict[int, float | None] = {}  # by job

    def unknown(self, job: ClusterJob) -> bool:
        """Whether its value has to be looked for."""
        return job.ended and job.spec.trial is not None and job.id not in self._known

    def of(self, job: ClusterJob) -> float | None:
        """The value, as far as it was found."""
        return self._known.get(job.id)

    def find(self, jobs: Sequence[tuple[ClusterJob, Mapping[str, Any]]], now_ns: int) -> None:
        """Look for values; ``jobs``: with what is in memory of their runs' summaries. Blocks."""
        for job, summary in jobs:
            trial = job.spec.trial
            assert trial is not None
            value = value_in(trial, summary)
            if value is None:
                run = self._journal.run(job.id)
                value = value_in(trial, run.summary) if run is not None else None
            if value is None:
                value = self._recorded(trial, job.id)
            if value is not None or now_ns > job.ended_ns + LATE_NS:
                self._known[job.id] = value

    def _recorded(self, trial: SweepTrial, job: int) -> float | None:
        """From the metric store: a server that is killed loses a summary, and no record."""
        store, name = self._metrics, trial.metric
        for table in (each for kind in JOB_TABLES for each in store.find(owner_of(job), kind)):
            if table.column(name) is not None:
                read = store.read(table, name, RAW_TIER, 0, EVER_NS)
                at = np.flatnonzero(read.steps == trial.steps)
                if len(at) and math.isfinite(value := float(read.values["mean"][at[-1], 0])):
                    return value
        return None


def value_in(trial: SweepTrial, summary: Mapping[str, Any]) -> float | None:
    """A trial's metric in the summary of its run; None: not of the step that counts."""
    if trial.metric == "loss":
        step, value = summary.get("step"), summary.get("loss")
    elif trial.metric == "validation_loss":
        step, value = (summary.get(name) for name in VALIDATION)
    else:
        step, scores = (summary.get(name) for name in EVALUATION)
        value = scores.get(trial.metric) if isinstance(scores, dict) else None
    if step != trial.steps or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
