"""What ways out cost: the pause, slower steps, and the failures that come next."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.gang.node_rates import rated
from phalanx.cluster.jobs.horizon import Horizon
from phalanx.cluster.jobs.job import Expected, GangShape
from phalanx.cluster.placement.free_index import FreeIndex
from phalanx.cluster.policy import HealthPolicy, Policy, RecoveryPolicy
from phalanx.cluster.protocol.events import NodeRepaired, NodeSilent
from phalanx.cluster.protocol.messages import CheckResult, WorkerExited
from phalanx.cluster.recovery import prices
from phalanx.cluster.recovery.options import Rung, options, ways_without
from tests.cluster.drive import EXPECTED, SECOND, Drive

WIDE = GangShape(replicas=8, least_replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)
SHARED = structs.replace(EXPECTED, micro_batches=4)
DAY = 86400 * SECOND


def often_failing(per_million_node_days: int) -> Policy:
    rates = HealthPolicy(failures_per_million_node_days=per_million_node_days)
    return Policy(health=rates, recovery=RecoveryPolicy(keep_memory_ns=0))


@pytest.mark.parametrize("failures", [0.0, 0.01, 0.5, 1.0, 3.0])
def test_an_attempt_that_failures_begin_anew_takes_as_long_as_arithmetic_says(failures):
    span = 100 * SECOND
    found = prices.until_through_ns(span, round(failures * 1e6))
    factor = math.expm1(failures) / failures if failures else 1.0
    assert found == pytest.approx(span * factor, rel=1e-6)


def test_a_gang_that_would_never_run_again_still_has_a_price():
    assert prices.until_through_ns(SECOND, 10**12) < 10**7 * SECOND


def test_how_often_a_gang_fails_follows_from_its_size_and_from_what_was_seen():
    drive = Drive(8, often_failing(4_000))
    job = drive.running(gang=WIDE)
    ctx = drive.core._ctx
    whole = prices.failures_ppm(prices.as_it_is(ctx, job), 64, DAY)
    assert whole == pytest.approx(32_000, rel=0.01)  # 4 in 1000 node-days, 8 nodes, a day
    assert prices.failures_ppm(prices.as_it_is(ctx, job), 32, DAY) == pytest.approx(
        whole // 2, rel=0.01
    )
    for _ in range(3):
        node = job.placement.nodes[0]
        exit_ = WorkerExited(
            job=job.id, generation=job.generation, node=node, rank=0, cause="nccl_timeout"
        )
        drive.tell(exit_)
        drive.settle(job)
        drive.run(job)
        drive.train(job, 10)
    assert prices.failures_ppm(prices.as_it_is(ctx, job), 64, DAY) > 2 * whole


def test_a_restart_that_takes_long_is_likely_to_be_interrupted():
    calm, rough = Drive(8, often_failing(1)), Drive(8, often_failing(50_000_000))
    pauses = []
    for drive in (calm, rough):
        job, ctx = drive.running(gang=WIDE), drive.core._ctx
        pauses.append(
            prices.pause_ns(ctx, job, prices.as_it_is(ctx, job), 64, started_ns=300 * SECOND)
        )
    assert pauses[0] == pytest.approx(310 * SECOND, rel=1e-3)  # formed, and restored from memory
    assert pauses[1] > 1.1 * pauses[0]  # though 750 s without a failure have lowered the rate


def test_one_replica_less_costs_as_much_as_its_micro_batches_say():
    drive = Drive(8)
    job = drive.running(gang=WIDE, expected=SHARED)
    day = 64 * DAY
    assert prices.slower_gpu_ns(job, 8, DAY) == 0
    # 32 micro-batches over 7 replicas: one of them has five, and steps take 5/4 as long.
    assert prices.slower_gpu_ns(job, 7, DAY) == day - day * 4 // 5
    assert prices.slower_gpu_ns(job, 4, DAY) == day // 2
    plain = drive.core.view.jobs[job.id]
    plain.spec = structs.replace(plain.spec, expected=EXPECTED)
    assert prices.slower_gpu_ns(job, 7, DAY) == pytest.approx(8 * DAY, rel=1e-6)


def test_a_gang_that_has_lost_speed_already_loses_no_more_with_the_next_replica():
    drive = Drive(8)
    job = drive.running(gang=WIDE, expected=SHARED)
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(SECOND)
    assert job.placement.replicas == 7
    assert prices.slower_gpu_ns(job, 7, DAY) == 0
    assert prices.slower_gpu_ns(job, 6, DAY) > 0  # six micro-batches


def test_failures_to_come_cost_more_where_nobody_has_a_second_copy():
    drive = Drive(8, often_failing(1_000_000))
    job = drive.running(gang=WIDE)
    ctx = drive.core._ctx
    nodes = job.placement.nodes
    two, one = (
        prices.to_come_gpu_ns(ctx, job, rated(ctx, nodes[:count]), 8 * count, DAY)
        for count in (2, 1)
    )
    assert two < 0  # fewer nodes fail less often, and hold up fewer
    assert one > two


def test_the_fixed_order_takes_the_first_rung_that_there_is():
    suspected = {}
    for order in ("predicted", "fixed"):
        drive = Drive(8, Policy(recovery=RecoveryPolicy(order=order)))
        job = drive.running(spares=1)
        node = job.placement.nodes[1]
        drive.tell(WorkerExited(job=job.id, generation=1, node=node, rank=8, cause="nic"))
        drive.wait(SECOND)
        suspected[order] = drive.last_form().reason.facts["rung"]
    assert suspected == {"predicted": "swap", "fixed": "in_place"}


def test_the_fixed_order_swaps_a_node_that_fails_again():
    drive = Drive(8, Policy(recovery=RecoveryPolicy(order="fixed")))
    job = drive.running(spares=1)
    node = job.placement.nodes[1]
    rungs = []
    for _ in range(2):
        generation = job.generation
        drive.tell(WorkerExited(job=job.id, generation=generation, node=node, rank=8, cause="nic"))
        drive.settle(job)
        rungs.append(drive.last_form().reason.facts["rung"])
        drive.run(job)
    assert rungs == ["in_place", "swap"]


def test_the_fixed_order_goes_down_the_ladder():
    drive = Drive(8, Policy(recovery=RecoveryPolicy(order="fixed")))
    job = drive.running(gang=WIDE)
    ways = ways_without(drive.core._ctx, job, (job.placement.nodes[0],), "node_silent")
    assert [way.rung for way in ways] == [Rung.SHRINK, Rung.REQUEUE]


def test_every_way_is_priced_and_the_next_best_is_said():
    drive = Drive(8)
    job = drive.running(spares=1)
    node = job.placement.nodes[1]
    drive.tell(WorkerExited(job=job.id, generation=1, node=node, rank=8, cause="nic"))
    ways = options(drive.core._ctx, job)
    assert [way.rung for way in ways] == [Rung.SWAP, Rung.IN_PLACE, Rung.REQUEUE]
    assert all(way.loss_gpu_ns > 0 for way in ways)
    drive.wait(SECOND)
    said = drive.last_form().reason.facts
    assert said["rung"] == "swap" and said["loss"] == ways[0].loss_gpu_ns // 10**9
    assert said["other"].startswith(f"in_place with {ways[1].loss_gpu_ns // 10**9}")


@pytest.mark.parametrize(("times", "taken"), [(1.03, False), (1.2, True)])
def test_nodes_are_not_given_up_to_save_a_little(
    monkeypatch: pytest.MonkeyPatch, times: float, taken: bool
):
    """Who leaves may have to wait for others: that must be worth a twentieth."""
    drive = Drive(8)
    job = drive.running(spares=1)
    ctx, node = drive.core._ctx, job.placement.nodes[1]
    swapped, requeued = ways_without(ctx, job, (node,), "node_silent")
    assert (swapped.rung, requeued.rung) == (Rung.SWAP, Rung.REQUEUE)
    dearer = structs.replace(swapped, loss_gpu_ns=int(times * requeued.loss_gpu_ns))
    monkeypatch.setattr("phalanx.cluster.recovery.options._reshaped", lambda *_: dearer)
    ways = ways_without(ctx, job, (node,), "node_silent")
    assert ways[0].rung is (Rung.REQUEUE if taken else Rung.SWAP)


def test_a_gang_does_not_pause_for_replicas_that_make_no_step_faster():
    # 24 micro-batches: eight replicas have three, seven and six have four.
    thrifty = Expected(step_ns=5 * SECOND, checkpoint_steps=100, micro_batches=3)
    drive = Drive(8, Policy(recovery=RecoveryPolicy(grow_after_ns=0)))
    job = drive.running(gang=WIDE, expected=thrifty)
    first, second = job.placement.nodes[:2]
    for node in (first, second):
        drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)
    assert job.placement.replicas == 6
    drive.run(job)
    back(drive, first)
    assert job.placement.replicas == 6 and job.state == "running"
    back(drive, second)
    assert job.placement.replicas == 8


def back(drive: Drive, node: int) -> None:
    drive.tell(NodeRepaired(node=node))
    drive.tell(CheckResult(node=node, check="full", passed=True))
    drive.wait(SECOND)


def test_the_first_decision_of_a_restored_core_makes_no_index() -> None:
    """Indices over the fleet are made when it is restored, and kept up when a gang is ready."""
    drive = Drive(64)
    job = drive.running(gang=structs.replace(WIDE, replicas=48))
    restored = Core.restore(drive.core.snapshot())
    renewed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for made in (Horizon, FreeIndex):
            patch.setattr(made, "_renew", lambda *given: renewed.append(given[-1]))
        for core in (drive.core, restored):
            ways = ways_without(core._ctx, core.view.jobs[job.id], (3,), "node_silent")
            assert ways[0].rung is Rung.SWAP
    assert renewed == []
