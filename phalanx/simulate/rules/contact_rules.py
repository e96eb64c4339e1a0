"""Rules on what a controller does about its agents, by what reached it and when.

They are written down apart from the machine that decides: nobody is given up too early or
overlooked, and whatever nobody confirmed is sent again. Times are those in which the controller
listened: while it stands still, nobody can be late.
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.cluster.causes import Cause
from phalanx.cluster.jobs.job import Expected
from phalanx.cluster.node import NodeState
from phalanx.cluster.protocol.commands import Abort, Command, Form, gang_of
from phalanx.cluster.protocol.events import NodeSilent
from phalanx.cluster.protocol.messages import (
    AgentMessage,
    Applied,
    Heartbeat,
    NodeSeen,
    WorkerExited,
)
from phalanx.cluster.protocol.timeouts import derive
from phalanx.cluster.state import View

SECOND = 10**9
SENT_AGAIN = 61 * SECOND  # at the latest
SLACK = SECOND

CommandKey = tuple[int, int]  # sequence, index


class ContactRules:
    """What one controller could know of its nodes."""

    def __init__(self, view: View, complain: Callable[[str, str], None], now_ns: int) -> None:
        policy = view.policy.timeouts
        self._view, self._complain, self._began_ns = view, complain, now_ns
        limits = derive(policy, Expected())
        self._silent_ns, self._answer_ns = limits.silent_ns, limits.abort_ns
        self._grace_ns = min(policy.reconnect_ns, limits.silent_ns)
        self._deaf_ns = 0  # that it stood still
        self._connected: dict[int, int] = {}  # node: number of its connection
        self._left_ns: dict[int, int] = {}
        self._spoke_ns: dict[int, int] = {}
        self._incarnation: dict[int, int] = {}
        self._wanted: dict[int, None] = {}  # nodes that a gang misses or waits for
        self._unconfirmed: dict[tuple[int, CommandKey], tuple[int, Command]] = {}
        fleet = view.fleet
        dead = (node for node in range(len(fleet)) if fleet.state(node) is NodeState.DEAD)
        self._given_up: dict[int, None] = dict.fromkeys(dead)

    def _at(self, now_ns: int) -> int:
        """How long it had listened by then."""
        return now_ns - self._deaf_ns

    def deaf(self, passed_ns: int) -> None:
        """The controller stood still for this long."""
        self._deaf_ns += passed_ns

    def opened(self, node: int, connection: int, now_ns: int) -> None:
        """An agent has connected."""
        self._connected[node] = connection
        self._given_up.pop(node, None)
        self._spoke(node, now_ns)

    def broke(self, node: int, connection: int, now_ns: int) -> None:
        """A connection is gone."""
        if self._connected.get(node) == connection:
            del self._connected[node]
            self._left_ns[node] = self._at(now_ns)

    def heard(self, message: AgentMessage, now_ns: int) -> None:
        """A message came on a connection."""
        match message:
            case NodeSeen(node=node, inventory=inventory):
                self._incarnation[node] = inventory.incarnation
                self._given_up.pop(node, None)
                self._spoke(node, now_ns)
            case Heartbeat(node=node, incarnation=incarnation):
                if incarnation >= self._incarnation.get(node, 0):
                    self._spoke(node, now_ns)
            case Applied(node=node, sequence=sequence, index=index):
                self._unconfirmed.pop((node, (sequence, index)), None)
                self._spoke(node, now_ns)
            case WorkerExited(job=number, cause=Cause.LOST_PEER):
                job = self._view.jobs.get(number)
                nodes = job.placement.nodes if job is not None and job.placement is not None else ()
                self._want(*(node for node in nodes if node not in self._connected))

    def _spoke(self, node: int, now_ns: int) -> None:
        self._spoke_ns[node] = self._at(now_ns)
        self._wanted.pop(node, None)

    def _want(self, *nodes: int) -> None:
        self._wanted.update(dict.fromkeys(nodes))

    def sent(self, command: Command, nodes: tuple[int, ...], now_ns: int) -> None:
        """A command goes out, or goes out again."""
        body = command.body
        if isinstance(body, Abort) and body.answer_ns:
            self._want(*nodes)
        elif isinstance(body, Form) and body.kept_nodes:
            self._want(*(node for node in nodes if node not in body.kept_nodes))
        for node in nodes:
            self._overtake(node, command)
            key = command.sequence, command.index
            if self._view.fleet.state(node) is NodeState.DEAD:  # nobody is there to confirm it
                self._unconfirmed.pop((node, key), None)
            else:
                self._unconfirmed[node, key] = self._at(now_ns), command

    def _overtake(self, node: int, command: Command) -> None:
        """Orders of older generations need not be sent again."""
        new = gang_of(command)
        for key, (_, older) in list(self._unconfirmed.items()):
            old = gang_of(older)
            if key[0] == node and new and old and old[0] == new[0] and old[1] < new[1]:
                del self._unconfirmed[key]

    def given_up(self, fact: NodeSilent, now_ns: int) -> None:
        """The controller says that a node is lost."""
        node, at = fact.node, self._at(now_ns)
        if fact.connection_lost and node in self._connected:
            self._complain("given_up", f"node {node} has a connection")
        self._connected.pop(node, None)
        self._given_up[node] = None
        wanted = node in self._wanted
        if fact.connection_lost:
            passed = at - self._left_ns.get(node, self._began_ns)
            least = 0 if wanted else self._grace_ns
        else:
            passed = at - self._spoke_ns.get(node, self._began_ns)
            least = self._answer_ns if wanted else self._silent_ns
        if passed < least:
            told = f"node {node} was away or silent for {passed / 1e9:.1f} of {least / 1e9:.1f} s"
            self._complain("given_up", told)

    def handled(self, fact: NodeSilent) -> None:
        """The core has heard of it: a dead node is sent nothing more."""
        if self._view.fleet.state(fact.node) is NodeState.DEAD:
            for key in [key for key in self._unconfirmed if key[0] == fact.node]:
                del self._unconfirmed[key]

    def check(self, now_ns: int) -> None:
        """What should have happened by now."""
        at = self._at(now_ns)
        for node in range(len(self._view.fleet)):
            passed = at - self._spoke_ns.get(node, self._began_ns)
            if node not in self._given_up and passed > self._silent_ns + SLACK:
                self._given_up[node] = None
                self._complain("overlooked", f"node {node} is silent for {passed / 1e9:.1f} s")
        for (node, key), (sent_ns, command) in list(self._unconfirmed.items()):
            if at - sent_ns > SENT_AGAIN + SLACK:
                del self._unconfirmed[node, key]
                name = type(command.body).__name__
                self._complain("delivery", f"{name} of event {key[0]} to node {node}")
