"""A peer that says it lost somebody is half of a verdict; who then does not answer is the other."""

from __future__ import annotations

import pytest

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.node import NodeState
from phalanx.cluster.policy import Policy, RecoveryPolicy
from phalanx.cluster.protocol.commands import Abort, Command, Form, Go, Notify
from phalanx.cluster.protocol.events import GangJoined, NodeSilent
from phalanx.cluster.protocol.liveness import Liveness, newcomers
from phalanx.cluster.protocol.messages import Holding, Inventory, NodeSeen, WorkerExited
from phalanx.cluster.protocol.timeouts import derive
from tests.cluster.drive import EXPECTED, SECOND, Drive

SILENT_AFTER = 20 * SECOND


def missed() -> tuple[Drive, ClusterJob, Abort]:
    """A gang in which a peer has just said that it lost somebody."""
    drive = Drive()
    job = drive.running(spares=1)
    commands = drive.tell(lost_peer(job), 7 * SECOND)
    (order,) = [c for c in commands if isinstance(c.body, Abort)]
    assert order.target == (*job.placement.nodes[1:], *job.placement.spares)
    return drive, job, order.body


def lost_peer(job: ClusterJob) -> WorkerExited:
    node = job.placement.nodes[0]
    return WorkerExited(
        job=job.id, generation=job.generation, node=node, rank=0, cause="lost_peer", step=job.step
    )


def test_everybody_must_answer_the_abort_by_the_derived_deadline():
    drive, job, abort = missed()
    limits = derive(drive.core.view.policy.timeouts, EXPECTED, job.step_ns)
    assert abort.answer_ns == drive.now_ns + limits.abort_ns


def test_who_loses_a_peer_while_it_restores_makes_everybody_answer_too():
    drive, job, _ = missed()
    drive.tell(NodeSilent(node=job.placement.nodes[1]))
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=2, step=150), SECOND)
    assert job.gang.phase == "restoring"
    commands = drive.tell(lost_peer(job), SECOND)
    (order,) = [c for c in commands if isinstance(c.body, Abort)]
    assert order.target == job.placement.nodes[1:] and order.body.answer_ns > drive.now_ns
    assert order.body.generation == 2


def test_an_abort_whose_cause_is_known_asks_nobody():
    drive = Drive()
    job = drive.running()
    node = job.placement.nodes[1]
    drive.tell(WorkerExited(job=job.id, generation=1, node=node, rank=8, cause="worker_killed"))
    assert drive.bodies(Abort)[-1].answer_ns == 0


def test_no_new_gang_forms_before_it_is_known_who_is_missing():
    drive, job, abort = missed()
    drive.wait(abort.answer_ns - drive.now_ns)
    assert len(drive.bodies(Form)) == 1
    second, (spare,) = job.placement.nodes[1], job.placement.spares
    drive.tell(NodeSilent(node=second))
    drive.wait(SECOND)
    assert drive.core.view.fleet.state(second) is NodeState.DEAD
    assert job.placement.nodes == (job.placement.nodes[0], spare)
    assert drive.last_form().reason.facts["cause"] == "node_silent"


def test_if_all_answer_nobody_is_given_up_and_the_gang_forms_again_as_it_was():
    drive, job, abort = missed()
    before = job.placement.nodes
    drive.wait(abort.answer_ns + 2 * SECOND - drive.now_ns)
    assert job.placement.nodes == before
    assert drive.last_form().reason.facts["rung"] == "in_place"
    assert all(drive.core.view.fleet.state(node) is NodeState.HEALTHY for node in before)


def test_a_cause_that_comes_meanwhile_ends_the_wait():
    drive, job, abort = missed()
    node = job.placement.nodes[1]
    drive.tell(
        WorkerExited(job=job.id, generation=1, node=node, rank=8, cause="worker_killed"),
        SECOND // 10,
    )
    drive.wait(drive.core.view.policy.recovery.settle_ns)
    assert drive.now_ns < abort.answer_ns
    assert drive.last_form().generation == 2


def part_again(drive: Drive, job: ClusterJob) -> None:
    """The peer complains again at the same step, and everybody answers again."""
    if job.gang.phase != "running":
        drive.run(job)
    drive.tell(lost_peer(job), SECOND)
    drive.wait(5 * SECOND)


def test_who_complains_again_at_the_same_step_is_replaced():
    drive, job, _ = missed()
    complainer = job.placement.nodes[0]
    drive.wait(5 * SECOND)
    assert complainer in job.placement.nodes
    part_again(drive, job)
    assert complainer not in job.placement.nodes
    assert drive.last_form().reason.facts["cause"] == "network_link"
    assert drive.core.view.fleet.state(complainer) is NodeState.SUSPECT


def test_ranks_that_never_find_each_other_wait_longer_each_time_and_say_so():
    drive = Drive(policy=Policy(recovery=RecoveryPolicy(failed_formations=4, swap=False)))
    job = drive.running()
    for times in range(1, 7):
        part_again(drive, job)
        if times > 2:
            assert job.gang.phase == "settling" and f"lost each other {times} times" in str(job.why)
        drive.settle(job)
    assert "meet again in 80 s" in str(drive.bodies(Notify)[-1].reason)
    assert "every node answers" in job.evidence[-1]


