"""Workloads: a generated mix like the published ones, and recorded traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.config import ConfigError
from phalanx.simulate.draws import SeedDraws
from phalanx.simulate.scenario.load import load_scenario
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.workload import Submission, submissions
from phalanx.simulate.world.gangs import USER_ERROR


def asked(jobs: list[Submission]) -> list[tuple[int, float]]:
    return [
        (spec.gang.gpus(spec.gang.replicas), spec.expected.steps * spec.expected.step_ns / 1e9)
        for _, spec in jobs
    ]


def test_most_jobs_are_small_and_few_large_ones_use_most_of_the_time() -> None:
    jobs = submissions(load_scenario("multi-tenant", ["days=20"]), SeedDraws(1)).jobs
    rows = asked(jobs)
    small = sum(gpus == 1 for gpus, _ in rows) / len(rows)
    total = sum(gpus * seconds for gpus, seconds in rows)
    large = sum(gpus * seconds for gpus, seconds in rows if gpus >= 64) / total
    assert 0.4 < small < 0.6
    assert large > 0.5


def inside(scenario: Scenario, jobs: list[Submission]) -> float:
    """What jobs ask for between the first and the last day, as a part of all GPU time."""
    end, total = scenario.days * 86400, 0.0
    for time, spec in jobs:
        error = spec.payload.removeprefix(USER_ERROR)
        steps = int(error) if error else spec.expected.steps
        seconds = min(steps * spec.expected.step_ns / 1e9, end - time / 1e9)
        total += spec.gang.gpus(spec.gang.replicas) * seconds
    return total / (scenario.fleet.gpus * end)


@pytest.mark.parametrize("days", [1, 20])
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_the_load_within_the_days_is_the_one_that_was_asked_for(days: int, load: float) -> None:
    scenario = load_scenario("multi-tenant", [f"days={days}", f"workload.utilisation={load}"])
    for seed in range(3):
        assert inside(scenario, submissions(scenario, SeedDraws(seed)).jobs) == pytest.approx(
            load, rel=0.02
        )


def test_lengths_of_jobs_do_not_depend_on_the_load_and_end_at_the_longest() -> None:
    def lengths(*changes: str) -> list[float]:
        scenario = load_scenario("multi-tenant", ["days=30", *changes])
        jobs = submissions(scenario, SeedDraws(1)).jobs
        return sorted(seconds for _, seconds in asked(jobs))

    busy, idle = lengths("workload.utilisation=1.5"), lengths("workload.jobs_per_day=60")
    for found in (busy, idle):
        assert found[-1] <= 14 * 86400
        assert found[len(found) // 2] == pytest.approx(500, rel=0.25)


def test_jobs_come_at_the_rate_given_and_less_at_night() -> None:
    scenario = load_scenario("multi-tenant", ["days=70", "workload.jobs_per_day=400"])
    jobs = [time for time, _ in submissions(scenario, SeedDraws(3)).jobs if time]
    assert len(jobs) == 70 * 400
    hours = [int(time / 3.6e12) % 24 for time in jobs]
    assert hours.count(3) < 0.7 * hours.count(15)


def test_jobs_a_day_give_the_load_that_is_told() -> None:
    scenario = load_scenario("multi-tenant", ["days=365", "workload.jobs_per_day=300"])
    told = scenario.workload.utilisation
    assert inside(scenario, submissions(scenario, SeedDraws(4)).jobs) == pytest.approx(
        told, rel=0.15
    )
    half = load_scenario("multi-tenant", ["workload.jobs_per_day=300", "fleet.gpus=4096"])
    assert half.workload.utilisation != told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["workload.jobs_per_day=300", "workload.utilisation=0.9"], "contradicts"),
        (["workload.jobs_per_day=300000"], "times the GPU time"),
    ],
)
def test_a_load_that_cannot_be_is_refused(changes: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_scenario("multi-tenant", changes)


def test_another_rate_of_faults_does_not_change_the_jobs() -> None:
    calm = submissions(load_scenario("multi-tenant"), SeedDraws(5)).jobs
    wild = submissions(
        load_scenario("multi-tenant", ["faults.per_1000_node_days=90"]), SeedDraws(5)
    ).jobs
    assert calm == wild


TRACE = """job_id,user,gpu_num,submit_time,duration,queue
a,u1,8,2023-05-01 08:00:00,3600,vc1
b,u2,0,2023-05-01 08:00:10,100,vc1
c,u3,64,2023-05-01 09:00:00,7200,vc2
"""


def test_a_recorded_trace_becomes_submissions(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    scenario = load_scenario(
        "multi-tenant", ["workload.kind=csv", f"workload.file={path}", "days=1"]
    )
    jobs = submissions(scenario, SeedDraws(0)).jobs
    assert asked(jobs) == [(8, 3600.0), (64, 7200.0)]
    assert [time for time, _ in jobs] == [0, 3600 * 10**9]
    assert [spec.team for _, spec in jobs] == ["vc1", "vc2"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpu_num,duration\n8,100\n", "submit"),
        ("submit_time,gpu_num,duration\n0,eight,100\n", "trace.csv:2"),
        ("submit_time,gpu_num,duration\n0,0,100\n", "no GPU job .*1 ask for no GPU"),
        ("submit_time,gpu_num,duration\n", "it has no rows"),
        ("submit_time,gpu_num,duration\n0,8,inf\n", "trace.csv:2"),
        ("submit_time,gpu_num,duration\n0,inf,100\n", "trace.csv:2"),
        ("submit_time,gpu_num,duration\nnan,8,100\n", "trace.csv:2"),
        ("submit_time,gpu_num,duration\n0,8,1e300\n", "trace.csv:2"),
        ("submit_time,gpu_num,duration\n0,8\n", "trace.csv:2"),
        ("submit_time,gpu_num,duration\n0,-8,100\n", "from 0"),
        ("submit_time,gpu_num,duration\n0,8,-5\n", "from 0"),
        ("submit_time,gpu_num,duration\n0,8.5,5\n", "no whole number of GPUs"),
        ("submit_time,gpu_num,duration\n0,99999,100\n", "more GPUs than the fleet has"),
    ],
)
def test_a_trace_that_cannot_be_used_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    scenario = load_scenario("multi-tenant", ["workload.kind=csv", f"workload.file={path}"])
    with pytest.raises(ConfigError, match=told):
        submissions(scenario, SeedDraws(0))


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    scenario = load_scenario(
        "multi-tenant", ["workload.kind=csv", f"workload.file={tmp_path / 'no.csv'}"]
    )
    with pytest.raises(ConfigError, match="no such file"):
        submissions(scenario, SeedDraws(0))
