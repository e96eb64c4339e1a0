"""What nodes keep in memory is not given up because somebody restarted or left."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import ClusterJob, GangShape, Placement
from phalanx.cluster.node import Held, Node
from phalanx.cluster.placement.choose import PlacementRequest, place
from phalanx.cluster.placement.free_index import set_of_nodes
from phalanx.cluster.policy import Policy, RecoveryPolicy
from phalanx.cluster.protocol.commands import Command, Form, Stop
from phalanx.cluster.protocol.events import GangJoined, JobFinished, NodeSilent
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
from tests.cluster.drive import SECOND, SHAPE, Drive


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


def queued_again(drive: Drive, nodes: int) -> tuple[ClusterJob, tuple[int, ...], ClusterJob]:
    """A job that lacks a node and waits, its nodes, and another one that keeps it from starting."""
    shape = structs.replace(SHAPE, replicas=nodes)
    other = drive.running(gang=shape)
    job = drive.running(gang=shape)
    before = job.placement.nodes
    drive.tell(NodeSilent(node=before[0]))
    drive.wait(SECOND)
    assert job.state == "pending" and job.kept is not None
    return job, before[1:], other


def test_a_job_that_starts_again_goes_where_its_memory_is():
    # Eight nodes in two leaves: when the other job ends, its leaf alone has room for all of it.
    drive = Drive(8)
    job, holders, other = queued_again(drive, 4)
    done = JobFinished(job=other.id, generation=other.generation, step=other.step)
    drive.tell(done, SECOND)
    drive.wait(SECOND)
    assert job.state == "forming" and set(holders) < set(job.placement.nodes)
    drive.run(job)
    assert (drive.last_restore().step, drive.last_restore().source) == (150, "peer")


def test_jobs_that_share_nodes_keep_their_memory_when_one_of_them_is_whole_again():
    half = structs.replace(SHAPE, tensor=4, slot_gpus=4, slot_cpus=4, replicas=4)
    drive = Drive(4)
    jobs = [drive.running(gang=half) for _ in range(2)]
    assert jobs[0].placement.nodes == jobs[1].placement.nodes
    lost, *holders = jobs[0].placement.nodes
    drive.tell(NodeSilent(node=lost))
    drive.wait(SECOND)
    assert all(job.state == "pending" and job.kept is not None for job in jobs)
    drive.tell(NodeSeen(node=lost, inventory=Inventory(incarnation=2)), SECOND)
    drive.tell(CheckResult(node=lost, check="full", passed=True), SECOND)
    drive.wait(SECOND)
    for job in jobs:
        assert job.state == "forming" and job.placement.nodes == (lost, *holders)
        assert job.lost_steps == 0 and job.gang.kept_generation == 1


def test_memory_goes_where_another_job_leaves_no_room_for_a_slot():
    half = structs.replace(SHAPE, tensor=4, slot_gpus=4, slot_cpus=4, replicas=4)
    drive = Drive(4, Policy(recovery=RecoveryPolicy(keep_memory_ns=10**6 * SECOND)))
    job = drive.running(gang=half)
    lost = job.placement.nodes[0]
    drive.tell(NodeSilent(node=lost))
    drive.wait(SECOND)
    assert job.state == "pending" and job.kept is not None
    beside = drive.running(gang=structs.replace(half, replicas=3))
    assert lost not in beside.placement.nodes and job.kept is not None
    drive.running(gang=structs.replace(half, replicas=3, slot_gpus=2, tensor=2))
    assert job.kept is None and job.lost_steps > 0


def test_a_gang_of_one_node_goes_back_to_it():
    drive = Drive(4)
    place = placed(drive, GangShape(replicas=1, tensor=8, slot_gpus=8), holders=(2,))
    assert place.nodes == (2,)


def test_memory_that_cannot_be_used_keeps_nobody_from_starting():
    fleet = Fleet(Node(name=f"n{i}", domain=f"d{i // 2}") for i in range(6))
    drive = Drive(fleet=fleet)
    wide = GangShape(replicas=2, tensor=16, slot_gpus=8)
    # Nodes 1 and 2 have it, but a tensor group needs both nodes of a domain.
    assert placed(drive, wide, holders=(1, 2)).nodes == (0, 1, 2, 3)
    drive.core.view.fleet.take(9, 0, Held(0xFF, 8, 0))
    assert placed(drive, wide, holders=(1, 2)).nodes == (2, 3, 4, 5)


def placed(drive: Drive, shape: GangShape, holders: tuple[int, ...]) -> Placement:
    asked = PlacementRequest(
        job=1, shape=shape, replicas=shape.replicas, holders=set_of_nodes(holders)
    )
    found = place(drive.core.view.fleet, asked)
    assert isinstance(found, Placement)
    return found