def test_a_step_between_two_losses_starts_the_count_anew():
    drive = Drive(policy=Policy(recovery=RecoveryPolicy(failed_formations=2)))
    job = drive.running()
    for _ in range(4):
        part_again(drive, job)
        drive.run(job)
        drive.train(job, 1)
    assert job.state == "running"


def test_the_time_to_find_out_is_detection_and_the_found_causes():
    drive, job, abort = missed()
    drive.wait(abort.answer_ns - drive.now_ns)
    drive.tell(NodeSilent(node=job.placement.nodes[1]))
    drive.wait(SECOND)
    drive.run(job)
    drive.train(job, 1)
    lost = drive.core.ledger.accounts[job.id].by_cause
    assert "lost_peer" not in lost
    limits = derive(drive.core.view.policy.timeouts, EXPECTED, job.step_ns)
    waited_ns = 7 * SECOND + limits.abort_ns  # until a peer spoke, and until the others had not
    gpus = job.spec.gang.gpus(job.placement.replicas)
    assert lost["node_silent"]["detection"] == gpus * waited_ns


def test_who_does_not_answer_is_silent_at_the_deadline_and_no_earlier():
    watch = Liveness(SILENT_AFTER, 3)
    for node in range(3):
        watch.watch(node, 0)
    watch.ask((0, 1), 3 * SECOND)
    assert watch.next_deadline_ns() == 3 * SECOND
    assert watch.silent(3 * SECOND - 1) == []
    watch.spoke(0, 2 * SECOND)
    assert watch.silent(3 * SECOND) == [NodeSilent(node=1, heard_ns=0)]
    assert watch.silent(4 * SECOND) == []
    assert watch.heartbeat(1, 5 * SECOND), "it speaks again: its inventory is wanted"


@pytest.mark.parametrize("sign", ["heartbeat", "spoke", "watch"])
def test_any_sign_of_life_is_an_answer(sign):
    watch = Liveness(SILENT_AFTER, 1)
    watch.watch(0, 0)
    watch.ask((0,), 3 * SECOND)
    assert watch.asked(0)
    getattr(watch, sign)(0, SECOND)
    assert not watch.asked(0)
    assert watch.silent(3 * SECOND) == []


def test_a_controller_that_was_deaf_gives_everybody_the_time_back():
    watch = Liveness(SILENT_AFTER, 1)
    watch.watch(0, 0)
    watch.ask((0,), 3 * SECOND)
    watch.forgive(2 * SECOND)
    assert watch.silent(4 * SECOND) == []
    assert watch.silent(5 * SECOND) == [NodeSilent(node=0, heard_ns=2 * SECOND)]


def test_a_node_that_is_given_up_already_is_not_asked():
    watch = Liveness(SILENT_AFTER, 2)
    watch.watch(0, 0)
    watch.lost(0)
    watch.ask((0, 1, 7), SECOND)  # given up, never seen, not even known
    assert watch.silent(2 * SECOND) == []


def test_a_gang_that_stopped_while_nobody_listened_is_not_told_to_go():
    """The controller died with a worker: the next one sees it in what the agents say they run."""
    drive = Drive()
    job = drive.running(spares=1)
    node = job.placement.nodes[0]
    stopped = Holding(job.id, 1, "aborted", 160, 159)
    inventory = Inventory(1, (stopped,), ((job.id, 159),))
    commands = drive.tell(NodeSeen(node=node, inventory=inventory))
    assert [type(command.body) for command in commands] == [Abort]
    assert job.gang.phase == "settling" and job.gang.cause == "lost_peer"
    # Why it stopped comes right after it, and nobody need be waited for.
    exited = WorkerExited(
        job=job.id, generation=1, node=node, rank=0, cause="worker_killed", step=160
    )
    drive.tell(exited)
    drive.wait(SECOND // 5)
    assert job.generation == 2 and job.placement.nodes[0] == node


def test_who_takes_the_place_of_a_lost_node_must_answer_too():
    """What took the one may have taken the other, without a broken connection."""
    drive = Drive()
    job = drive.running()
    liveness = Liveness(SILENT_AFTER, 8)
    for node in range(8):
        liveness.watch(node, 0)
    form = drive.last_form()
    liveness.sent(Command(1, 0, 1, form.nodes, form), 3 * SECOND)
    assert not any(liveness.asked(node) for node in form.nodes)  # a first formation has its time
    dead, stays = job.placement.nodes
    drive.tell(NodeSilent(node=dead))
    drive.wait(SECOND)
    form = drive.last_form()
    (spare,) = [node for node in form.nodes if node != stays]
    assert newcomers(form, form.nodes) == [spare]
    liveness.sent(Command(2, 0, 1, (stays,), form), 3 * SECOND)
    assert not liveness.asked(spare)  # it has joined: the order goes again to the other alone
    liveness.sent(Command(2, 0, 1, form.nodes, form), 3 * SECOND)
    assert liveness.asked(spare) and not liveness.asked(stays)
    assert liveness.silent(3 * SECOND) == [NodeSilent(node=spare, heard_ns=0)]


def test_a_gang_that_waits_for_go_gets_it_again():
    drive = Drive()
    job = drive.running()
    waiting = Inventory(1, (Holding(job.id, 1, "ready", 0, 0),), ())
    drive.tell(NodeSeen(node=job.placement.nodes[0], inventory=waiting))
    assert isinstance(drive.sent[-1].body, Go) and job.gang.phase == "running"
