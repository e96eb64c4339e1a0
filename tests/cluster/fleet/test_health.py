from __future__ import annotations

import pytest

from phalanx.cluster.causes import CAUSES, Cause
from phalanx.cluster.core import Core
from phalanx.cluster.node import Node, NodeState
from phalanx.cluster.policy import HealthPolicy, Policy
from phalanx.cluster.protocol.commands import Accept, Ask, Check, Form, Go, Notify, Refuse, Stop
from phalanx.cluster.protocol.events import (
    Answer,
    DrainNode,
    GangStuck,
    JobFinished,
    NodeJoined,
    NodeRepaired,
    NodeSilent,
    QuarantineNode,
    ReadmitNode,
    SlowRank,
)
from phalanx.cluster.protocol.messages import (
    CheckResult,
    DeviceError,
    Holding,
    Inventory,
    NodeNotice,
    NodeSeen,
    WorkerExited,
)
from tests.cluster.drive import SECOND, Drive

DAY = 86400 * SECOND


def state(drive: Drive, node: int) -> NodeState:
    return drive.core.view.fleet.state(node)


def check(drive: Drive, node: int, *, passed: bool) -> None:
    drive.tell(CheckResult(node=node, check="full", passed=passed, detail="gpu 3"))


def test_every_published_cause_has_a_row():
    for name in ("gpu_fault", "hbm_ecc", "network_link", "host_maintenance", "sram_ecc", "nic"):
        assert Cause.of(name).domain == "hardware"
    assert Cause.of("gpu_out_of_memory").domain == "user"
    assert Cause.of("nccl_timeout").domain == "software"
    assert Cause.of("what nobody has heard of").node == "suspect"
    assert all(0 <= cause.recur_ppm <= 1_000_000 for cause in CAUSES.values())


def test_suspicion_leads_to_a_test_and_a_passed_test_back_to_work():
    drive = Drive()
    drive.tell(DeviceError(node=3, cause="xid", detail="79"))
    assert state(drive, 3) is NodeState.SUSPECT
    assert drive.bodies(Check)[-1].node == 3
    check(drive, 3, passed=True)
    assert state(drive, 3) is NodeState.HEALTHY


def test_a_failed_test_means_quarantine_until_the_node_is_repaired_and_passes():
    drive = Drive()
    drive.tell(DeviceError(node=3, cause="xid"))
    check(drive, 3, passed=False)
    assert state(drive, 3) is NodeState.QUARANTINED
    assert "failed its check: gpu 3" in str(drive.core.view.fleet.history[3][-1].reason)
    drive.tell(NodeRepaired(node=3), DAY)
    assert state(drive, 3) is NodeState.SUSPECT
    check(drive, 3, passed=True)
    assert state(drive, 3) is NodeState.HEALTHY


def test_a_test_that_never_ends_means_quarantine():
    drive = Drive()
    drive.tell(DeviceError(node=3, cause="xid"))
    drive.wait(3600 * SECOND)
    assert state(drive, 3) is NodeState.QUARANTINED


def test_a_result_of_an_older_test_is_not_taken_for_the_current_one():
    drive = Drive()
    drive.tell(DeviceError(node=3, cause="xid"))
    drive.tell(CheckResult(node=3, check="full", passed=True, command=777))
    assert state(drive, 3) is NodeState.SUSPECT


def test_a_node_that_is_suspected_too_often_is_quarantined_whatever_its_tests_say():
    drive = Drive(policy=Policy(health=HealthPolicy(strikes=2, lemon_score=10**6)))
    for _ in range(2):
        drive.tell(DeviceError(node=3, cause="xid"), 60 * SECOND)
        check(drive, 3, passed=True)
        assert state(drive, 3) is NodeState.HEALTHY
    drive.tell(DeviceError(node=3, cause="xid"), 60 * SECOND)
    assert state(drive, 3) is NodeState.QUARANTINED


