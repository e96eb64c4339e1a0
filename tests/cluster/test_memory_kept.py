"""What nodes keep in memory is not given up because somebody restarted or left."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.policy import Policy, RecoveryPolicy
from phalanx.cluster.protocol.commands import Command, Form, Stop
from phalanx.cluster.protocol.events import GangJoined, NodeSilent
from phalanx.cluster.protocol.gather import Gather
from phalanx.cluster.protocol.keeper_state import KeptSteps
from phalanx.cluster.protocol.messages import (
    CheckResult,
    Holding,
    Inventory,
    Joined,
    NodeSeen,
    WorkerExited,
)
from phalanx.cluster.reasons import reason
from tests.cluster.drive import SECOND, Drive


def joined_step(kept: tuple[int, ...], shift: int, *answers: Joined) -> int:
    """The step that these nodes can go on from when a gang on ``kept`` made the snapshots."""
    gather = Gather()
    nodes = tuple(answer.node for answer in answers)
    order = Form(
        reason=reason("x"),
        job=1,
        generation=4,
        nodes=nodes,
        gpus=(),
        kept_generation=3,
        kept_nodes=kept,
        kept_shift=shift,
    )
    gather.expect(Command(1, 0, 1, nodes, order))
    events = [event for answer in answers for event in gather.receive(answer, SECOND)]
    (found,) = [event for event in events if isinstance(event, GangJoined)]
    return found.step


def answer(node: int, own: tuple[int, ...] = (), ward: tuple[int, ...] = ()) -> Joined:
    return Joined(
        node=node,
        job=1,
        generation=4,
        kept=KeptSteps(own, ward),
    )


def test_a_node_that_came_back_empty_is_spoken_for_by_its_buddy():
    assert joined_step((0, 5), 1, answer(0, (45, 44), (44, 43)), answer(5)) == 44


def test_a_growing_gang_does_not_go_back_to_what_its_buddies_have_of_living_nodes():
    # Node 4 is new; nodes 1 and 3 speak for themselves, whatever lags behind at their buddies.
    old = answer(1, (50, 49), (49, 48)), answer(3, (50, 49), (49, 48))
    assert joined_step((1, 3), 1, *old, answer(4)) == 50


def test_a_ward_of_long_ago_does_not_take_a_lone_node_back():
    assert joined_step((3,), 0, answer(3, (50, 49), (12,)), answer(1)) == 50


def test_a_seal_that_is_late_in_one_place_is_found_in_the_other():
    # Slot 0's own seal of step 8 was not heard of, its buddy's was; and the other way round.
    assert joined_step((0, 1), 1, answer(0, (7, 6), (7, 6)), answer(1, (8, 7), (8, 7))) == 8


def test_slots_that_nobody_here_had_leave_the_step_to_the_others():
    assert joined_step((0, 1, 2, 3), 1, answer(0, (9, 8), (9, 8)), answer(7)) == 9


def test_a_node_that_was_given_up_and_comes_back_counts_with_what_it_kept():
    drive = Drive(3)
    job = drive.running()
    first, second = job.placement.nodes
    drive.tell(NodeSilent(node=first), SECOND)
    drive.wait(SECOND)
    other = job.placement.nodes[0]
    assert other != first and first in job.gang.lost
    kept = Inventory(incarnation=1, snapshots=((job.id, job.committed),))
    drive.tell(NodeSeen(node=first, inventory=kept), SECOND)
    drive.tell(CheckResult(node=first, check="full", passed=True), SECOND)
    drive.tell(NodeSilent(node=other), SECOND)
    drive.wait(SECOND)
    assert job.placement.nodes == (first, second)
    drive.tell(GangJoined(job=job.id, generation=job.generation, step=job.committed), SECOND)
    assert job.gang.lost == {} and job.gang.source == "peer"


def test_a_node_with_the_only_copy_is_told_to_leave_without_dropping_it():
    drive = Drive(8)
    job = drive.running()
    first, _ = job.placement.nodes
    drive.tell(NodeSilent(node=first), SECOND)
    drive.wait(SECOND)
    holding = Holding(job.id, job.generation - 1, "aborted", job.step, job.committed)
    told = drive.tell(NodeSeen(node=first, inventory=Inventory(1, (holding,))), SECOND)
    (stop,) = [command.body for command in told if isinstance(command.body, Stop)]
    assert stop.keep_snapshots


def test_an_agent_that_restarted_without_workers_still_has_the_keepers_memory():
    drive = Drive(8)
    job = drive.running()
    node = job.placement.nodes[0]
    kept = Inventory(incarnation=2, jobs=(), snapshots=((job.id, job.committed),))
    drive.tell(NodeSeen(node=node, inventory=kept), SECOND)
    drive.wait(SECOND)
    assert job.state == "forming" and job.gang.lost == {}


def test_an_agent_that_restarted_with_nothing_has_lost_it():
    drive = Drive(8)
    job = drive.running()
    node = job.placement.nodes[0]
    drive.tell(NodeSeen(node=node, inventory=Inventory(incarnation=2)), SECOND)
    drive.wait(SECOND)
    assert node in job.gang.lost


def test_a_checkpoint_that_other_nodes_wrote_does_not_come_from_the_disks_of_these():
    drive = Drive(8, Policy(recovery=RecoveryPolicy(peer_memory=False)))
    job = drive.running(steps=150)  # checkpoint 100 lies on the disks of both nodes
    drive.tell(
        WorkerExited(
            job=job.id,
            generation=1,
            node=job.placement.nodes[0],
            rank=0,
            cause="worker_killed",
            step=150,
        )
    )
    drive.wait(SECOND)
    drive.run(job)
    assert (drive.last_restore().step, drive.last_restore().source) == (100, "disk")
    drive.tell(NodeSilent(node=job.placement.nodes[0]), SECOND)
    drive.wait(SECOND)
    drive.run(job)
    assert drive.last_restore().source == "remote"
    # The node that was swapped in has read checkpoint 100, but never wrote it.
    drive.tell(
        WorkerExited(
            job=job.id,
            generation=3,
            node=job.placement.nodes[0],
            rank=0,
            cause="worker_killed",
            step=100,
        ),
        SECOND,
    )
    drive.wait(SECOND)
    drive.run(job)
    assert drive.last_restore().source == "remote"


def test_a_checkpoint_that_was_made_after_the_last_report_is_not_forgotten():
    drive = Drive(8, Policy(recovery=RecoveryPolicy(peer_memory=False)))
    job = drive.running(steps=150)
    assert job.durable == 100
    told = answer(0, (219, 218)), structs.replace(answer(1, (219, 218)), durable=200)
    gather = Gather()
    order = Form(reason=reason("x"), job=1, generation=4, nodes=(0, 1), gpus=())
    gather.expect(Command(1, 0, 1, (0, 1), order))
    (joined,) = [event for one in told for event in gather.receive(one, SECOND)]
    drive.tell(
        WorkerExited(
            job=job.id,
            generation=1,
            node=job.placement.nodes[0],
            rank=0,
            cause="worker_killed",
            step=219,
        )
    )
    drive.wait(SECOND)
    drive.tell(structs.replace(joined, job=job.id, generation=job.generation))
    assert drive.last_restore().step == 200
