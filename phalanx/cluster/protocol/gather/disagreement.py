"""Replicas that disagree: what several nodes say of them, and who is wrong."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.detectors import vote
from phalanx.cluster.protocol.events import Corruption
from phalanx.cluster.protocol.messages import ReplicasDiffer

CONFIRM_NS = 5_000_000_000  # for a second node to say the same of replicas that disagree


class Disagreement:
    """What the nodes of one generation say of replicas that disagree; it is reported once."""

    def __init__(self) -> None:
        self._reported = False
        self._said: dict[int, ReplicasDiffer] = {}  # by node
        self.due_ns = 0  # when what nobody confirmed is reported without names; 0: nothing is

    def receive(
        self, message: ReplicasDiffer, nodes: list[int], slot_gpus: int, now_ns: int
    ) -> list[Corruption]:
        """Takes in what one node says. ``slot_gpus``: ranks of a node; 0: all have equally many.

        Weights that changed between two updates say who is wrong; else a vote does. Without either
        the core gets to know what each of them said. All nodes with such replicas say the same:
        what one alone says of others is not believed.
        """
        if self._reported or message.node in self._said:
            return []
        each = slot_gpus or max(1, message.world // len(nodes))
        meant = (*message.changed, *(rank for rank, _ in message.copies))
        if not all(0 <= rank < each * len(nodes) for rank in meant):
            return []
        alone = all(nodes[rank // each] == message.node for rank in meant)
        named = _accused(message, nodes, each)
        agreed = any(
            structs.replace(other, node=message.node) == message
            or (named and _accused(other, nodes, each) == named)
            for other in self._said.values()
        )
        self._said[message.node] = message
        if not alone and not agreed:
            self.due_ns = self.due_ns or now_ns + CONFIRM_NS
            return []
        self._reported, self.due_ns = True, 0
        claims = ((nodes[rank // each], said) for rank, said in message.copies)
        return [
            Corruption(
                job=message.job,
                generation=message.generation,
                step=message.step,
                clean_step=message.clean_step,
                nodes=named,
                claims=() if named else tuple(claims),
                block=min((rank for rank, _ in message.copies), default=0),
            )
        ]

    def due(self, now_ns: int) -> list[Corruption]:
        """What one node alone said, in time: the step is made again, and nobody is accused."""
        if not 0 < self.due_ns <= now_ns:
            return []
        self._reported, self.due_ns = True, 0
        first = next(iter(self._said.values()))
        return [
            Corruption(
                job=first.job,
                generation=first.generation,
                step=first.step,
                clean_step=min(each.clean_step for each in self._said.values()),
                nodes=(),
            )
        ]


def _accused(message: ReplicasDiffer, nodes: list[int], each: int) -> tuple[int, ...]:
    """Nodes whose replicas are wrong, as far as one message tells."""
    wrong = message.changed or vote({0: message.copies}).wrong
    return tuple(dict.fromkeys(nodes[rank // each] for rank in wrong))