def test_a_lemon_is_found_by_incidents_that_are_days_apart():
    drive = Drive()
    incidents = 0
    while state(drive, 3) is NodeState.HEALTHY:
        incidents += 1
        drive.tell(DeviceError(node=3, cause="xid"), 2 * DAY)
        if state(drive, 3) is NodeState.SUSPECT:
            check(drive, 3, passed=True)
    assert 3 < incidents < 8
    assert "fails too often" in str(drive.core.view.fleet.history[3][-1].reason)


def test_a_failed_check_of_a_busy_node_empties_it_first():
    drive = Drive()
    job = drive.running(spares=1)
    node = job.placement.nodes[0]
    drive.tell(CheckResult(node=node, check="quick", passed=False, detail="slow memory"))
    assert state(drive, node) is NodeState.SUSPECT
    drive.wait(SECOND)
    assert node not in job.placement.nodes
    assert state(drive, node) in (NodeState.SUSPECT, NodeState.QUARANTINED)
    assert not drive.core.view.fleet.held[node]


def test_mass_eviction_is_stopped_and_a_person_asked():
    drive = Drive(64)
    for node in range(20):
        drive.tell(NodeSilent(node=node))
    dead = [node for node in range(64) if state(drive, node) is NodeState.DEAD]
    assert len(dead) == 4
    drive.wait(60 * SECOND)
    (ask,) = drive.bodies(Ask)
    assert len(ask.nodes) == 16 and "a person decides" in str(ask.reason)


@pytest.mark.parametrize(("approve", "expected"), [(True, "DEAD"), (False, "SUSPECT")])
def test_a_persons_answer_decides_about_the_nodes_that_were_kept(approve, expected):
    drive = Drive(64)
    for node in range(20):
        drive.tell(NodeSilent(node=node))
    drive.wait(60 * SECOND)
    (ask,) = drive.bodies(Ask)
    drive.tell(Answer(question=ask.question, approve=approve))
    assert {state(drive, node).name for node in ask.nodes} == {expected}
    (command,) = drive.tell(Answer(question=ask.question, approve=True))
    assert isinstance(command.body, Refuse)


def test_a_silent_node_that_a_person_kept_gets_no_work_until_it_speaks():
    drive = Drive(8)
    for node in range(8):
        drive.tell(NodeSilent(node=node))
    drive.wait(60 * SECOND)
    (ask,) = drive.bodies(Ask)
    drive.tell(Answer(question=ask.question, approve=False))
    job = drive.submit()
    assert job.state == "pending"
    for node in ask.nodes[:2]:
        drive.tell(NodeSeen(node=node, inventory=Inventory(incarnation=1)))
    drive.wait(SECOND)
    assert job.state == "forming" and set(job.placement.nodes) == set(ask.nodes[:2])


def test_a_gang_leaves_a_node_that_it_waited_for_twice_whatever_the_breaker_says():
    drive = Drive(64)
    for node in range(40, 44):
        drive.tell(NodeSilent(node=node))  # the breaker lets nobody else go
    job = drive.submit()
    dumb = job.placement.nodes[1]
    for _ in range(4):
        stuck = {"job": job.id, "generation": job.generation, "phase": "join", "nodes": (dumb,)}
        drive.tell(GangStuck(**stuck))
        drive.wait(10 * SECOND)
        if dumb not in job.placement.nodes:
            break
    assert dumb not in job.placement.nodes and state(drive, dumb) is not NodeState.HEALTHY


def test_a_gang_of_which_nobody_knows_who_is_missing_says_so():
    drive = Drive(4)
    drive.submit()
    drive.wait(3600 * SECOND)  # no node answers, and nobody reports which
    told = [str(note.reason) for note in drive.bodies(Notify) if note.reason.code == "stuck"]
    assert told and set(told) == {"did not answer twice (nobody knows which of its nodes)"}


