"""What nodes keep in memory is not given up because somebody restarted or left."""

from __future__ import annotations

from phalanx.cluster.commands import Command, Form
from phalanx.cluster.events import GangJoined, NodeSeen
from phalanx.cluster.gather import Gather
from phalanx.cluster.messages import Inventory, Joined
from phalanx.cluster.reasons import reason
from tests.cluster.drive import SECOND, Drive


def joined_step(*answers: Joined) -> int:
    """The step that a gang of these nodes can go on from, as its gathering says."""
    gather = Gather()
    nodes = tuple(answer.node for answer in answers)
    order = Form(reason=reason("x"), job=1, generation=4, nodes=nodes, gpus=(), buddy_shift=1)
    gather.expect(Command(1, 0, 1, nodes, order))
    events = [event for answer in answers for event in gather.receive(answer, SECOND)]
    (found,) = [event for event in events if isinstance(event, GangJoined)]
    return found.step


def test_a_node_that_came_back_empty_is_spoken_for_by_its_buddy():
    ahead = Joined(
        node=0, job=1, generation=4, committed=45, previous=44, ward=44, ward_previous=43
    )
    empty = Joined(node=5, job=1, generation=4, committed=-1)
    assert joined_step(ahead, empty) == 44


def test_a_ward_of_long_ago_does_not_take_a_growing_gang_back():
    alone = Joined(node=3, job=1, generation=4, committed=50, previous=49, ward=12)
    new = Joined(node=1, job=1, generation=4, committed=-1)
    assert joined_step(alone, new) == 50


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
