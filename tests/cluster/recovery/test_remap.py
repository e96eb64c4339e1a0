"""A gang that lacks nodes goes on with another mapping on those that are left, and returns."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.context import FailureDay
from phalanx.cluster.core import Core
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import ClusterJob, FallbackMapping, GangShape, JobSpec
from phalanx.cluster.node import Node
from phalanx.cluster.plan_record import PlanRecord
from phalanx.cluster.policy import Policy, RecoveryPolicy
from phalanx.cluster.protocol.commands import Drain, Form, Notify, Refuse, Stop
from phalanx.cluster.protocol.events import (
    Cancel,
    GangDrained,
    NodeRepaired,
    NodeSilent,
    Scale,
    Submit,
)
from phalanx.cluster.protocol.messages import CheckResult, WorkerExited
from phalanx.cluster.recovery.options import Rung, ways_without
from tests.cluster.drive import EXPECTED, SECOND, Drive

MINUTE = 60 * SECOND
# Two stages of eight ranks, which on one node become eight ranks of one stage.
STAGES = GangShape(replicas=1, tensor=8, pipeline=2, slot_gpus=8, slot_cpus=8)
ONE_STAGE = structs.replace(STAGES, pipeline=1)
ON_ONE = FallbackMapping(
    gang=ONE_STAGE,
    expected=structs.replace(EXPECTED, step_ns=9 * SECOND),
    plan=PlanRecord(mapping="tensor 8"),
    payload="one stage",
)
TOMORROW = Policy()
SOON = Policy(recovery=RecoveryPolicy(repair_ns=3 * MINUTE))


def stages(drive: Drive, **fields: object) -> ClusterJob:
    """A job of two stages on two nodes that has made steps."""
    own = {"gang": STAGES, "payload": "two stages", "fallbacks": (ON_ONE,)}
    return drive.running(150, plan=PlanRecord(mapping="tensor 8, pipeline 2"), **{**own, **fields})


def lose(drive: Drive, *nodes: int) -> None:
    for node in nodes:
        drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)


def comes_back(drive: Drive, node: int) -> None:
    drive.tell(NodeRepaired(node=node))
    drive.tell(CheckResult(node=node, check="full", passed=True), SECOND)
    drive.wait(SECOND)


def test_it_goes_on_from_memory_with_another_mapping_on_the_node_that_is_left() -> None:
    drive = Drive(2)
    job = stages(drive)
    first, second = job.placement.nodes
    lose(drive, second)
    assert job.state == "forming" and job.why.facts["rung"] == "remap"
    assert job.why.facts["other"].startswith("requeue with ")
    form = drive.last_form()
    assert (form.nodes, form.world, form.replicas, form.payload) == ((first,), 8, 1, "one stage")
    assert form.kept_nodes == (first, second), "what these kept is looked for"
    drive.run(job)
    assert (drive.last_restore().step, drive.last_restore().source) == (150, "peer")
    assert job.lost_steps == 0 and job.step_ns == 0, "what was measured was of another mapping"
    drive.train(job, 10)
    assert job.step == 160 and job.expected.step_ns == 9 * SECOND
    told = [str(each.reason) for each in drive.bodies(Notify) if each.job == job.id]
    words = "goes on as tensor 8 instead of tensor 8, pipeline 2, on 1 of its 2 nodes"
    assert any(each.startswith(words) for each in told)
    drive.core.ledger.check(drive.core.view)


def test_a_replayed_log_and_a_snapshot_come_to_the_same_state() -> None:
    drive = Drive(2)
    job = stages(drive)
    twin, seen = Core.restore(drive.core.snapshot()), len(drive.log)
    lose(drive, job.placement.nodes[1])
    drive.run(job)
    again, later = Core.restore(drive.core.snapshot()), len(drive.log)
    drive.train(job, 10)
    drive.wait(11 * MINUTE)
    comes_back(drive, 1)
    drive.wait(MINUTE)
    for core, since in ((twin, seen), (again, later)):
        for event in drive.log[since:]:
            core.handle(event)
        assert core.snapshot() == drive.core.snapshot()


def test_it_returns_to_its_own_mapping_when_the_node_is_back() -> None:
    drive = Drive(2)
    job = stages(drive)
    own = job.spec
    gone = job.placement.nodes[1]
    lose(drive, gone)
    drive.run(job)
    drive.train(job, 10)
    comes_back(drive, gone)
    assert job.state == "running", "not at once: a mapping is kept for a while"
    while job.state == "running" and drive.now_ns < 60 * MINUTE:
        drive.wait(SECOND)
    assert job.state == "draining" and len(drive.bodies(Drain)) == 1
    assert str(job.why).startswith(
        "its nodes are there again: it returns at a step boundary from tensor 8 to its own mapping"
    )
    other = drive.submit(gang=ONE_STAGE, priority=1000)
    assert other.state == "pending", "the node is kept for it"
    drive.tell(GangDrained(job=job.id, generation=job.generation, step=job.step), SECOND)
    assert job.state == "forming" and job.spec == own and job.own is None
    drive.run(job)
    assert drive.last_restore().step == 160 and job.lost_steps == 0
    drive.train(job, 10)
    assert job.step == 170 and len(job.placement.nodes) == 2
    drive.core.ledger.check(drive.core.view)


def test_it_does_not_return_where_too_little_is_left_to_gain() -> None:
    drive = Drive(2)
    steps = structs.replace(EXPECTED, steps=165)
    shorter = structs.replace(ON_ONE.expected, steps=165)
    job = stages(drive, expected=steps, fallbacks=(structs.replace(ON_ONE, expected=shorter),))
    gone = job.placement.nodes[1]
    lose(drive, gone)
    drive.run(job)
    drive.train(job, 10)
    drive.wait(11 * MINUTE)
    comes_back(drive, gone)
    drive.wait(MINUTE)
    assert job.state == "running" and not drive.bodies(Drain)


def test_a_node_that_is_back_in_minutes_is_waited_for() -> None:
    slow = structs.replace(ON_ONE, expected=structs.replace(EXPECTED, step_ns=90 * SECOND))
    waits = stages(drive := Drive(2, SOON), fallbacks=(slow,))
    lose(drive, waits.placement.nodes[1])
    assert waits.why.facts["rung"] == "wait" and "remap with " in waits.why.facts["other"]
    goes_on = stages(drive := Drive(2, TOMORROW), fallbacks=(slow,))
    lose(drive, goes_on.placement.nodes[1])
    assert goes_on.why.facts["rung"] == "remap"


def test_a_spare_is_better_than_another_mapping() -> None:
    drive = Drive(3)
    job = stages(drive)
    lose(drive, job.placement.nodes[1])
    assert job.why.facts["rung"] == "swap" and job.own is None


def test_a_site_may_forbid_it_and_the_fixed_order_does_not_know_it() -> None:
    for policy in (RecoveryPolicy(remap=False), RecoveryPolicy(order="fixed")):
        drive = Drive(2, Policy(recovery=policy))
        job = stages(drive)
        lose(drive, job.placement.nodes[1])
        assert job.why.facts["rung"] == "requeue" and job.own is None


def four_stages() -> dict[str, object]:
    """Four stages, which can be two; the memory of two nodes is enough if they are not beside."""
    halves = structs.replace(STAGES, pipeline=2)
    two = structs.replace(
        ON_ONE, gang=halves, expected=structs.replace(EXPECTED, step_ns=9 * SECOND)
    )
    return {"gang": structs.replace(STAGES, pipeline=4), "fallbacks": (two, ON_ONE)}


def test_of_the_nodes_that_are_left_those_stay_that_have_all_memory_together() -> None:
    drive = Drive(4)
    job = stages(drive, **four_stages())
    nodes, shift = job.placement.nodes, job.gang.buddy_shift
    lose(drive, nodes[1])
    kept = job.placement.nodes
    assert len(kept) == 2 and nodes[(1 + shift) % 4] in kept
    idle = [node for node in nodes if node not in kept and node != nodes[1]]
    assert job.placement.spares == tuple(idle), "the third stands by"
    drive.run(job)
    assert drive.last_restore().source == "peer"
    drive.train(job, 10)
    drive.core.ledger.check(drive.core.view)


def test_a_job_that_loses_more_goes_on_with_the_next_mapping() -> None:
    drive = Drive(4)
    job = stages(drive, **four_stages())
    own = job.spec
    lose(drive, job.placement.nodes[1])
    drive.run(job)
    drive.train(job, 10)
    lose(drive, *job.placement.spares)
    lose(drive, job.placement.nodes[0])
    assert job.why.facts["rung"] == "remap" and len(job.placement.nodes) == 1
    assert job.own == own and job.spec.gang == ONE_STAGE
    drive.run(job)
    assert drive.last_restore().step == 160 and job.lost_steps == 0


def test_memory_that_is_gone_is_said_and_the_checkpoint_taken() -> None:
    drive = Drive(4)
    job = stages(drive, **four_stages())
    nodes, shift = job.placement.nodes, job.gang.buddy_shift
    lose(drive, nodes[0], nodes[shift])
    assert job.why.facts["rung"] == "remap"
    drive.run(job, step=-1)
    assert (drive.last_restore().step, drive.last_restore().source) == (100, "remote")
    assert job.lost_steps == 50


def test_another_number_of_replicas_is_judged_by_the_mapping_that_it_returns_to() -> None:
    drive = Drive(2)
    two = structs.replace(ONE_STAGE, replicas=2)
    job = stages(drive, gang=two)
    lose(drive, job.placement.nodes[1])
    assert job.own is not None and job.placement.replicas == 1
    drive.tell(Scale(job=job.id, replicas=1, request="a"))
    refused = drive.bodies(Refuse)[-1].reason
    assert (refused.code, refused.facts["least"], refused.facts["most"]) == ("not_elastic", 2, 2)
    drive.tell(Scale(job=job.id, replicas=2, request="b"))
    assert job.placement.replicas == 1 and job.wanted == 2, "it has them when it returns"


def test_a_job_that_leaves_waits_for_nodes_as_it_was_submitted() -> None:
    drive = Drive(2)
    job = stages(drive)
    own, (first, second) = job.spec, job.placement.nodes
    lose(drive, second)
    drive.run(job)
    drive.train(job, 10)
    lose(drive, first)
    assert job.state == "pending" and job.spec == own and job.own is None


def test_a_job_that_makes_no_step_with_the_other_mapping_waits_as_it_was() -> None:
    drive = Drive(2)
    job = stages(drive, retries=0)
    own = job.spec
    lose(drive, job.placement.nodes[1])
    drive.run(job)
    failed = WorkerExited(
        job=job.id,
        generation=job.generation,
        node=job.placement.nodes[0],
        rank=0,
        step=150,
        cause="out_of_memory",
    )
    drive.tell(failed, SECOND)
    drive.wait(SECOND)
    assert job.state == "pending" and job.kept is not None, "its memory is kept"
    assert job.spec == structs.replace(own, fallbacks=()), "and the mapping not tried again"


def test_a_cancelled_job_leaves_nothing_behind() -> None:
    drive = Drive(2)
    job = stages(drive)
    lose(drive, job.placement.nodes[1])
    drive.run(job)
    drive.tell(Cancel(job=job.id, request="c"))
    drive.wait(SECOND)
    if job.gang is not None:
        drive.tell(GangDrained(job=job.id, generation=job.generation, step=job.step), SECOND)
    assert job.state == "cancelled" and drive.bodies(Stop)
    drive.core.ledger.check(drive.core.view)


def test_fallbacks_that_make_no_sense_are_refused() -> None:
    wide = structs.replace(ON_ONE, gang=structs.replace(ONE_STAGE, slot_gpus=4))
    large = structs.replace(ON_ONE, gang=STAGES)
    none = structs.replace(ON_ONE, gang=structs.replace(ONE_STAGE, tensor=0))
    for bad, rule in (
        (wide, "slot_gpus"),
        (large, "fewer nodes"),
        (none, "fallbacks.gang.tensor"),
    ):
        drive = Drive(2)
        spec = JobSpec(name="job", gang=STAGES, expected=EXPECTED, fallbacks=(bad,))
        drive.tell(Submit(spec=spec, request="r"))
        (refused,) = drive.bodies(Refuse)
        assert rule in str(refused.reason)


def test_the_price_grows_with_the_step_and_with_the_wait() -> None:
    drive = Drive(2)
    job = stages(drive)

    def price(step_ns: int) -> int:
        expected = structs.replace(EXPECTED, step_ns=step_ns)
        spec = structs.replace(job.spec, fallbacks=(structs.replace(ON_ONE, expected=expected),))
        ways = ways_without(
            drive.core._ctx, structs.replace(job, spec=spec), job.placement.nodes[1:], "node_silent"
        )
        (found,) = [way for way in ways if way.rung is Rung.REMAP]
        return found.loss_gpu_ns

    day = 86_400 * SECOND
    quick, slow = price(6 * SECOND), price(10 * SECOND)
    assert quick < slow
    # A day at half the speed loses eight of sixteen GPUs for a day; pauses come on top.
    assert 8 * day < slow < 9 * day
    assert not [body for body in drive.bodies(Form) if body.payload == "one stage"], "pure"


def test_it_does_not_return_to_nodes_that_fail_before_that_pays() -> None:
    """Half an hour of steps that are two fifths longer is worth the pause, unless nodes fail."""
    nearly = structs.replace(ON_ONE, expected=structs.replace(EXPECTED, step_ns=7 * SECOND))
    policy = Policy(recovery=RecoveryPolicy(repair_ns=30 * MINUTE))
    for failures, returns in ((0, True), (1_000_000, False)):
        kinds = Fleet(Node(name=kind, gpus=8, kind=kind, rails=8) for kind in ("good", "bad"))
        drive = Drive(policy=policy, fleet=kinds)
        job = stages(drive, fallbacks=(nearly,))
        lose(drive, 1)
        assert job.why.facts["rung"] == "remap"
        drive.run(job)
        drive.train(job, 10)
        seen = FailureDay(day=0, gpu_seconds=8 * 86_400, causes={"hbm_ecc": failures})
        drive.core._ctx.health.failures["bad"].days = [seen]
        comes_back(drive, 1)
        while job.state == "running" and drive.now_ns < 60 * MINUTE:
            drive.wait(SECOND)
        assert (job.state == "draining") is returns


def test_what_was_measured_of_both_mappings_decides_whether_it_returns() -> None:
    """The plan says that one node is faster; it was not."""
    faster = structs.replace(ON_ONE, expected=structs.replace(EXPECTED, step_ns=2 * SECOND))
    for took, returns in ((10 * SECOND, True), (3 * SECOND, False)):
        drive = Drive(2)
        job = stages(drive, fallbacks=(faster,))
        gone = job.placement.nodes[1]
        lose(drive, gone)
        drive.run(job)
        job.spec = structs.replace(job.spec, expected=structs.replace(EXPECTED, step_ns=took))
        drive.train(job, 60)
        job.spec = structs.replace(job.spec, expected=faster.expected)
        assert (job.own_step_ns, job.step_ns) == (5 * SECOND, took)
        comes_back(drive, gone)
        while job.state == "running" and drive.now_ns < 60 * MINUTE:
            drive.wait(SECOND)
        assert (job.state == "draining") is returns
