"""Programs fail as often as the size of their job says; nodes are counted one by one."""

from __future__ import annotations

import math
from functools import cache

import pytest

from phalanx.config import ConfigError
from phalanx.simulate.result import SeedResult
from phalanx.simulate.runner import run_seed
from phalanx.simulate.scenario.load import load_scenario

# One job of 256 GPUs on 32 nodes for 20 days: 640 node-days.
JOB = (
    "fleet.gpus=256",
    "fleet.spare_nodes=4",
    "job.pipeline=1",
    "days=20",
    "faults.per_1000_node_days=0",
    "faults.planned_per_day=0",
    "restart.seconds=60",
    "checkpoint.interval_seconds=600",
)


@cache
def run(*changes: str) -> SeedResult:
    result = run_seed(load_scenario("llama3-54d", [*JOB, *changes]), 0)
    assert not result.found
    return result


def test_programs_fail_at_the_rate_of_the_largest_class_that_the_job_reaches() -> None:
    small = run("faults.by_job_gpus.1=160", "faults.by_job_gpus.512=1")
    assert small.by_cause.keys() == {"software_bug"}
    assert small.expected_interruptions == pytest.approx(0.160 * 640)
    assert abs(small.interruptions - 102.4) < 4 * math.sqrt(102.4)
    large = run("faults.by_job_gpus.1=160", "faults.by_job_gpus.256=20")
    assert large.interruptions < small.interruptions / 3


def test_nodes_are_left_alone_by_them_and_counted_by_name_otherwise() -> None:
    assert run("faults.by_job_gpus.1=160", "faults.by_job_gpus.512=1").node_faults == {}
    counted = run("faults.causes.gpu_fault=100").node_faults
    assert sum(counted.values()) > 30
    assert list(counted.values()) == sorted(counted.values(), reverse=True)
    assert all(name.startswith("n000") for name in counted)


def test_a_class_of_sizes_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="least GPUs"):
        load_scenario("llama3-54d", ["faults.by_job_gpus.small=4"])
