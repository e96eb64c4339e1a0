"""A gang that lacks a node and can neither swap nor shrink: it waits where that loses least."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.forecast.why import explain
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.policy import Policy, RecoveryPolicy
from phalanx.cluster.protocol.events import (
    Cancel,
    DrainNode,
    JobFinished,
    NodeRepaired,
    NodeSilent,
)
from phalanx.cluster.protocol.messages import CheckResult
from tests.cluster.drive import EXPECTED, SECOND, SHAPE, Drive

MINUTE = 60 * SECOND
ONE = structs.replace(SHAPE, replicas=1)
SOON = Policy(recovery=RecoveryPolicy(repair_ns=10 * MINUTE))  # a node that left is back by then


def comes_back(drive: Drive, node: int) -> None:
    drive.tell(NodeRepaired(node=node))
    drive.tell(CheckResult(node=node, check="full", passed=True), SECOND)
    drive.wait(SECOND)


def lacks_a_node(drive: Drive, **fields: object) -> tuple[ClusterJob, int]:
    """A job on two nodes of which the second is gone, and no other is free."""
    job = drive.running(**fields)
    gone = job.placement.nodes[1]
    drive.tell(NodeSilent(node=gone))
    drive.wait(SECOND)
    return job, gone


def test_it_waits_for_a_node_that_is_expected_back_soon_and_keeps_its_others():
    drive = Drive(2, SOON)
    job, gone = lacks_a_node(drive)
    assert job.state == "pending" and job.why.facts["rung"] == "wait"
    assert job.why.facts["other"].startswith("requeue with ")
    assert job.preemptions == 0  # nobody sent it away
    small = drive.submit(gang=ONE)  # there is an empty node, but not for it
    assert small.state == "pending"
    assert f"job {job.id}" in str(explain(drive.core.queue, drive.core.view, small.id).reason)
    drive.wait(15 * MINUTE)  # longer than memory is kept for those that are merely queued again
    comes_back(drive, gone)
    assert job.state == "forming" and sorted(job.placement.nodes) == [0, 1]
    drive.run(job)
    assert (drive.last_restore().step, drive.last_restore().source) == (150, "peer")
    drive.core.ledger.check(drive.core.view)


def test_it_says_what_it_waits_for_and_for_how_long():
    drive = Drive(2, SOON)
    job, _ = lacks_a_node(drive)
    found = explain(drive.core.queue, drive.core.view, job.id)
    assert "its own (so many: 1) have its newest steps in memory" in str(found.reason)
    assert "for 30 min at most" in str(found.reason)
    assert found.estimated_start_ns is None  # that they are kept so long promises nothing


def test_a_job_that_a_person_holds_keeps_no_nodes():
    drive = Drive(2, SOON)
    job = drive.running()
    job.held = True  # it is to stay out as soon as it leaves
    drive.tell(NodeSilent(node=job.placement.nodes[1]))
    drive.wait(SECOND)
    assert job.state == "pending" and drive.submit(gang=ONE).state == "forming"


def test_nodes_that_a_person_wants_empty_are_left_in_order():
    drive = Drive(2, SOON)
    job = drive.running()
    drive.tell(DrainNode(node=job.placement.nodes[1], deadline_ns=0, request="d"))
    drive.wait(SECOND)
    assert job.state == "draining"  # it saves what it has, and does not wait with it in memory


def test_it_comes_before_others_that_want_the_node_that_is_back():
    drive = Drive(2, SOON)
    job, gone = lacks_a_node(drive)
    urgent = drive.submit(gang=ONE, priority=1000)
    comes_back(drive, gone)
    assert job.state == "forming" and urgent.state == "pending"


def test_its_nodes_are_for_others_when_the_time_is_over():
    drive = Drive(2, SOON)
    job, _ = lacks_a_node(drive)
    small = drive.submit(gang=ONE)
    drive.wait(31 * MINUTE)
    assert small.state == "forming" and job.state == "pending" and job.kept is None


def test_a_cancelled_job_keeps_no_nodes():
    drive = Drive(2, SOON)
    job, _ = lacks_a_node(drive)
    small = drive.submit(gang=ONE)
    drive.tell(Cancel(job=job.id, request="c"))
    drive.wait(SECOND)
    assert small.state == "forming"


def test_a_node_that_is_expected_tomorrow_is_not_waited_for():
    drive = Drive(2)
    job, _ = lacks_a_node(drive)
    assert job.why.facts["rung"] == "requeue"
    assert drive.submit(gang=ONE).state == "forming"


def test_a_site_may_forbid_to_wait():
    policy = structs.replace(SOON, recovery=structs.replace(SOON.recovery, wait_ns=0))
    job, _ = lacks_a_node(Drive(2, policy))
    assert job.why.facts["rung"] == "requeue"


def test_the_fixed_order_knows_no_waiting():
    policy = structs.replace(SOON, recovery=structs.replace(SOON.recovery, order="fixed"))
    job, _ = lacks_a_node(Drive(2, policy))
    assert job.why.facts["rung"] == "requeue"


def test_a_job_whose_memory_is_gone_has_nothing_to_wait_with():
    drive = Drive(2, SOON)
    job, _ = lacks_a_node(drive, expected=structs.replace(EXPECTED, snapshot_steps=0))
    assert job.why.facts["rung"] == "requeue"


def test_it_waits_for_the_end_of_a_job_that_is_nearly_done():
    drive = Drive(3)
    ends = structs.replace(EXPECTED, steps=160)
    other = drive.submit(gang=ONE, expected=ends)
    drive.run(other)
    job, _ = lacks_a_node(drive)
    assert job.why.facts["rung"] == "wait"
    done = JobFinished(job=other.id, generation=other.generation, step=160)
    drive.tell(done, 60 * SECOND)
    drive.wait(SECOND)
    assert job.state == "forming" and job.gang.keepers  # with what its own node kept


def test_a_restored_core_goes_on_waiting():
    drive = Drive(2, SOON)
    job, gone = lacks_a_node(drive)
    small = drive.submit(gang=ONE)
    drive.core = Core.restore(drive.core.snapshot())
    comes_back(drive, gone)
    jobs = drive.core.view.jobs
    assert jobs[job.id].state == "forming" and jobs[small.id].state == "pending"
