"""What arithmetic says of a fleet, and that the simulator agrees."""

from __future__ import annotations

import pytest

from phalanx.cluster.jobs.job import Expected, GangShape, JobSpec
from phalanx.cluster.jobs.measured import shared_step_ns
from phalanx.cluster.protocol.commands import Restore
from phalanx.cluster.protocol.events import Event, GangJoined, Submit
from phalanx.cluster.reasons import Reason
from phalanx.simulate.result import SeedResult
from phalanx.simulate.runner import played
from phalanx.simulate.scenario.load import load_scenario
from phalanx.simulate.scenario.shape import big_job
from phalanx.simulate.world.fault_injector import FaultInjector
from phalanx.simulate.world.world import World

STEP_SECONDS = 6.3
QUIET = ["faults.planned_per_day=0", "faults.per_1000_node_days=0", "fleet.gpus=1024", "days=10"]


def play(*changes: str, seed: int = 1) -> tuple[SeedResult, World]:
    scenario = load_scenario("llama3-54d", [*QUIET, *changes])
    result, world, _ = played(scenario, seed)
    return result, world


def clean(*changes: str, seed: int = 1) -> tuple[SeedResult, World]:
    result, world = play(*changes, seed=seed)
    assert not result.found
    return result, world


def kept_share(result: SeedResult) -> float:
    """Effective time as counted by steps instead of by the ledger."""
    return result.steps * STEP_SECONDS / (result.days * 86400)


@pytest.mark.parametrize(
    "ends",
    [
        ("faults.per_1000_node_days=20", "repair.hours=99999", "repair.spread=0"),  # waits for ever
        ("job.steps=100",),  # has done all its work
        (),
    ],
)
def test_the_books_are_closed_at_the_end_of_time(ends: tuple[str, ...]) -> None:
    result, _ = clean("fleet.gpus=64", "fleet.spare_nodes=0", "days=20", *ends)
    assert result.gpu_hours == 64 * 20 * 24
    assert sum(result.buckets.values()) == pytest.approx(1, abs=1e-9)
    if "job.steps=100" not in ends:
        assert result.ettr == pytest.approx(kept_share(result), rel=1e-4)
        assert result.goodput == pytest.approx(result.ettr, rel=1e-4)  # all GPUs are the job's


DEATHS = (
    "fleet.spare_nodes=8",
    "faults.causes.power=4",
    "detection.seconds=1800",
    "repair.spread=0",
)


def test_a_node_that_is_repaired_before_anybody_missed_it_says_that_its_workers_are_gone() -> None:
    soon, _ = clean(*DEATHS, "repair.hours=0.45")
    late, _ = clean(*DEATHS, "repair.hours=0.55")
    assert soon.recoveries == soon.interruptions > 0
    assert soon.ettr >= late.ettr


def test_a_gang_that_nobody_finds_breaks_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultInjector, "back", lambda self, node, cause: None)
    result, _ = play(*DEATHS, "repair.hours=0.45")
    assert [told for told in result.found if told.startswith("liveness")]


def test_half_the_replicas_make_half_the_steps() -> None:
    result, world = clean(
        "fleet.gpus=256",
        "fleet.spare_nodes=0",
        "faults.per_1000_node_days=4",
        "job.least_replicas=1",
        "repair.hours=2000",
    )
    whole_ns, _, _ = world.record.interruptions[0]
    placement = world.view.jobs[1].placement
    assert placement is not None and placement.replicas == 1
    alone, _ = clean("fleet.gpus=256", "fleet.spare_nodes=0")
    share = (whole_ns + (world.end_ns - whole_ns) / 2) / world.end_ns
    assert result.steps == pytest.approx(alone.steps * share, rel=0.01)
    assert result.ettr == pytest.approx(kept_share(result), rel=1e-4)


def test_fewer_replicas_share_the_batch_and_the_one_with_most_parts_of_it_decides() -> None:
    spec = JobSpec(name="x", gang=GangShape(replicas=8), expected=Expected(step_ns=1000))
    assert [shared_step_ns(spec, replicas) for replicas in (8, 4, 2, 16)] == [1000, 2000, 4000, 500]
    parts = Expected(step_ns=1000, micro_batches=4)
    split = JobSpec(name="x", gang=GangShape(replicas=8), expected=parts)
    assert [shared_step_ns(split, replicas) for replicas in (8, 7, 4)] == [1000, 1250, 2000]


def test_steps_that_are_thrown_away_are_not_kept() -> None:
    result, world = clean(
        "fleet.spare_nodes=8",
        "faults.per_1000_node_days=8",
        "checkpoint.interval_seconds=0",
        seed=2,
    )
    made = sum(world.core.ledger.accounts[1].buckets[name] for name in ("productive", "recompute"))
    assert result.recoveries > 5 and result.buckets["recompute"] > 0.8
    assert result.ettr == pytest.approx(kept_share(result), rel=1e-3)
    assert made > 0 and result.steps == world.core.ledger.accounts[1].step


SLOW = (
    "fleet.spare_nodes=0",
    "detection.slow_steps=1000000",
    "faults.slow_per_1000_node_days=40",
    "faults.slow_minutes=60",
)


def test_slowness_costs_its_time_less_what_is_done_in_it() -> None:
    lost, effective = [], []
    for factor in (1, 2, 10, 1000, 10_000):
        result, _ = clean(*SLOW, f"faults.slow_factor={factor}")
        lost.append((factor, result.buckets.get("straggler", 0.0)))
        effective.append(result.ettr)
        assert result.ettr == pytest.approx(kept_share(result), rel=1e-3)
    whole = lost[-1][1]
    assert whole > 0.1
    for factor, share in lost:
        assert share == pytest.approx(whole * (1 - 1 / factor), abs=0.002)
    assert effective == sorted(effective, reverse=True)


