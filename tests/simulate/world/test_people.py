"""People work when they are there: answers, repairs, stops, and what they undo."""

from __future__ import annotations

from functools import cache

import pytest

from phalanx.cluster.policy import DAY_NS
from phalanx.config import ConfigError
from phalanx.simulate.result import SeedResult
from phalanx.simulate.runner import played
from phalanx.simulate.scenario.load import load_scenario
from phalanx.simulate.scenario.scenario import PeoplePart
from phalanx.simulate.world.people import Operators
from phalanx.simulate.world.working_hours import HOUR_NS, WorkingHours
from phalanx.simulate.world.world import World

OFFICE = ("people.first_hour=9", "people.last_hour=17", "people.weekends=false")
# One job of 64 GPUs on 8 nodes for three weeks; nothing happens but what a test adds.
JOB = (
    "fleet.gpus=64",
    "fleet.spare_nodes=0",
    "job.tensor=8",
    "job.pipeline=1",
    "days=21",
    "faults.per_1000_node_days=0",
    "faults.planned_per_day=0",
    "restart.seconds=60",
    "checkpoint.interval_seconds=600",
)


@cache
def play(*changes: str) -> tuple[SeedResult, World]:
    result, world, _ = played(load_scenario("llama3-54d", [*JOB, *changes]), 0)
    assert not result.found
    return result, world


def test_hours_begin_on_a_monday_and_leave_the_weekend_out() -> None:
    hours = WorkingHours(PeoplePart(first_hour=9, last_hour=17, weekends=False))
    assert hours.share == pytest.approx(8 * 5 / (24 * 7))
    assert hours.next_ns(0) == 9 * HOUR_NS
    assert hours.next_ns(10 * HOUR_NS) == 10 * HOUR_NS
    assert hours.next_ns(17 * HOUR_NS) == DAY_NS + 9 * HOUR_NS
    assert hours.next_ns(5 * DAY_NS) == 7 * DAY_NS + 9 * HOUR_NS  # a Saturday
    assert hours.done_ns(16 * HOUR_NS, 3 * HOUR_NS) == DAY_NS + 11 * HOUR_NS
    assert hours.done_ns(4 * DAY_NS + 16 * HOUR_NS, 2 * HOUR_NS) == 7 * DAY_NS + 10 * HOUR_NS
    assert hours.done_ns(9 * HOUR_NS, 40 * HOUR_NS) == 7 * DAY_NS + 9 * HOUR_NS
    assert WorkingHours(PeoplePart()).done_ns(5, 7) == 12


def test_planned_stops_happen_while_people_are_there_as_often_as_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stops: list[int] = []
    stop = Operators._stop

    def watched(people: Operators) -> None:
        stops.append(people.world.agenda.now_ns)
        stop(people)

    monkeypatch.setattr(Operators, "_stop", watched)
    result, world = play("faults.planned_per_day=3", *OFFICE)
    assert len(stops) >= result.planned == pytest.approx(3 * 21, rel=0.4)
    assert all(world.people.hours.next_ns(at) == at for at in stops)


def test_repairs_rest_while_nobody_is_there() -> None:
    faults = ("faults.causes.gpu_fault=40", "repair.hours=8", "repair.spread=0")
    always, _ = play(*faults)
    office, _ = play(*faults, "people.repairs=true", *OFFICE)
    assert office.interruptions <= always.interruptions
    assert office.queued_seconds > 1.5 * always.queued_seconds > 0
    assert office.ettr < always.ettr


def test_a_repair_that_does_not_help_is_made_again() -> None:
    faults = ("faults.causes.gpu_fault=40", "repair.hours=8", "repair.spread=0")
    sure, _ = play(*faults)
    again, _ = play(*faults, "repair.fails_share=0.5")
    assert sure.failed_repairs == 0 < again.failed_repairs
    assert again.queued_seconds > sure.queued_seconds


def test_a_start_that_fails_is_tried_again() -> None:
    faults = ("faults.by_job_gpus.1=300",)
    sure, _ = play(*faults)
    again, _ = play(*faults, "restart.fails_share=0.4")
    assert sure.failed_starts == 0 < again.failed_starts
    assert again.formations > sure.formations
    assert again.mean_recovery_seconds > sure.mean_recovery_seconds
    assert again.jobs_failed == 0


def test_a_divergence_costs_what_is_made_again_and_the_time_until_somebody_sees_it() -> None:
    diverges = ("people.divergences_per_day=1", "policy.answer_minutes=30")
    seen, _ = play(*diverges, "people.rollback_minutes=60")
    assert 10 <= seen.rollbacks <= 35
    lost_hours = (1 - seen.ettr) * 21 * 24
    # An hour before, half an hour until it is seen, and up to a checkpoint more.
    assert 1.4 * seen.rollbacks < lost_hours < 2.2 * seen.rollbacks
    asleep, _ = play(*diverges, "people.rollback_minutes=60", *OFFICE)
    called, _ = play(*diverges, "people.on_call_minutes=90", *OFFICE)
    assert asleep.ettr < called.ettr < seen.ettr


def test_idle_nodes_fail_less_often_where_work_wears_them() -> None:
    idle = ("fleet.spare_nodes=8", "fleet.spares_warm=false", "faults.causes.gpu_fault=40")
    alike, _ = play(*idle)
    rested, _ = play(*idle, "faults.idle_share=0")
    assert sum(rested.node_faults.values()) < sum(alike.node_faults.values())
    assert sum(rested.node_faults.values()) == rested.interruptions


def test_people_must_leave_after_they_came() -> None:
    with pytest.raises(ConfigError, match=r"people\.first_hour"):
        load_scenario("llama3-54d", ["people.first_hour=17", "people.last_hour=9"])
