"""A gang goes on without slow starters, and grows when and where that pays, failures included."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import ClusterJob, Expected, GangShape
from phalanx.cluster.node import NodeState
from phalanx.cluster.policy import DAY_NS, HealthPolicy, Policy, RecoveryPolicy, SparePolicy
from phalanx.cluster.protocol.commands import Form, Notify
from phalanx.cluster.protocol.events import NodeRepaired, NodeSilent, Scale
from phalanx.cluster.protocol.messages import CheckResult
from phalanx.cluster.recovery import growth
from tests.cluster.drive import SECOND, Drive

EIGHT = GangShape(replicas=8, least_replicas=4, tensor=8, slot_gpus=8, slot_cpus=8)
STAGES = GangShape(
    replicas=4, least_replicas=2, tensor=8, pipeline=2, slot_gpus=8, slot_cpus=8, whole_nodes=True
)
MINUTE = 60 * SECOND
# Ten minutes until a new worker can join; those that live are there in a second.
SLOW = Expected(
    step_ns=5 * SECOND,
    checkpoint_steps=100,
    start_ns=10 * MINUTE,
    standby_ns=5 * SECOND,
    rejoin_ns=SECOND,
    micro_batches=10,
)


def lose(drive: Drive, job: ClusterJob, slot: int) -> int:
    node = job.placement.nodes[slot]
    drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)
    return int(node)


def back(drive: Drive, node: int) -> None:
    drive.tell(NodeRepaired(node=node))
    drive.tell(CheckResult(node=node, check="full", passed=True))
    drive.wait(SECOND)


@pytest.mark.parametrize(
    ("expected", "policy", "rung", "replicas"),
    [
        (SLOW, RecoveryPolicy(), "shrink", 7),
        (SLOW, RecoveryPolicy(start_wait_ns=10 * MINUTE), "swap", 8),  # it is waited for
        (structs.replace(SLOW, start_ns=30 * SECOND), RecoveryPolicy(), "swap", 8),
        (SLOW, RecoveryPolicy(shrink=False), "swap", 8),
        # Two micro-batches: without one of eight replicas steps take three, half as long again.
        (
            structs.replace(SLOW, micro_batches=2, start_ns=2 * MINUTE),
            RecoveryPolicy(),
            "shrink",
            7,
        ),
    ],
)
def test_a_replacement_that_needs_minutes_is_not_waited_for(
    expected: Expected, policy: RecoveryPolicy, rung: str, replicas: int
) -> None:
    drive = Drive(9, Policy(recovery=policy))
    job = drive.running(gang=EIGHT, expected=expected)
    lose(drive, job, 1)
    assert drive.last_form().reason.facts["rung"] == rung
    assert job.placement.replicas == replicas
    told = drive.last_form()
    assert (8 in told.spares, 8 in told.nodes) == (rung == "shrink", rung == "swap")


def test_it_comes_in_as_soon_as_it_has_started_and_the_gang_stands_still_for_a_moment() -> None:
    drive = Drive(9)
    job = drive.running(gang=EIGHT, expected=structs.replace(SLOW, start_ns=3 * MINUTE))
    lose(drive, job, 1)
    drive.run(job)
    assert job.placement.spares == (8,)
    drive.train(job, 20)
    assert job.placement.replicas == 7
    drive.wait(2 * MINUTE)
    assert job.placement.replicas == 8 and 8 in job.placement.nodes
    assert job.why.code == "grow" and job.why.facts["added"] == 1
    assert job.why.facts["faster"] > job.why.facts["pause"] + job.why.facts["failures"]
    drive.run(job)
    assert drive.last_restore().source == "peer"
    drive.core.ledger.check(drive.core.view)


def test_a_rigid_job_waits_for_the_replacement() -> None:
    drive = Drive(9)
    job = drive.running(gang=structs.replace(EIGHT, least_replicas=0), expected=SLOW)
    lose(drive, job, 1)
    assert drive.last_form().reason.facts["rung"] == "swap"


def test_nodes_of_the_cut_replica_replace_the_next_loss_at_once() -> None:
    """They had workers: another replica that loses a node takes one of them, and none is cut."""
    drive = Drive(10, Policy(spares=SparePolicy(nodes=2)))
    job = drive.running(gang=STAGES, expected=SLOW)
    lose(drive, job, 1)
    assert job.placement.replicas == 3 and len(job.placement.spares) == 2
    drive.run(job)
    drive.train(job, 2)
    lose(drive, job, 0)
    assert drive.last_form().reason.facts["rung"] == "swap"
    assert job.placement.replicas == 3
    drive.run(job)
    # What is missing now is asked of the pool, and starts while the gang runs.
    drive.wait(SECOND)
    assert len(job.placement.spares) == 2
    drive.wait(11 * MINUTE)
    assert job.placement.replicas == 4 and job.placement.spares == ()
    drive.run(job)
    drive.core.ledger.check(drive.core.view)


def test_a_node_that_comes_back_starts_its_workers_before_the_gang_stops_for_it() -> None:
    drive = Drive(8)
    job = drive.running(gang=EIGHT, expected=SLOW)
    node = lose(drive, job, 1)
    assert job.placement.replicas == 7
    drive.run(job)
    drive.train(job, 200)
    generation = job.generation
    back(drive, node)
    assert job.placement.replicas == 7 and job.placement.spares == (node,)
    assert job.generation == generation and job.state == "running"
    (told,) = [
        each for each in drive.sent if each.target == (node,) and isinstance(each.body, Form)
    ]
    assert told.body.generation == generation
    twin, since = Core.restore(drive.core.snapshot()), len(drive.log)
    drive.wait(10 * MINUTE)
    assert job.placement.replicas == 8
    for event in drive.log[since:]:
        twin.handle(event)
    assert twin.snapshot() == drive.core.snapshot()


def test_a_node_that_starts_and_is_lost_before_it_came_in_costs_the_gang_nothing() -> None:
    drive = Drive(9)
    job = drive.running(gang=EIGHT, expected=SLOW)
    lose(drive, job, 1)
    drive.run(job)
    drive.train(job, 2)
    generation = job.generation
    drive.tell(NodeSilent(node=8))
    drive.wait(20 * MINUTE)
    assert job.placement.replicas == 7 and job.generation == generation
    assert job.placement.spares == ()


# Growing, and the failures that more nodes bring.

CHEAP = Expected(step_ns=5 * SECOND, checkpoint_steps=100, micro_batches=10)


def shrunk(drive: Drive) -> tuple[ClusterJob, int]:
    job = drive.running(gang=EIGHT, expected=CHEAP)
    node = lose(drive, job, 1)
    drive.run(job)
    drive.train(job, 200)
    return job, node


def seen_to_fail(drive: Drive, per_node_day: int) -> None:
    """Of nodes that are new, so many fail a day; of old ones hardly any."""
    day = drive.core._ctx.health.failures["h100"].days[-1]
    days, failures = 10_000, 10_000 * per_node_day
    day.aged_gpu_seconds["first day"] = days * 8 * 86400
    day.aged_failures["first day"] = failures
    day.aged_gpu_seconds["older"] = 10_000 * 8 * 86400
    day.gpu_seconds += (days + 10_000) * 8 * 86400
    day.causes["hbm_ecc"] = day.causes.get("hbm_ecc", 0) + failures
    drive.core._ctx.node_rates = None


@pytest.mark.parametrize(("per_node_day", "grows"), [(0, True), (2, True), (1000, False)])
def test_a_gang_grows_onto_a_node_unless_its_failures_cost_more_than_it_gains(
    per_node_day: int, grows: bool
) -> None:
    drive = Drive(8)
    job, node = shrunk(drive)
    seen_to_fail(drive, per_node_day)
    back(drive, node)  # repaired: as new
    assert job.placement.replicas == (8 if grows else 7)
    said = [each.reason for each in drive.bodies(Notify) if each.reason.code == "stays_small"]
    assert len(said) == (0 if grows else 1)
    for why in said:
        facts = why.facts
        assert facts["pause"] < facts["faster"] < facts["pause"] + facts["failures"]


def test_what_did_not_pay_is_looked_at_again_when_rates_are() -> None:
    drive = Drive(8)
    job, node = shrunk(drive)
    seen_to_fail(drive, 1000)
    back(drive, node)
    assert job.placement.replicas == 7
    days = 0
    while job.placement.replicas == 7 and days < 40:
        drive.wait(DAY_NS)
        days += 1
    assert 28 <= days <= 32  # it has become old
    said = [each.reason.code for each in drive.bodies(Notify)]
    assert said.count("stays_small") == 1


def test_of_nodes_that_are_free_those_that_fail_less_are_taken_and_fewer_columns_if_need_be() -> (
    None
):
    drive = Drive(12, Policy(recovery=RecoveryPolicy(grow_after_ns=0)))
    job = drive.running(gang=structs.replace(EIGHT, most_replicas=12), expected=CHEAP)
    lose(drive, job, 1)
    drive.run(job)
    drive.train(job, 200)
    seen_to_fail(drive, 1000)
    ctx = drive.core._ctx
    free = [
        n for n in range(12) if ctx.fleet.state(n) is NodeState.HEALTHY and not ctx.fleet.held[n]
    ]
    assert len(free) == 3
    ctx.health.in_service[free[0]] = drive.now_ns
    ctx.node_rates = None
    one = next(iter(growth._growths(ctx, job, job.placement.replicas + 1)))
    assert one.nodes and free[0] not in one.nodes
    drive.tell(Scale(job=job.id, replicas=12))
    drive.wait(SECOND)
    assert free[0] not in job.placement.nodes
    assert job.placement.replicas == 10


def test_where_the_next_failure_makes_it_small_again_that_is_how_long_growing_helps() -> None:
    rough = Policy(health=HealthPolicy(failures_per_million_node_days=100_000_000))
    worth = []
    for policy in (Policy(), rough):
        drive = Drive(9, policy)
        job = drive.running(gang=EIGHT, expected=SLOW)
        lose(drive, job, 1)
        drive.run(job)
        (found, *_) = growth._growths(drive.core._ctx, job, 8)
        worth.append(found.faster_gpu_ns)
    assert worth[1] < worth[0] // 50