def test_a_gang_that_feels_the_loss_confirms_a_silence_that_the_breaker_doubted():
    drive = Drive(64)
    job = drive.running(spares=1)
    for node in range(40, 44):
        drive.tell(NodeSilent(node=node))
    first, second = job.placement.nodes
    drive.tell(NodeSilent(node=second))
    drive.wait(SECOND)
    assert job.state == "running"  # silence alone does not stop it now
    drive.tell(WorkerExited(job=job.id, generation=1, node=first, rank=0, cause="lost_peer"))
    drive.wait(SECOND)
    assert state(drive, second) is NodeState.DEAD
    assert second not in job.placement.nodes and job.generation == 2


def test_a_gang_that_cannot_start_on_a_node_goes_elsewhere_whatever_the_breaker_says():
    drive = Drive(64)
    for node in range(40, 44):
        drive.tell(NodeSilent(node=node))  # the breaker lets nobody else go
    job = drive.submit()
    bad = job.placement.nodes[1]
    for _ in range(6):
        drive.tell(DeviceError(node=bad, cause="system_service", job=job.id, detail="prolog"))
        drive.wait(SECOND)
        if bad not in job.placement.nodes:
            break
        assert job.state == "forming"
    assert bad not in job.placement.nodes
    drive.run(job)


def test_a_question_about_nodes_that_are_back_is_closed_and_the_next_one_asked():
    drive = Drive(64)
    for node in range(6):
        drive.tell(NodeSilent(node=node))
    drive.wait(60 * SECOND)
    (first,) = drive.bodies(Ask)
    for node in first.nodes:
        drive.tell(NodeSeen(node=node, inventory=Inventory(incarnation=1)))
    assert not drive.core.questions and not drive.core.withheld
    drive.tell(NodeSilent(node=20))
    drive.wait(60 * SECOND)
    assert drive.bodies(Ask)[-1].nodes == (20,)


def test_a_question_that_is_open_is_asked_again_when_more_nodes_are_kept():
    drive = Drive(64)
    for node in range(6):
        drive.tell(NodeSilent(node=node))
    drive.wait(60 * SECOND)
    (first,) = drive.bodies(Ask)
    drive.tell(NodeSilent(node=20))
    drive.wait(60 * SECOND)
    again = drive.bodies(Ask)[-1]
    assert again.question == first.question and again.nodes == (*first.nodes, 20)


def test_the_breaker_closes_again_after_its_window():
    drive = Drive(64)
    for node in range(4):
        drive.tell(NodeSilent(node=node))
    drive.tell(NodeSilent(node=10), 2 * 3600 * SECOND)
    assert state(drive, 10) is NodeState.DEAD


def test_a_detector_that_cries_wolf_only_warns_for_a_while():
    drive = Drive(policy=Policy(health=HealthPolicy(harmful=(), strikes=99, lemon_score=10**6)))
    job = drive.running(spares=2)
    for _ in range(2):
        node = job.placement.nodes[1]
        slow = SlowRank(
            job=job.id,
            generation=job.generation,
            node=node,
            rank=8,
            part="compute",
            slowdown_ppm=10**6,
        )
        drive.tell(slow)
        drive.wait(SECOND)
        assert node not in job.placement.nodes
        check(drive, node, passed=True)
        drive.run(job)
    node = job.placement.nodes[1]
    drive.tell(
        SlowRank(
            job=job.id,
            generation=job.generation,
            node=node,
            rank=8,
            part="compute",
            slowdown_ppm=10**6,
        )
    )
    drive.wait(SECOND)
    assert node in job.placement.nodes and job.state == "running"
    assert "cried wolf" in str(drive.bodies(Notify)[-1].reason)


def test_a_drained_node_is_emptied_and_gets_no_new_work():
    drive = Drive(4)
    job = drive.running()
    node = job.placement.nodes[0]
    drive.tell(DrainNode(node=node))
    drive.wait(SECOND)
    assert node not in job.placement.nodes
    assert state(drive, node) is NodeState.DRAINING
    drive.run(job)
    drive.tell(ReadmitNode(node=node))
    assert state(drive, node) is NodeState.HEALTHY