def test_a_slow_spare_is_found_once_it_works() -> None:
    result, world = clean(
        "days=30",
        "fleet.spare_nodes=20",
        "faults.slow_per_1000_node_days=2",
        "faults.slow_minutes=100000",
        "faults.slow_factor=1.5",
    )
    placement = world.view.jobs[1].placement
    assert placement is not None and world.slow.factor_ppm(placement.nodes) == 0
    assert result.buckets["straggler"] < 0.002


FLAPPING = (
    "faults.slow_per_1000_node_days=1000",
    "faults.slow_minutes=3",
    "faults.slow_factor=1.0001",
    "detection.slow_steps=100000",
)


def test_wrong_numbers_are_found_whatever_becomes_of_the_speed() -> None:
    wrong = ("days=20", "fleet.spare_nodes=20", "faults.causes.silent_corruption=10")
    steady, _ = clean(*wrong)
    flapping, _ = clean(*wrong, *FLAPPING)
    assert steady.ettr == pytest.approx(flapping.ettr, abs=0.003)


def test_a_planned_stop_saves_everything_whatever_becomes_of_the_speed() -> None:
    stops = ("faults.planned_per_day=20", "checkpoint.flush_seconds=120", *FLAPPING)
    result, _ = clean(*stops)
    assert result.planned > 100 and "recompute" not in result.buckets


def one_job() -> World:
    scenario = load_scenario("llama3-54d", [*QUIET, "days=0.2"])
    world = World(scenario, 0)
    world.run([(0, big_job(scenario))])
    assert not world.checks.found
    return world


def rules(world: World) -> list[str]:
    return [violation.rule for violation in world.checks.found]


def restore(step: int) -> Restore:
    return Restore(reason=Reason("x"), job=1, generation=2, step=step, source="remote")


def test_a_restore_of_less_than_is_durable_breaks_a_rule() -> None:
    world = one_job()
    saved = world.gangs.saved[1]
    world.checks.restores(restore(saved[-1]))
    assert rules(world) == []
    world.checks.restores(restore(0))
    assert rules(world) == ["committed"]


def test_a_restore_of_wrong_numbers_breaks_a_rule() -> None:
    world = one_job()
    saved = world.gangs.saved[1]
    world.gangs.clean[1] = saved[-2]
    world.checks.restores(restore(saved[-2]))
    assert rules(world) == []
    world.checks.restores(restore(saved[-1]))
    assert rules(world) == ["committed"]


def test_a_log_that_does_not_replay_breaks_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.simulate.rules.world_rules.REPLAYED", 20)
    scenario = load_scenario("llama3-54d", [*QUIET, "days=0.2"])
    world = World(scenario, 0)
    replayed = []
    handle = world.checks.after

    def forgetful(event: object, commands: object) -> None:
        handle(event, commands)  # type: ignore[arg-type]
        if len(world.checks._tail) == 10:
            replayed.append(world.checks._tail.pop())

    world.driver.checks.after = forgetful  # type: ignore[method-assign, assignment]
    world.run([(0, big_job(scenario))])
    assert replayed and "replay" in rules(world)


def test_time_that_is_missing_from_the_books_breaks_a_rule() -> None:
    world = one_job()
    world.end_ns += 1
    world.checks.close()
    assert rules(world) == ["ledger"]


def test_a_job_that_waits_while_nothing_runs_breaks_a_rule() -> None:
    scenario = load_scenario("llama3-54d", QUIET)
    world = World(scenario, 0)
    world.tell(Submit(spec=big_job(scenario)))
    world.checks.look()
    assert rules(world) == []
    world.agenda.now_ns += 6 * 3600 * 10**9
    world.checks.look()
    assert rules(world) == ["liveness"]


def test_fewer_micro_batches_for_a_slow_replica_cost_what_the_slowest_replica_takes() -> None:
    slow = (
        "fleet.spare_nodes=0",
        "job.pipeline=1",
        "job.micro_batches=8",
        "detection.slow_steps=10",
        "faults.slow_per_1000_node_days=1",
        "faults.slow_share_network=0",
        "faults.slow_minutes=100000",
        "faults.slow_factor=1.5",
    )
    borne, _ = clean(*slow, "policy.rebalance=false", seed=2)
    shared, _ = clean(*slow, seed=2)
    # One of 128 replicas is slow. Six micro-batches of it last as long as nine of the others, of
    # which some have to make nine: a step takes 9/8 of its time instead of 3/2.
    third = borne.buckets["straggler"] * (1 / 9) / (1 / 3)
    assert shared.buckets["straggler"] == pytest.approx(third, rel=0.02)
    assert shared.ettr == pytest.approx(kept_share(shared), rel=1e-3)


def test_a_gang_that_joins_tells_which_checkpoint_the_storage_has() -> None:
    scenario = load_scenario("llama3-54d", [*QUIET, *DEATHS, "repair.hours=1"])
    _, world, _ = played(scenario, 1, loud=True)
    bodies = [entry.body for entry, _, _ in world.story.entries if isinstance(entry, Event)]
    joined = [body for body in bodies if isinstance(body, GangJoined)]
    assert joined[0].durable == 0
    assert len(joined) > 1 and all(body.durable > 0 for body in joined[1:])
