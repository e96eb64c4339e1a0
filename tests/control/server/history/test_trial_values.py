"""The value of a trial: of the step that it is judged at, from whatever still knows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cluster.job_relations import SweepTrial
from phalanx.cluster.jobs.job import ClusterJob, JobSpec, JobState
from phalanx.control.server.history.trial_values import LATE_NS, TrialValues, value_in
from phalanx.observe.store.journal import open_journal
from phalanx.observe.store.metric_store import open_metrics
from phalanx.observe.store.recorder import VALIDATION, owner_of
from phalanx.observe.store.tables import Column
from phalanx.observe.tracker.runs import Run

TRIAL = SweepTrial(sweep="s", number=1, steps=20, metric="validation_loss")


@pytest.mark.parametrize(
    ("metric", "summary", "value"),
    [
        ("loss", {"step": 20, "loss": 2.5}, 2.5),
        ("loss", {"step": 19, "loss": 2.5}, None),
        ("loss", {"step": 20, "loss": float("nan")}, None),
        ("validation_loss", {"validation_step": 20, "validation_loss": 2.0}, 2.0),
        ("validation_loss", {"validation_step": 20, "validation_loss": None}, None),
        ("text.loss", {"evaluation_step": 20, "scores": {"text.loss": 1.5}}, 1.5),
        ("text.loss", {"evaluation_step": 20, "scores": {}}, None),
        ("text.loss", {}, None),
    ],
)
def test_only_the_value_of_the_last_step_counts(
    metric: str, summary: dict[str, object], value: float | None
) -> None:
    trial = SweepTrial(sweep="s", number=1, steps=20, metric=metric)
    assert value_in(trial, summary) == value


def test_values_come_from_memory_the_journal_or_the_records_and_are_given_up_late(
    tmp_path: Path,
) -> None:
    journal = open_journal(tmp_path / "runs.sqlite")
    metrics = open_metrics(tmp_path / "metrics.sqlite")
    values = TrialValues(journal, metrics)
    jobs = [
        ClusterJob(
            id=number, spec=JobSpec(name="t", trial=TRIAL), submitted_ns=0, state=JobState.DONE
        )
        for number in range(1, 5)
    ]
    journal.put_run(2, Run(id="2", summary={"validation_step": 20, "validation_loss": 2.0}))
    table = metrics.table(owner_of(3), VALIDATION, 0, [Column("validation_loss")])
    for step in (10, 20):
        table.append(10**9 * step, step, {"validation_loss": step / 10 + 1})
    metrics.flush(everything=True)
    told = {"validation_step": 20, "validation_loss": 1.0}
    assert all(values.unknown(job) for job in jobs)
    values.find([(jobs[0], told), *((job, {}) for job in jobs[1:])], now_ns=1)
    assert [values.of(job) for job in jobs] == [1.0, 2.0, 3.0, None]
    assert values.unknown(jobs[3]), "its records may still come"
    values.find([(jobs[3], {})], now_ns=LATE_NS + 1)
    assert not values.unknown(jobs[3]) and values.of(jobs[3]) is None