def test_a_notice_of_the_site_moves_the_work_before_the_node_goes():
    drive = Drive(4)
    job = drive.running()
    node = job.placement.nodes[1]
    drive.tell(NodeNotice(node=node, deadline_ns=drive.now_ns + 120 * SECOND))
    drive.wait(SECOND)
    assert node not in job.placement.nodes and state(drive, node) is NodeState.DRAINING
    drive.tell(NodeSilent(node=node), 120 * SECOND)
    assert state(drive, node) is NodeState.DEAD


def test_a_person_can_quarantine_a_busy_node():
    drive = Drive(4)
    job = drive.running()
    node = job.placement.nodes[1]
    drive.tell(QuarantineNode(node=node))
    drive.wait(SECOND)
    assert node not in job.placement.nodes
    assert state(drive, node) is NodeState.QUARANTINED
    drive.tell(ReadmitNode(node=node))
    assert state(drive, node) is NodeState.SUSPECT
    check(drive, node, passed=True)
    assert state(drive, node) is NodeState.HEALTHY


def test_orders_about_nodes_that_do_not_exist_are_refused():
    drive = Drive(2)
    for body in (DrainNode(node=9), QuarantineNode(node=-1), ReadmitNode(node=2)):
        (command,) = drive.tell(body)
        assert isinstance(command.body, Refuse) and "there is no node" in str(command.body.reason)


def test_a_new_node_joins_and_is_given_work():
    drive = Drive(1)
    drive.tell(NodeJoined(node=Node(name="late", kind="h100"), inventory=Inventory(1)))
    assert state(drive, 1) is NodeState.HEALTHY
    job = drive.submit()
    assert job.placement.nodes == (0, 1)


def test_a_silent_node_that_speaks_again_is_tested_and_its_old_work_ended():
    drive = Drive()
    job = drive.running(spares=1)
    node = job.placement.nodes[0]
    drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)
    held = Holding(job.id, 1, "running", 150, 150)
    drive.tell(NodeSeen(node=node, inventory=Inventory(1, (held,))))
    stop = [c for c in drive.sent if isinstance(c.body, Stop) and c.target == (node,)][-1]
    assert stop.body.generation >= 1
    assert state(drive, node) is NodeState.SUSPECT
    check(drive, node, passed=True)
    assert state(drive, node) is NodeState.HEALTHY


def test_a_late_echo_of_an_older_agent_means_nothing():
    drive = Drive()
    drive.tell(NodeSeen(node=0, inventory=Inventory(5)))
    before = drive.core.snapshot()
    drive.tell(NodeSilent(node=0))
    drive.tell(NodeSeen(node=0, inventory=Inventory(4)))
    assert state(drive, 0) is NodeState.DEAD
    assert before != drive.core.snapshot()


def test_what_a_reconnected_node_rightly_runs_is_adopted():
    drive = Drive()
    job = drive.running()
    node = job.placement.nodes[0]
    commands = drive.tell(
        NodeSeen(node=node, inventory=Inventory(2, (Holding(job.id, 1, "running", 150, 150),)))
    )
    assert [type(c.body) for c in commands] == [Go]
    assert job.state == "running"


def test_workers_that_a_reconnected_node_lacks_are_restarted():
    drive = Drive()
    job = drive.running()
    drive.tell(NodeSeen(node=job.placement.nodes[0], inventory=Inventory(2)))
    drive.wait(SECOND)
    assert job.generation == 2 and job.gang.cause == "agent_restarted"


def test_a_node_that_missed_the_order_to_join_gets_it_again():
    drive = Drive()
    job = drive.submit()
    node = job.placement.nodes[1]
    commands = drive.tell(NodeSeen(node=node, inventory=Inventory(2)))
    assert [(type(c.body), c.target) for c in commands] == [(Form, (node,))]


