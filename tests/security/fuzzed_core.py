"""A core with a fleet that is ordered about, and how long each order took it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from hypothesis import strategies as st

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.node import Node
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.events import (
    Cancel,
    Event,
    EventBody,
    Hold,
    NodeJoined,
    RaiseBudget,
    Replan,
    Requeue,
    Scale,
    SetQuota,
    SetReservation,
    Submit,
    SubmitWorkflow,
    Tick,
)
from phalanx.cluster.protocol.messages import Inventory
from tests.security.values import of_type

ORDERS = (
    Submit,
    SubmitWorkflow,
    Cancel,
    Requeue,
    Hold,
    Scale,
    Replan,
    RaiseBudget,
    SetQuota,
    SetReservation,
)


class FuzzedCore:
    """So many nodes of 8 GPUs; times are of the processor."""

    def __init__(self, nodes: int) -> None:
        self.core = Core(Fleet(), Policy())
        self.longest_seconds, self.slowest = 0.0, ""
        self._now = 1
        for number in range(nodes):
            node = Node(name=f"n{number}", gpus=8, cpus=64, leaf=f"l{number // 16}")
            self._one(NodeJoined(node=node, inventory=Inventory()))
        self.longest_seconds = 0.0

    def handle(self, body: EventBody) -> None:
        """One order."""
        self._now += 10**9
        self._one(body)

    def settle(self, ticks: int) -> None:
        """Time passes until nothing is due soon."""
        for _ in range(ticks):
            deadline = self.core.next_deadline_ns()
            if deadline is None or deadline > self._now + 10**9:
                return
            self._now = max(self._now, deadline)
            self._one(Tick())

    def _one(self, body: EventBody) -> None:
        event = Event(self.core.sequence + 1, self._now, body)
        began = time.thread_time()
        self.core.handle(event)
        spent = time.thread_time() - began
        if spent > self.longest_seconds:
            self.longest_seconds, self.slowest = spent, f"{spent:.3f} s: {str(body)[:500]}"


def order_bodies() -> Any:
    """Orders as the log may hold them: of the right types, with any values."""
    return st.one_of([of_type(kind).map(_convert(kind)) for kind in ORDERS]).filter(
        lambda body: body is not None
    )


def _convert(kind: Any) -> Any:
    def convert(plain: Any) -> Any:
        try:
            return msgspec.convert(plain, kind)
        except (msgspec.MsgspecError, RecursionError, OverflowError):
            return None

    return convert
