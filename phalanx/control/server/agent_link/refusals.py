"""Messages of agents that are not taken in: counted, and logged now and then."""

from __future__ import annotations

import logging
import time
from collections import Counter

from msgspec import Struct

from phalanx.cluster.protocol.message_rights import MessageRefusal, refusal
from phalanx.cluster.state import View
from phalanx.control.server.security.request_limits import RateLimit
from phalanx.control.wire.agent_messages import AcceptanceNews, Described, SetUp
from phalanx.observe.node.node_messages import NodeRecords

# What an agent with many short jobs says is far below this; what is above it would fill the log.
MESSAGES_PER_SECOND, BURST = 100.0, 1_000
DESCRIPTIONS_PER_SECOND, DESCRIPTIONS_BURST = 0.2, 20  # each is stored
QUIET_SECONDS = 60.0  # between two lines about one node

logger = logging.getLogger("phalanx.server")


class Refusals:
    """What may be heard of each node."""

    def __init__(self) -> None:
        self._rate = RateLimit(MESSAGES_PER_SECOND, BURST)
        self._descriptions = RateLimit(DESCRIPTIONS_PER_SECOND, DESCRIPTIONS_BURST)
        self.counts: Counter[MessageRefusal] = Counter()
        self._of_node: Counter[int] = Counter()
        self._told: dict[int, float] = {}

    def refused(self, view: View, node: int, message: Struct) -> bool:
        """Whether a message of the server's own kinds is not for this node to say."""
        if self.too_many(view, node, message):
            return True
        why = refusal(view, node, message, last_word=isinstance(message, NodeRecords))
        if why is not None:
            self.note(view, node, message, why)
        return why is not None

    def too_many(self, view: View, node: int, message: Struct) -> bool:
        """Whether a node says more than anybody needs to."""
        now = time.monotonic()
        stored = isinstance(message, Described | SetUp | AcceptanceNews)
        described = stored and self._descriptions.take(node, now)
        if not self._rate.take(node, now) and not described:
            return False
        self.note(view, node, message, MessageRefusal.TOO_MANY)
        return True

    def note(self, view: View, node: int, message: Struct, why: MessageRefusal) -> None:
        """A message is not believed; who says such things is told of."""
        self.counts[why] += 1
        if why is MessageRefusal.OVER:
            return  # an honest node may be late
        self._of_node[node] += 1
        now = time.monotonic()
        if now - self._told.get(node, -QUIET_SECONDS) >= QUIET_SECONDS:
            self._told[node] = now
            logger.warning(
                "%s said what it may not (%s, %s): not believed; %d such messages of it so far",
                view.fleet.nodes[node].name,
                type(message).__name__,
                why,
                self._of_node[node],
            )
