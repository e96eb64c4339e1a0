"""The physics comes from the parameters: rates, times and costs move the result as they must."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest

from phalanx.cluster.node import NodeState
from phalanx.simulate.draws import SeedDraws
from phalanx.simulate.result import SeedResult, SimulationReport, summarise
from phalanx.simulate.runner import played, run_seed, run_seeds
from phalanx.simulate.scenario.load import load_scenario
from phalanx.simulate.world.incidents import Incidents, expected_interruptions

# One job of 1,024 GPUs that fails about five times a day, on a fleet with enough spares.
DAYS = 5
PLAIN = [
    "fleet.gpus=1024",
    "fleet.spare_nodes=16",
    f"days={DAYS}",
    "faults.per_1000_node_days=40",
    "faults.planned_per_day=0",
    "restart.spread=0",
    "restart.seconds=200",
    "detection.seconds=30",
    "checkpoint.interval_seconds=600",
    "checkpoint.stall_seconds=5",
    "checkpoint.flush_seconds=0",
    "repair.hours=4",
    "faults.causes.silent_corruption=0",
]


@functools.cache
def run(*changes: str, seed: int = 0) -> SeedResult:
    """A seed of the plain scenario with changes, played once for all tests that look at it."""
    result = run_seed(load_scenario("llama3-54d", [*PLAIN, *changes]), seed)
    assert not result.found
    return result


@pytest.fixture(scope="module")
def six_seeds() -> SimulationReport:
    return summarise("plain", [run(seed=seed) for seed in range(6)], 1.0)


def test_interruptions_come_as_often_as_the_rates_say(six_seeds: SimulationReport) -> None:
    expected = expected_interruptions(load_scenario("llama3-54d", PLAIN))
    for one in six_seeds.seeds:
        assert abs(one.interruptions - expected) < 4 * math.sqrt(expected)
    mean = six_seeds.summary.mean["interruptions"]
    assert abs(mean - expected) < 3 * math.sqrt(expected / 6)


def test_effective_time_agrees_with_the_formula_where_its_assumptions_hold(
    six_seeds: SimulationReport,
) -> None:
    scenario = load_scenario("llama3-54d", PLAIN)
    # The formula with the number of faults that there were, not the one expected.
    mtbf = scenario.days * 86400 / six_seeds.summary.mean["interruptions"]
    interval, stall, recovery = 600, 5, 230
    formula = (1 - (recovery + interval / 2) / mtbf) / (1 + stall / interval)
    assert math.isclose(six_seeds.summary.mean["ettr"], formula, abs_tol=0.004)


def test_without_faults_only_checkpoints_and_the_first_start_cost_anything() -> None:
    result = run("faults.per_1000_node_days=0")
    assert result.interruptions == 0 and result.formations == 1
    assert result.mtbf_hours is None  # nobody can say after how long one would have come
    summary = summarise("calm", [result], 1.0).summary
    assert "mtbf_hours" not in summary.mean and summary.mean["interruptions"] == 0
    steps_between = round(600 / 6.3)
    stalls = 5 / (steps_between * 6.3 + 5)
    start = 200 / (DAYS * 86400)
    assert math.isclose(result.ettr, 1 - stalls - start, abs_tol=2e-5)


@pytest.mark.parametrize(
    ("change", "worse"),
    [
        ("faults.per_1000_node_days=80", True),
        ("restart.seconds=600", True),
        ("detection.seconds=120", True),
        ("checkpoint.interval_seconds=3600", True),
        ("checkpoint.stall_seconds=40", True),
        ("checkpoint.flush_seconds=400", True),
        ("restart.seconds=20", False),
        ("detection.seconds=0", False),
        ("checkpoint.stall_seconds=0", False),
        ("checkpoint.memory_steps=1", False),
    ],
)
def test_every_time_and_cost_moves_effective_time(change: str, worse: bool) -> None:
    plain, changed = run(), run(change)
    assert (changed.ettr < plain.ettr - 0.001) == worse
    assert (changed.ettr > plain.ettr + 0.001) != worse


@pytest.mark.parametrize(
    "change",
    [
        "restart.rejoin_seconds=400",
        "restart.spread=1.5",
        "restart.standby_seconds=2",
        "detection.seconds=3600",
    ],
)
def test_times_that_the_world_has_never_end_a_job(change: str) -> None:
    result = run("restart.seconds=0", change)
    assert result.failed == {} and result.jobs_failed == 0
    assert result.steps > 1000  # it went on to the end


def test_a_hang_of_a_node_that_needs_no_repair_blocks_a_forming_gang_and_nothing_else(
    tmp_path: Path,
) -> None:
    path = tmp_path / "hangs.toml"
    cause = '[[cause]]\nname = "nccl_timeout"\nshare = 1\nsymptom = "hang"\nrepair_hours = 0\n'
    path.write_text('per_1000_node_days = 400\nabout = "x"\nsource = "x"\n' + cause)
    result = run("restart.seconds=0", "days=5", f"faults.model={path}", "faults.causes={}")
    assert result.jobs_failed == 0 and result.steps > 1000


def test_policies_meet_the_same_faults() -> None:
    plain, slow = run(), run("restart.seconds=600", "checkpoint.interval_seconds=1800")
    # Hits differ only where another node stands in the gang at the time.
    assert abs(slow.interruptions - plain.interruptions) <= 3


def test_without_spares_a_rigid_job_waits_for_repairs() -> None:
    with_spares, without = run(), run("fleet.spare_nodes=0")
    assert without.goodput < with_spares.goodput - 0.2


def test_an_elastic_job_shrinks_instead_of_waiting() -> None:
    shape = ("fleet.spare_nodes=0", "job.pipeline=2")
    rigid = run(*shape)
    elastic = run(*shape, "job.least_replicas=48")
    assert elastic.goodput > rigid.goodput + 0.2
    assert elastic.rungs.get("shrink", 0) > 0 and elastic.rungs.get("grow", 0) > 0


def test_an_elastic_job_goes_on_while_its_replacements_start() -> None:
    shape = ("days=5", "faults.per_1000_node_days=200", "restart.seconds=0", "restart.spread=0")
    slow = (*shape, "restart.start_seconds=600", "restart.standby_seconds=15")
    slow = (*slow, "job.pipeline=2", "job.least_replicas=48")
    slow = (*slow, "checkpoint.memory_steps=1", "policy.peer_memory=true")
    waits, goes_on = run(*slow, "policy.start_wait_seconds=600"), run(*slow)
    assert waits.rungs.get("shrink", 0) < goes_on.rungs["shrink"] // 4
    assert goes_on.steps > 1.05 * waits.steps
    assert goes_on.mean_recovery_seconds < waits.mean_recovery_seconds / 2


def test_another_spread_of_restarts_leaves_their_mean() -> None:
    report = run_seeds(
        load_scenario("llama3-54d", [*PLAIN, "restart.spread=1", "restart.seconds=0"]),
        range(4),
    )
    mean, even = report.summary.mean, run("restart.seconds=0")
    # The core gives up a phase that takes longer than its deadline, so the tail is cut.
    assert mean["mean_recovery_seconds"] < 1.25 * even.mean_recovery_seconds


def test_longer_repairs_use_more_spares() -> None:
    short, long = run("repair.hours=1"), run("repair.hours=24")
    assert long.buckets["quarantined"] > 3 * short.buckets["quarantined"]


def test_slow_nodes_cost_straggler_time_until_they_are_found() -> None:
    common = ("faults.per_1000_node_days=0", "faults.slow_per_1000_node_days=50")
    found_late = run(*common, "detection.slow_steps=200")
    found_soon = run(*common, "detection.slow_steps=5")
    assert found_late.buckets["straggler"] > 1.2 * found_soon.buckets["straggler"] > 0


BY_KIND = ("detection.seconds=none", "restart.seconds=0", "checkpoint.memory_steps=1")


def test_a_checkpoint_that_became_durable_too_late_to_be_told_is_found_by_the_next_gang() -> None:
    from phalanx.simulate.scenario.workload import submissions
    from phalanx.simulate.world.world import World

    scenario = load_scenario("llama3-54d", [*PLAIN, "faults.per_1000_node_days=0", "days=0.005"])
    world = World(scenario, 0)
    world.gangs.durable[1] = 100  # of its one job, which has told nothing
    world.run(submissions(scenario, world.draws).jobs)
    assert 100 < world.view.jobs[1].step < 200 and world.checks.found == []


def test_peers_find_a_dead_node_before_its_heartbeats_do() -> None:
    deaths = ("faults.per_1000_node_days=0", "faults.causes.power=40", *BY_KIND)
    quiet, told = run(*deaths), run(*deaths, "detection.peer_seconds=1")
    assert told.buckets["detection"] < 0.6 * quiet.buckets["detection"]
    assert told.rungs == quiet.rungs  # the same nodes were given up, only sooner


def test_peers_that_notice_after_the_heartbeats_change_nothing() -> None:
    deaths = ("faults.per_1000_node_days=0", "faults.causes.power=40", *BY_KIND)
    assert run(*deaths, "detection.peer_seconds=60").ettr == run(*deaths).ettr


def test_a_standby_process_shortens_restarts_in_place() -> None:
    bugs = ("faults.per_1000_node_days=0", "faults.causes.software_bug=40", *BY_KIND)
    slow = (
        "restart.start_seconds=120",
        "restart.rejoin_seconds=5",
        "restart.restore_peer_seconds=5",
    )
    cold = run(*bugs, *slow)
    ready = run(*bugs, *slow, "restart.standby_seconds=10")
    assert cold.jobs_failed == ready.jobs_failed == 0
    assert set(cold.rungs) == set(ready.rungs) == {"first_in_line", "in_place"}
    assert ready.buckets["restart"] < 0.4 * cold.buckets["restart"]


def test_a_brownout_of_storage_delays_what_needs_it() -> None:
    dark = run("faults.storage_per_day=20", "faults.storage_minutes=30")
    assert dark.ettr < run().ettr - 0.01


def test_gangs_train_on_while_no_controller_runs_and_failures_wait_for_the_next_one() -> None:
    lost = run("faults.controller_per_day=20", "faults.controller_minutes=20")
    assert lost.violations == 0 and lost.interruptions == run().interruptions
    assert lost.buckets["detection"] > 1.5 * run().buckets["detection"]
    alone = run("faults.per_1000_node_days=0", "faults.controller_per_day=20")
    assert alone.ettr == pytest.approx(run("faults.per_1000_node_days=0").ettr, abs=1e-6)


def test_corruption_takes_steps_back_and_the_culprit_out() -> None:
    common = ("faults.per_1000_node_days=0", "faults.causes.silent_corruption=20")
    result = run(*common)
    assert result.by_cause.keys() == {"silent_corruption"}
    assert result.buckets["recompute"] > 0


def test_silent_corruption_may_come_from_a_few_nodes_which_are_quarantined() -> None:
    common = [*PLAIN, "days=30", "faults.per_1000_node_days=0", "faults.causes.silent_corruption=9"]
    scenario = load_scenario("llama3-54d", [*common, "faults.corrupting_nodes=7"])
    result, world, _ = played(scenario, 0)
    incidents = Incidents(scenario, world.fleet, SeedDraws(0))
    faults = [fault for _, fault in zip(range(37), incidents, strict=False)]
    assert len({fault.nodes for fault in faults}) <= 7 < len(faults)
    guilty = {node for fault in faults for node in fault.nodes}
    caught = {
        node
        for node, changes in world.fleet.history.items()
        if any(change.state is NodeState.QUARANTINED for change in changes)
    }
    assert result.interruptions and caught and caught <= guilty


def test_a_seed_is_played_again_to_the_same_end() -> None:
    scenario = load_scenario("multi-tenant", ["days=0.5", "fleet.gpus=256"])
    first, again = played(scenario, 3), played(scenario, 3)
    assert first[1].core.snapshot() == again[1].core.snapshot()
    assert first[0].events == again[0].events


def test_the_log_of_a_long_run_replays_to_the_same_state() -> None:
    from phalanx.simulate.rules.invariants import Invariants
    from phalanx.simulate.scenario.workload import submissions
    from phalanx.simulate.world.world import World

    scenario = load_scenario("llama3-54d", [*PLAIN, "days=10"])
    world = World(scenario, 1)
    checks = world.driver.checks = Invariants(world.core, 100, 150)
    world.run(submissions(scenario, world.draws).jobs)
    checks.replay()
    assert world.driver.events > 600
    assert checks.found == []


def test_many_jobs_share_a_fleet_without_violations() -> None:
    scenario = load_scenario("multi-tenant", ["days=1", "fleet.gpus=512"])
    result = run_seed(scenario, 1)
    assert result.violations == 0
    assert result.jobs_done > 0.7 * result.jobs
    assert result.jobs_failed > 0  # users make mistakes


def test_expected_interruptions_count_what_jobs_held() -> None:
    # Many faults in a short time say as much as few in a long one, and sooner.
    often = ["fleet.gpus=256", "days=0.5", "faults.per_1000_node_days=2000"]
    for load in ("0.3", "0.9"):
        changes = [*often, f"workload.utilisation={load}"]
        scenario = load_scenario("multi-tenant", changes)
        report = run_seeds(scenario, range(4))
        expected = report.summary.mean["expected_interruptions"]
        found = report.summary.mean["interruptions"]
        assert abs(found - expected) < 4 * math.sqrt(expected / 4)
        assert expected < 0.9 * expected_interruptions(scenario)


def test_a_queue_that_lets_jobs_wait_too_long_is_caught_in_a_scenario() -> None:
    small = ["fleet.gpus=64", "days=0.5"]
    assert run_seed(load_scenario("multi-tenant", small), 0).found == []
    told = run_seed(load_scenario("multi-tenant", [*small, "workload.starved_days=1e-4"]), 0).found
    assert told and all(one.startswith("starved") for one in told)
