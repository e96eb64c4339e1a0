"""What a controller decides about its agents, by connections, messages and the time alone."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.node import Node
from phalanx.cluster.policy import Policy, TimeoutPolicy
from phalanx.cluster.protocol.commands import Command, Form
from phalanx.cluster.protocol.controller_machine import SEVERAL_NS, ControllerMachine
from phalanx.cluster.protocol.controller_outputs import (
    AskRanks,
    Close,
    CloseReason,
    Disbelieved,
    GangOver,
    GangRuns,
    Output,
    Send,
)
from phalanx.cluster.protocol.events import (
    EventBody,
    NodeJoined,
    NodeSilent,
    NoProgress,
    Progress,
)
from phalanx.cluster.protocol.hang_diagnosis import LOOK_NS
from phalanx.cluster.protocol.message_rights import MessageRefusal
from phalanx.cluster.protocol.messages import (
    THIS_NODE,
    Applied,
    DeviceError,
    FlushWanted,
    Heartbeat,
    Holding,
    InspectGang,
    Inventory,
    NodeSeen,
    Seen,
    Steps,
    WorkerExited,
)
from phalanx.cluster.reasons import Reason
from tests.cluster.drive import SECOND, Drive

TIMEOUTS = TimeoutPolicy(heartbeat_ns=4 * SECOND, round_trip_ns=SECOND, reconnect_ns=5 * SECOND)
SILENT = 17 * SECOND
GRACE = 5 * SECOND


class Played:
    """A core and the machine beside it, driven as a shell does."""

    def __init__(self, nodes: int = 8) -> None:
        self.drive = Drive(nodes, Policy(timeouts=TIMEOUTS))
        self.machine: ControllerMachine[str] = ControllerMachine(self.drive.core.view)
        self.machine.take_over(0)
        for node in range(nodes):
            self.machine.connected(node, f"c{node}", 1, 0)

    @property
    def now_ns(self) -> int:
        return self.drive.now_ns

    def running(self) -> ClusterJob:
        """A gang on nodes 0 and 1, whose orders were all confirmed."""
        self.job = self.drive.running()
        assert self.job.placement is not None
        self.nodes = self.job.placement.nodes
        for node in range(len(self.drive.core.view.fleet)):
            self.machine.received(node, Heartbeat(node=node, incarnation=1), self.now_ns)
        return self.job

    def happens(self, body: EventBody) -> list[Output[str]]:
        """The core takes in an event, and the machine hears of it."""
        commands = self.drive.tell(body)
        event = self.drive.log[-1]
        ordered = self.machine.ordered(commands, self.now_ns)
        return [*ordered, *self.machine.handled(event, commands, self.now_ns)]

    def leaves(self, node: int, at_ns: int | None = None) -> list[Output[str]]:
        at_ns = self.now_ns if at_ns is None else at_ns
        return [*self.machine.disconnected(node, f"c{node}", at_ns)]

    def lost_peer(self, node: int) -> list[Output[str]]:
        """A rank on a node says that it lost another."""
        said = WorkerExited(
            node=node, job=self.job.id, generation=1, rank=0, cause="lost_peer", step=150
        )
        return [*self.machine.received(node, said, self.now_ns)]

    def tick(self, at_ns: int, late_ns: int = 0) -> list[Output[str]]:
        return [*self.machine.tick(at_ns, late_ns)]


def silent(outputs: Iterable[Output[str]]) -> list[NodeSilent]:
    return [each for each in outputs if isinstance(each, NodeSilent)]


def test_an_agent_that_connects_again_replaces_its_connection() -> None:
    played = Played()
    closed = played.machine.connected(3, "new", 1, SECOND)
    assert closed == (Close(3, "c3", CloseReason.REPLACED),)
    assert played.leaves(3) == []  # the old one broke: that says nothing of the new one
    assert played.machine.connections[3] == "new" and played.tick(GRACE + SECOND) == []


def test_a_node_whose_connection_broke_is_lost_after_the_grace_and_not_before() -> None:
    played = Played()
    assert played.leaves(2, SECOND) == []
    assert played.machine.soon_ns() == SECOND + GRACE
    assert silent(played.tick(SECOND + GRACE - 1)) == []
    lost = NodeSilent(node=2, connection_lost=True, broke_ns=SECOND, heard_ns=0)
    assert silent(played.tick(SECOND + GRACE)) == [lost]
    assert silent(played.tick(SECOND + GRACE + 1)) == []


def test_a_connection_that_breaks_again_has_the_whole_grace_again() -> None:
    played = Played()
    played.leaves(2, 0)
    played.machine.connected(2, "c2", 1, SECOND)
    played.leaves(2, 4 * SECOND)
    assert silent(played.tick(GRACE)) == []
    assert [each.node for each in silent(played.tick(4 * SECOND + GRACE))] == [2]


def test_a_silent_node_is_closed_and_one_that_spoke_is_not() -> None:
    played = Played(2)
    played.machine.received(0, Heartbeat(node=0, incarnation=1), 4 * SECOND)
    assert played.tick(SILENT) == [
        Close(1, "c1", CloseReason.SILENT),
        NodeSilent(node=1, heard_ns=0),
    ]
    assert list(played.machine.connections) == [0]


def test_a_node_that_was_given_up_must_connect_again_to_be_heard() -> None:
    played = Played(2)
    played.tick(SILENT)
    played.machine.connections[1] = "c1"  # its connection is not over yet
    late = played.machine.received(1, Heartbeat(node=1, incarnation=1), SILENT + 1)
    assert late == (Close(1, "c1", CloseReason.GIVEN_UP),)
    played.machine.connected(1, "again", 1, SILENT + 2)
    assert played.machine.received(1, Heartbeat(node=1, incarnation=1), SILENT + 3) == ()
    hello = NodeSeen(node=1, inventory=Inventory(incarnation=1))
    (seen,) = played.machine.received(1, hello, SILENT + 4)
    assert isinstance(seen, NodeSeen) and seen.node == 1


def joined(played: Played, inventory: Inventory) -> int:
    """A node that nobody knew is let in."""
    played.happens(NodeJoined(node=Node(name="new", gpus=8), inventory=inventory))
    node = played.drive.core.view.fleet.index["new"]
    played.machine.connected(node, "c-new", inventory.incarnation, played.now_ns)
    return node


def test_what_a_node_said_when_it_joined_is_not_logged_again() -> None:
    played, idle = Played(), Inventory(incarnation=1)
    seen = NodeSeen(node=joined(played, idle), inventory=idle)
    assert [*played.machine.received(seen.node, seen, played.now_ns)] == []
    assert [*played.machine.received(seen.node, seen, played.now_ns)] == [seen]  # it says it again


def test_a_node_that_joined_and_has_left_since_is_seen_again() -> None:
    for gone in ("broken", "replaced", "silent"):
        played, idle = Played(), Inventory(incarnation=1)
        node = joined(played, idle)
        if gone == "broken":
            played.machine.disconnected(node, "c-new", played.now_ns)
        elif gone == "silent":
            played.happens(NodeSilent(node=node))
        played.machine.connected(node, "again", 1, played.now_ns)
        seen = NodeSeen(node=node, inventory=idle)
        assert [*played.machine.received(node, seen, played.now_ns)] == [seen], gone


def test_a_node_that_was_given_work_before_it_was_seen_is_looked_at() -> None:
    played, idle = Played(), Inventory(incarnation=1)
    node = joined(played, idle)
    why = Reason("test")
    form = Form(reason=why, job=1, generation=1, nodes=(node,), gpus=())
    played.machine.ordered([Command(1, 0, 1, (node,), form)], played.now_ns)
    seen = NodeSeen(node=node, inventory=idle)
    assert [*played.machine.received(node, seen, played.now_ns)] == [seen]


def test_a_node_that_joined_and_never_came_is_lost() -> None:
    played = Played()
    played.happens(NodeJoined(node=Node(name="ghost", gpus=8), inventory=Inventory(incarnation=1)))
    ghost = played.drive.core.view.fleet.index["ghost"]
    lost = silent(played.tick(played.now_ns + SILENT))
    assert ghost in [each.node for each in lost]


def test_what_a_node_that_joins_still_runs_is_looked_at() -> None:
    played = Played()
    holding = Inventory(incarnation=1, jobs=(Holding(7, 1, "running", 1, 1),))
    seen = NodeSeen(node=joined(played, holding), inventory=holding)
    assert [*played.machine.received(seen.node, seen, played.now_ns)] == [seen]


def test_a_busy_controller_forgives_what_it_could_not_hear() -> None:
    played = Played()
    played.leaves(2, SECOND)
    stalled = 30 * SECOND
    assert silent(played.tick(stalled, late_ns=stalled - SECOND)) == []
    assert silent(played.tick(stalled + GRACE - 1)) == []
    assert [each.node for each in silent(played.tick(stalled + GRACE))] == [2]
    later = played.tick(stalled + SILENT)
    assert [each.node for each in silent(later)] == [0, 1, 3, 4, 5, 6, 7]


def test_nobody_speaks_for_another_node() -> None:
    for message in (
        Heartbeat(node=2, incarnation=1),
        DeviceError(node=2, cause="xid"),
        DeviceError(node=THIS_NODE, cause="xid"),  # not filled in
    ):
        closed = Played().machine.received(1, message, SECOND)
        assert closed == (Close(1, "c1", CloseReason.WRONG_NODE),)


def test_a_fact_of_a_member_becomes_the_event_that_it_is() -> None:
    played = Played()
    job = played.running()
    played.machine.resume(job.id, played.now_ns)
    wish, error = FlushWanted(job=job.id, generation=1), DeviceError(node=7, cause="xid")
    assert played.machine.received(played.nodes[0], wish, SECOND) == (wish,)
    assert played.machine.received(7, error, SECOND) == [error]
    (refused,) = played.machine.received(7, wish, SECOND)
    assert isinstance(refused, Disbelieved) and refused.why is MessageRefusal.NOT_A_MEMBER


def test_what_a_node_may_not_say_is_not_taken_in() -> None:
    played = Played()
    job = played.running()
    stranger = WorkerExited(node=7, job=job.id, generation=1, rank=0, cause="lost_peer", step=1)
    (refused,) = played.machine.received(7, stranger, played.now_ns)
    assert isinstance(refused, Disbelieved) and refused.why is MessageRefusal.NOT_A_MEMBER


def test_a_peer_and_the_controller_that_both_miss_a_node_need_no_grace() -> None:
    played = Played()
    played.running()
    one, other = played.nodes
    played.leaves(other)
    told = played.lost_peer(one)
    assert [each.node for each in silent(told)] == [other]
    assert isinstance(told[-1], WorkerExited)


def test_a_peer_alone_does_not_lose_a_node() -> None:
    played = Played()
    played.running()
    assert silent(played.lost_peer(played.nodes[0])) == []


def test_of_several_that_are_away_nobody_is_lost_at_once() -> None:
    played = Played()
    played.running()
    one, other = played.nodes
    played.leaves(one)
    played.leaves(other)
    assert silent(played.lost_peer(one)) == []
    now = played.now_ns
    assert played.machine.soon_ns() == now + SEVERAL_NS
    played.machine.connected(other, "back", 1, now + SECOND)
    assert [each.node for each in silent(played.tick(now + SEVERAL_NS))] == [one]


def test_after_a_take_over_a_node_that_has_not_connected_yet_gets_some_time() -> None:
    played = Played()
    played.running()
    one, other = played.nodes
    played.machine = ControllerMachine(played.drive.core.view)
    played.machine.take_over(played.now_ns)
    assert played.machine.resume(played.job.id, played.now_ns) == [GangRuns(played.job.id)]
    played.machine.connected(one, "c", 1, played.now_ns)
    assert silent(played.lost_peer(one)) == []
    taken_over = played.now_ns
    lost = silent(played.tick(played.now_ns + SEVERAL_NS))
    assert lost == [NodeSilent(node=other, connection_lost=True, heard_ns=taken_over)]


def test_a_node_that_takes_a_lost_ones_place_and_is_away_has_little_time() -> None:
    played = Played()
    job = played.running()
    for node in range(2, 8):
        played.leaves(node)
    played.happens(NodeSilent(node=played.nodes[1]))
    played.drive.settle(job)
    form = next(each for each in played.drive.sent if each.body is played.drive.last_form())
    assert isinstance(form.body, Form) and job.generation == 2
    played.machine.ordered([form], played.now_ns)
    (spare,) = [node for node in form.body.nodes if node not in played.nodes]
    soon = played.machine.soon_ns()
    assert soon is not None and soon <= played.now_ns + SEVERAL_NS
    assert spare in [each.node for each in silent(played.tick(played.now_ns + SEVERAL_NS))]


def test_a_node_that_is_not_told_to_join_keeps_its_whole_grace() -> None:
    """It has joined before: the order goes again to another alone."""
    played = Played()
    job = played.running()
    played.happens(NodeSilent(node=played.nodes[1]))
    played.drive.settle(job)
    form = next(each for each in played.drive.sent if each.body is played.drive.last_form())
    assert isinstance(form.body, Form)
    (spare,) = [node for node in form.body.nodes if node not in played.nodes]
    now = played.now_ns
    played.machine.received(spare, Heartbeat(node=spare, incarnation=1), now)
    assert played.leaves(spare) == []
    again = structs.replace(form, sequence=form.sequence + 1, target=(played.nodes[0],))
    played.machine.ordered([again], now)
    assert silent(played.tick(now + GRACE - 1)) == []
    assert spare in [each.node for each in silent(played.tick(now + GRACE))]


def test_a_command_is_sent_until_it_is_confirmed_and_once_for_all_its_nodes() -> None:
    played = Played()
    job = played.running()
    form = next(each for each in played.drive.sent if isinstance(each.body, Form))
    assert played.machine.ordered([form], 0) == [Send(form, form.target)]
    again = 2 * TIMEOUTS.round_trip_ns
    assert played.machine.next_deadline_ns() == again
    assert played.tick(again) == [Send(form, form.target)]
    one, other = form.target
    played.machine.received(one, Applied(node=one, sequence=form.sequence, index=form.index), again)
    assert [each for each in played.tick(3 * again) if isinstance(each, Send)] == [
        Send(form, (other,))
    ]
    assert job.generation == 1


def test_a_dead_node_is_sent_nothing_more() -> None:
    played = Played()
    played.running()
    form = next(each for each in played.drive.sent if isinstance(each.body, Form))
    played.machine.ordered([form], played.now_ns)
    one, other = form.target
    played.happens(NodeSilent(node=other))
    sent = [each for each in played.tick(played.now_ns + 3 * SECOND) if isinstance(each, Send)]
    assert Send(form, (one,)) in sent


def test_a_gang_that_hangs_is_looked_at_and_the_node_behind_is_named() -> None:
    played = Played()
    job = played.running()
    played.machine.resume(job.id, played.now_ns)
    played.machine.watch.alive(job.id, 1, job.step, played.now_ns)
    due = played.machine.watch.next_deadline_ns()
    assert due is not None
    for node in range(8):
        played.machine.received(node, Heartbeat(node=node, incarnation=1), due)
    (look,) = [each for each in played.tick(due) if not isinstance(each, Send)]
    assert look == AskRanks(InspectGang(job=job.id, generation=1), played.nodes)
    one, other = played.nodes
    waits = 2 * job.step + 1
    seen = Seen(node=one, job=job.id, generation=1, ranks=dict.fromkeys(range(8), waits), folder="")
    assert played.machine.received(one, seen, due) == ()
    assert played.machine.soon_ns() == due + LOOK_NS
    ranks = {8: waits - 1, **dict.fromkeys(range(9, 16), waits)}
    seen = Seen(node=other, job=job.id, generation=1, ranks=ranks, folder="")
    (fact,) = played.machine.received(other, seen, due + SECOND)
    assert isinstance(fact, NoProgress) and fact.nodes == (other,)


def test_a_gang_with_a_node_that_is_away_is_not_called_hung() -> None:
    played = Played()
    job = played.running()
    played.machine.resume(job.id, played.now_ns)
    due = played.machine.watch.next_deadline_ns()
    assert due is not None
    for node in range(8):
        played.machine.received(node, Heartbeat(node=node, incarnation=1), due)
    played.leaves(played.nodes[1], due)
    told = played.tick(due)
    assert not [each for each in told if isinstance(each, AskRanks | NoProgress)]


def test_gangs_are_watched_while_they_run() -> None:
    played = Played()
    job = played.running()
    progress = Progress(
        job=job.id, generation=1, step=151, committed=151, durable=100, at_ns=played.now_ns
    )
    assert played.happens(progress) == [GangRuns(job.id)]
    assert played.machine.watch.gangs[job.id].reached == 151
    outputs = played.happens(NodeSilent(node=played.nodes[1]))
    assert GangOver(job.id) in outputs and played.machine.watch.gangs == {}


def test_times_that_an_agent_reports_are_not_in_the_future() -> None:
    played = Played()
    job = played.running()
    played.machine.resume(job.id, played.now_ns)
    now, told = played.now_ns, list[Output[str]]()
    for node in played.nodes:
        said = Steps(
            node=node,
            job=job.id,
            generation=1,
            step=152,
            committed=152,
            durable=0,
            at_ns=2 * now,
        )
        told += played.machine.received(node, said, now + 6 * SECOND)
    (progress,) = [each for each in told if isinstance(each, Progress)]
    assert progress.at_ns <= now + 6 * SECOND
