"""What ``phalanx submit`` is asked for beside nodes: read, or refused with the fix."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from phalanx.cli.queue.schedule_options import (
    ScheduleOptions,
    dependency,
    describe_schedule,
    indices,
)
from phalanx.cluster.job_relations import Array, Dependency
from phalanx.config import ConfigError
from phalanx.control.wire.api_types import JobRequest

NOW = datetime(2026, 11, 18, 9, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0-99", Array(100)),
        ("0-99%8", Array(100, 8)),
        ("7", Array(1, first=7)),
        ("0-30:10", Array(4, step=10)),
        ("5-9:3%1", Array(2, 1, 5, 3)),
    ],
)
def test_an_array_is_a_range_of_indices(text: str, expected: Array) -> None:
    assert indices(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9-0", "ends before it begins; give 0-9"),
        ("1,3,5", "is a list, and an array is a range"),
        ("0-9%0", "lets none of its jobs run"),
        ("0-9:0", "has steps of nothing"),
        ("0-99999999999999999999", "goes beyond 1,000,000,000"),
        ("-3", "is no range of indices"),
        ("a-b", "e.g. 0-99"),
    ],
)
def test_a_range_without_sense_is_refused_with_the_fix(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        indices(text)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12", Dependency("afterok", 12)),
        ("12:ok", Dependency("afterok", 12)),
        ("12:any", Dependency("afterany", 12)),
        ("slurm:12:fail", Dependency("afternotok", 12)),
    ],
)
def test_a_dependency_says_what_must_become_of_a_job(text: str, expected: Dependency) -> None:
    assert dependency(text) == expected


@pytest.mark.parametrize("text", ["", "0", "x", "12:", "12:good", "12:ok:13"])
def test_what_names_no_job_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"e\.g\. 12, 12:any or 12:fail"):
        dependency(text)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"budget_gpu_hours": 0.0}, "--budget-gpu-hours = 0: lets no job run"),
        ({"budget_dollars": -3.0}, "--budget-dollars = -3: lets no job run"),
        ({"deadline": "2026-11-18T09:00"}, "--deadline = .* is in the past"),
        ({"deadline": "+1h", "begin": "+2h"}, 'is not after --begin "\\+2h"'),
    ],
)
def test_what_makes_no_sense_is_named_at_once(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ScheduleOptions(**fields).schedule(NOW)


def test_a_schedule_is_told_in_words() -> None:
    after = (Dependency("afternotok", 3),)
    spec = JobRequest(name="x", after=after, array=Array(9, 2), held=True, budget_gpu_seconds=5400)
    told = describe_schedule(spec)
    assert told == "after job 3 (fail), 9 jobs, 2 at a time, at most 1.5 GPU-hours, held"
    assert describe_schedule(JobRequest(name="x")) == ""


def test_budgets_are_exact() -> None:
    made = ScheduleOptions(budget_gpu_hours=0.5, budget_dollars=12.34).schedule(NOW)
    assert (made.budget_gpu_seconds, made.budget_micro_dollars) == (1800, 12_340_000)
