"""Who is alive: heartbeats in, ``NodeSilent`` and ``NodeSeen`` out.

This sub-state is not logged (a fleet sends thousands of heartbeats a second); the facts it emits
are. It goes by the controller's own clock: what an agent's clock says does not matter.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from phalanx.cluster.protocol.commands import Abort, Command, Form
from phalanx.cluster.protocol.events import NodeSilent

NEVER = -(1 << 62)
WATCHED = 0
SILENT = 1  # reported; a heartbeat makes the shell ask for its inventory
UNWATCHED = 2  # not connected yet


class Liveness:
    """Last word of every node; one integer each."""

    def __init__(self, silent_after_ns: int, nodes: int = 0) -> None:
        self.silent_after_ns = silent_after_ns
        self._last = array("q", [NEVER]) * nodes
        self._status = array("b", [UNWATCHED]) * nodes
        self._incarnation = array("q", [0]) * nodes
        self._asked: dict[int, int] = {}  # by node: until when it must say something

    def watch(self, node: int, now_ns: int, incarnation: int = 0) -> None:
        """A node has connected (or the controller has just taken over): its time starts now."""
        while len(self._last) <= node:
            self._last.append(NEVER)
            self._status.append(UNWATCHED)
            self._incarnation.append(0)
        self._last[node] = now_ns
        self._status[node] = WATCHED
        self._incarnation[node] = incarnation
        self._asked.pop(node, None)

    def ask(self, nodes: Sequence[int], until_ns: int) -> None:
        """Peers miss one of these nodes, and all were told to answer: who does not is silent.

        Two must agree before a node is given up early: a peer that lost it and this controller.
        """
        for node in nodes:
            if node < len(self._status) and self._status[node] == WATCHED:
                self._asked[node] = until_ns

    def sent(self, command: Command, answer_ns: int) -> None:
        """A command goes out that somebody must answer soon, or is silent.

        An abort after a lost peer says by when. Whoever takes the place of a lost node has until
        ``answer_ns``: what took the one may have taken the other. A node that this command does not
        go to, as it has answered before, has nothing to answer.
        """
        body = command.body
        if isinstance(body, Abort) and body.answer_ns:
            self.ask(command.target, body.answer_ns)
        elif isinstance(body, Form):
            self.ask(newcomers(body, command.target), answer_ns)

    def asked(self, node: int) -> bool:
        """Whether a node still owes an answer."""
        return node in self._asked

    def spoke(self, node: int, now_ns: int) -> None:
        """A message that is no heartbeat is a sign of life too, of a node that was not given up."""
        if self._status[node] == WATCHED:
            self._last[node] = now_ns
            self._asked.pop(node, None)

    def heartbeat(self, node: int, now_ns: int, incarnation: int = 0) -> bool:
        """A sign of life. True when the node was silent: the shell asks for its inventory.

        A heartbeat of an earlier incarnation is a late echo of an agent that is gone.
        """
        if incarnation < self._incarnation[node]:
            return False
        self._last[node] = now_ns
        if self._asked:
            self._asked.pop(node, None)
        return self._status[node] == SILENT or incarnation > self._incarnation[node]

    def forgive(self, deaf_ns: int) -> None:
        """The controller itself did not listen for this long: nobody was silent meanwhile."""
        last = np.frombuffer(self._last, np.int64)
        status = np.frombuffer(self._status, np.int8)
        last[status == WATCHED] += deaf_ns
        for node in self._asked:
            self._asked[node] += deaf_ns

    def lost(self, node: int, broke_ns: int = -1) -> NodeSilent | None:
        """A node's connection broke, and it did not come back."""
        if self._status[node] != WATCHED:
            return None
        self._status[node] = SILENT
        self._asked.pop(node, None)
        heard_ns = self._last[node]
        return NodeSilent(node=node, connection_lost=True, broke_ns=broke_ns, heard_ns=heard_ns)

    def silent(self, now_ns: int) -> list[NodeSilent]:
        """Nodes that have been quiet for too long, each reported once."""
        last = np.frombuffer(self._last, np.int64)
        status = np.frombuffer(self._status, np.int8)
        late = np.nonzero((last <= now_ns - self.silent_after_ns) & (status == WATCHED))[0]
        nodes = dict.fromkeys(int(node) for node in late)
        nodes.update((node, None) for node, until in self._asked.items() if until <= now_ns)
        del last, status, late  # an array with a view cannot grow
        for node in nodes:
            self._status[node] = SILENT
            self._asked.pop(node, None)
        return [NodeSilent(node=node, heard_ns=self._last[node]) for node in nodes]

    def next_deadline_ns(self) -> int | None:
        """When the first node would be late if nothing came any more."""
        last = np.frombuffer(self._last, np.int64)
        status = np.frombuffer(self._status, np.int8)
        watched = last[status == WATCHED]
        first = int(watched.min()) + self.silent_after_ns if len(watched) else None
        asked = min(self._asked.values(), default=None)
        return min((at for at in (first, asked) if at is not None), default=None)


def newcomers(order: Form, target: Sequence[int]) -> list[int]:
    """Nodes among ``target`` that take the places of others in a gang that ran before."""
    if not order.kept_generation or not order.kept_nodes:
        return []
    had, asked = dict.fromkeys(order.kept_nodes), dict.fromkeys(target)
    return [node for node in order.nodes if node in asked and node not in had]
