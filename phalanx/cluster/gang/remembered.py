"""What is remembered of gangs that are gone: their memory, what was lost, what was disputed."""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.reasons import Reason


class Kept(Struct, kw_only=True):
    """What nodes keep of a job that left them: see ``left_memory``."""

    nodes: tuple[int, ...]  # by slot of the last generation that ran
    generation: int  # that one
    buddy_shift: int
    since: int  # checkpoints after this step were written by these very nodes
    lost: dict[int, str]  # nodes whose memory is gone, with the cause
    token: int  # tells whether a timer speaks of this
    keep_ns: int = 0  # from then on, unless others get the nodes; 0: as the policy says

    @property
    def holders(self) -> tuple[int, ...]:
        """Nodes that still have something."""
        return tuple(node for node in self.nodes if node not in self.lost)


class Loss(Struct, frozen=True, kw_only=True):
    """Committed steps that are gone, and why."""

    first: int
    last: int
    at_ns: int  # when it was found out
    why: Reason


class Dispute(Struct, kw_only=True):
    """A step on which word stands against word, and all that was said of it."""

    step: int
    block: int
    replicas: int  # with another number of them sums are added up otherwise: all is open again
    times: int = 0
    claims: tuple[tuple[int, int], ...] = ()  # (node, fingerprint), oldest first