def test_a_node_that_was_suspected_while_it_worked_on_is_tested_when_its_job_is_done():
    drive = Drive()
    job = drive.running()
    node = job.placement.nodes[0]
    drive.tell(DeviceError(node=node, cause="nic", rail=0))
    assert drive.core.view.fleet.state(node) is NodeState.SUSPECT
    assert not drive.bodies(Check)
    drive.tell(JobFinished(job=job.id, generation=job.generation, step=job.step))
    drive.wait(SECOND)
    (check,) = drive.bodies(Check)
    assert check.node == node
    drive.tell(CheckResult(node=node, check="full", passed=True))
    assert drive.core.view.fleet.state(node) is NodeState.HEALTHY


def back(drive: Drive, node: int) -> None:
    """A node that was silent speaks again, and passes its check."""
    incarnation = drive.core._ctx.health.incarnation.get(node, 0) + 1
    drive.tell(NodeSeen(node=node, inventory=Inventory(incarnation, ())), SECOND)
    drive.tell(CheckResult(node=node, check="full", passed=True), SECOND)
    drive.wait(SECOND)


@pytest.mark.parametrize("first", [DrainNode(node=0), NodeSilent(node=0)])
def test_a_person_who_wants_a_node_empty_does_so_though_it_was_away(first):
    drive = Drive(2)
    fleet = drive.core.view.fleet
    both = (DrainNode(node=0), NodeSilent(node=0))
    drive.tell(first)
    drive.tell(next(order for order in both if order != first), SECOND)
    assert fleet.state(0) is NodeState.DEAD
    drive.core._ctx = Core.restore(drive.core.snapshot())._ctx
    back(drive, 0)
    fleet = drive.core.view.fleet
    assert fleet.state(0) is NodeState.DRAINING
    job = drive.submit()
    assert job.state == "pending"
    drive.tell(ReadmitNode(node=0))
    drive.wait(SECOND)
    assert fleet.state(0) is NodeState.HEALTHY, "it passed its check already"
    assert job.state == "forming"


def test_a_quarantined_node_that_a_person_wants_empty_is_told_so_and_comes_back_by_a_person():
    drive = Drive(2)
    drive.tell(QuarantineNode(node=0))
    (command,) = drive.tell(DrainNode(node=0, request="r"), SECOND)
    assert isinstance(command.body, Accept) and "quarantined" in str(command.body.reason)
    assert drive.core.view.fleet.state(0) is NodeState.QUARANTINED
    drive.tell(ReadmitNode(node=0, tested=True))
    assert drive.core.view.fleet.state(0) is NodeState.HEALTHY
    drive.tell(NodeSilent(node=0), SECOND)
    back(drive, 0)
    assert drive.core.view.fleet.state(0) is NodeState.HEALTHY, "the order was taken back"


def test_what_a_site_takes_away_and_brings_back_works_again():
    drive = Drive(2)
    drive.tell(NodeNotice(node=0, deadline_ns=SECOND))
    drive.tell(NodeSilent(node=0), 2 * SECOND)
    back(drive, 0)
    assert drive.core.view.fleet.state(0) is NodeState.HEALTHY


@pytest.mark.parametrize("drained_first", [False, True])
def test_a_drained_node_with_a_fault_is_tested_before_it_works_again(drained_first):
    drive = Drive(2)
    orders = [DeviceError(node=0, cause="hbm_ecc"), DrainNode(node=0)]
    for order in reversed(orders) if drained_first else orders:
        drive.tell(order, SECOND)
    assert drive.core.view.fleet.state(0) is NodeState.DRAINING
    commands = drive.tell(ReadmitNode(node=0), SECOND)
    assert [command for command in commands if isinstance(command.body, Check)]
    assert drive.core.view.fleet.state(0) is NodeState.SUSPECT
    drive.tell(CheckResult(node=0, check="full", passed=True), SECOND)
    assert drive.core.view.fleet.state(0) is NodeState.HEALTHY
