"""A job that ends the agents which start it is taken out of the queue; its nodes are not blamed."""

from __future__ import annotations

import pytest

from phalanx.cluster.job_relations import Array
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.node import NodeState
from phalanx.cluster.protocol.commands import Accept, Refuse
from phalanx.cluster.protocol.events import GangJoined, GangReady, Hold, NodeSilent
from phalanx.cluster.protocol.messages import Inventory, NodeSeen
from tests.cluster.drive import SECOND, Drive

ONE = GangShape(slot_gpus=8)


def end_agent(drive: Drive, job: ClusterJob, slot: int = 0) -> int:
    """The agent of a slot ends a second after the order, and does not come back in time."""
    node = job.placement.nodes[slot]
    drive.wait(SECOND)
    broke = drive.now_ns
    drive.tell(NodeSilent(node=node, connection_lost=True, broke_ns=broke), 5 * SECOND)
    drive.wait(SECOND)
    return node


def test_a_job_whose_start_ends_two_agents_is_quarantined_and_the_nodes_are_not() -> None:
    drive = Drive(nodes=4)
    job = drive.submit(gang=ONE)
    first = end_agent(drive, job)
    assert job.state == "forming" and job.placement.nodes != (first,)  # once may be anything
    second = end_agent(drive, job)
    assert job.state == "pending" and job.placement is None and job.held
    assert job.why.code == "ends_agents"
    assert f"n{first}, n{second}" in str(job.why)
    drive.wait(3600 * SECOND)
    assert job.placement is None
    assert drive.core._ctx.health.incidents == {}
    for node in (first, second):
        drive.tell(NodeSeen(node=node, inventory=Inventory(incarnation=1)))
        assert drive.core.view.fleet.state(node) is not NodeState.QUARANTINED


def test_only_an_operator_lets_it_in_again() -> None:
    drive = Drive(nodes=4)
    job = drive.submit(gang=ONE)
    end_agent(drive, job)
    end_agent(drive, job)
    drive.tell(Hold(job=job.id, held=False, request="user", operator=False))
    refused = drive.bodies(Refuse)[-1]
    assert refused.request == "user" and refused.reason.code == "operator_holds"
    drive.tell(Hold(job=job.id, held=False, request="operator"))
    assert drive.bodies(Accept)[-1].request == "operator"
    drive.wait(SECOND)
    assert job.state == "forming"


def test_an_agent_that_a_service_manager_starts_again_counts_as_well() -> None:
    drive = Drive(nodes=2)
    drive.core._ctx.health.incarnation = {0: 1, 1: 1}
    job = drive.submit(gang=ONE)
    (node,) = job.placement.nodes
    drive.tell(NodeSeen(node=node, inventory=Inventory(incarnation=2)), 2 * SECOND)
    assert job.state == "forming" and job.generation == 1  # the order was sent again
    drive.tell(NodeSeen(node=node, inventory=Inventory(incarnation=3)), 2 * SECOND)
    assert job.state == "pending" and job.why.code == "ends_agents"


def test_agents_that_end_together_are_one_event() -> None:
    drive = Drive(nodes=6)
    drive.core._ctx.health.incarnation = dict.fromkeys(range(6), 1)
    job = drive.submit()
    for node in job.placement.nodes:  # somebody restarts all agents
        drive.tell(NodeSeen(node=node, inventory=Inventory(incarnation=2)), SECOND)
    assert job.state == "forming"
    drive.run(job)
    drive.train(job, 5)
    assert job.agent_ends == ()


def test_nodes_that_were_gone_before_the_order_say_nothing_about_the_job() -> None:
    drive = Drive(nodes=6)
    job = drive.submit(gang=ONE)
    drive.run(job)
    drive.train(job, 5)
    broke = drive.now_ns
    for _ in range(3):  # they went at the same moment, and one after the other is found out
        silent = NodeSilent(node=job.placement.nodes[0], connection_lost=True, broke_ns=broke)
        drive.tell(silent, 5 * SECOND)
        drive.wait(SECOND)
    assert job.state == "forming"


def test_a_step_between_two_ends_clears_the_job() -> None:
    drive = Drive(nodes=6)
    job = drive.submit(gang=ONE)
    end_agent(drive, job)
    drive.run(job)
    drive.train(job, 5)
    silent = NodeSilent(node=job.placement.nodes[0], connection_lost=True, broke_ns=drive.now_ns)
    drive.tell(silent, 5 * SECOND)
    drive.wait(SECOND)
    end_agent(drive, job)
    assert job.state == "forming"


def test_nodes_that_die_before_their_steps_were_told_of_do_not_blame_the_job() -> None:
    """Progress is told every few seconds: a gang may have made steps that nobody knows of yet."""
    drive = Drive(nodes=8)
    job = drive.submit()
    made = 0
    for _ in range(4):
        drive.run(job, step=made)
        made += 3
        end_agent(drive, job)
        joined = GangJoined(
            job=job.id,
            generation=job.generation,
            step=made,
            empty=(job.placement.nodes[0],),
            newest=made,
        )
        drive.tell(joined)
        assert job.state == "forming" and not job.held, str(job.why)
    assert job.agent_ends == ()


def test_a_job_whose_first_step_ends_agents_is_quarantined_before_the_third() -> None:
    drive = Drive(nodes=8)
    job = drive.submit(gang=ONE)
    for _ in range(2):
        drive.run(job)
        end_agent(drive, job)
        assert job.state == "forming"
    drive.tell(GangJoined(job=job.id, generation=job.generation, step=-1), SECOND)
    assert job.state == "pending" and job.why.code == "ends_agents"


@pytest.mark.parametrize(("seconds", "held"), [(3, True), (20, False), (600, False)])
def test_a_program_that_ran_for_a_while_without_steps_did_not_end_the_agent(
    seconds: int, held: bool
) -> None:
    drive = Drive(nodes=6)
    job = drive.submit(gang=ONE, reports_steps=False)
    for _ in range(2):
        drive.tell(GangJoined(job=job.id, generation=job.generation, step=-1), SECOND)
        drive.tell(GangReady(job=job.id, generation=job.generation, step=0), SECOND)
        drive.wait(seconds * SECOND)
        silent = NodeSilent(
            node=job.placement.nodes[0], connection_lost=True, broke_ns=drive.now_ns
        )
        drive.tell(silent, 5 * SECOND)
        drive.wait(SECOND)
    assert job.held is held


def test_the_other_members_of_an_array_are_kept_out_too() -> None:
    drive = Drive(nodes=4)
    first = drive.submit(gang=ONE, array=Array(count=20, width=1))
    jobs = drive.core.view.jobs
    end_agent(drive, first)
    end_agent(drive, first)
    drive.wait(60 * SECOND)
    assert all(job.state == "pending" and job.held for job in jobs.values())
    assert jobs[first.id + 1].operator_hold.code == "sibling_ends_agents"


def test_what_an_operator_holds_a_user_does_not_release() -> None:
    drive = Drive(nodes=1)
    job = drive.submit(gang=GangShape(slot_gpus=8), name="first")
    waiting = drive.submit(gang=GangShape(slot_gpus=8), name="second")
    assert job.state == "forming" and waiting.state == "pending"
    drive.tell(Hold(job=waiting.id, request="a", operator=False))
    drive.tell(Hold(job=waiting.id, held=False, request="b", operator=False))
    assert not waiting.held
    drive.tell(Hold(job=waiting.id, request="c"))
    assert waiting.why.code == "held"
    drive.tell(Hold(job=waiting.id, held=False, request="d", operator=False))
    assert waiting.held and drive.bodies(Refuse)[-1].request == "d"
