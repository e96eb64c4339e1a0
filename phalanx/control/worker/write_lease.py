"""Leave to write a durable checkpoint, where the site shares out the storage's time."""

from __future__ import annotations

import time

from phalanx.cluster.protocol.commands import Flush
from phalanx.cluster.protocol.messages import FlushWanted
from phalanx.control.wire.worker_messages import AgentLink

ASK_AGAIN_SECONDS = 5.0  # for leave to write


class AgentWriteLease:
    """Asks the agent; the link's thread hands in what it answers."""

    def __init__(self, link: AgentLink, job: int) -> None:
        self._link, self._job = link, job
        self.generation = 0  # of the worker: leave that another one was given is none
        self.granted: Flush | None = None
        self._asked = 0.0  # for it, when

    def ask_lease(self) -> None:
        """Asks for leave to write, and again every few seconds: words get lost."""
        now = time.monotonic()
        if now - self._asked > ASK_AGAIN_SECONDS:
            self._asked = now
            self._link.say(FlushWanted(job=self._job, generation=self.generation))

    def may_write(self) -> int | None:
        """What this rank may write a second (0: any), while it may."""
        order = self.granted
        if order is None or order.generation != self.generation:
            return None
        if order.until_ns < time.time_ns():
            self.granted = None
            return None
        return order.bytes_per_second

    def used_lease(self) -> None:
        """A checkpoint was handed over: the next one asks again."""
        self.granted, self._asked = None, 0.0
