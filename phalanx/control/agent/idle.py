"""An agent that only waits: it joins and tells that it lives, and starts nothing before a job.

Where a node is lent by another engine it costs next to nothing until it is used; then it becomes
the whole agent (see ``phalanx agent --no-standby``), and the server sends its order again.
"""

from __future__ import annotations

import asyncio
import logging
import time

from phalanx import __version__
from phalanx.cluster.protocol.agent_machine import Agent
from phalanx.cluster.protocol.commands import Check, Form
from phalanx.cluster.protocol.messages import Connected, Disconnected, Wake
from phalanx.control.agent.description import NodeDescriber
from phalanx.control.agent.tasks import kept
from phalanx.control.agent.uplink import Uplink
from phalanx.control.host.server_time import ServerTime
from phalanx.control.wire import agent_messages as wire

log = logging.getLogger("phalanx.agent")


class ColdAgent:
    """``run`` returns when there is something to do."""

    def __init__(
        self, describer: NodeDescriber, machine: str, incarnation: int, uplink: Uplink
    ) -> None:
        self._describer, self._machine, self._incarnation = describer, machine, incarnation
        self._uplink = uplink
        self._agent = Agent(0, 0, 0, incarnation)
        self._wanted = asyncio.Event()
        self._clock = ServerTime()

    async def run(self) -> None:
        """Wait for work; raises JoinError where the server refuses for good."""
        following = asyncio.ensure_future(kept(self._follow_description))
        await self._describer.ready()
        serving = asyncio.ensure_future(self._uplink.serve(self))
        beating = asyncio.ensure_future(kept(self._beat))
        wanted = asyncio.ensure_future(self._wanted.wait())
        try:
            await asyncio.wait([serving, wanted], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            tasks = (following, serving, beating, wanted)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow_description(self) -> None:
        await self._describer.follow(self._describe)

    def _describe(self) -> None:
        if self._agent.connected:
            self._uplink.send(self._describer.message(self._agent.node))

    async def _beat(self) -> None:
        while True:
            at = self._agent.next_deadline_ns() if self._agent.connected else None
            wait = 0.2 if at is None else max(0.01, (at - self._clock.now_ns()) / 1e9)
            await asyncio.sleep(wait)
            if self._agent.connected:
                self._tell(Wake())

    def _tell(self, happened: Connected | Disconnected | Wake) -> None:
        for message in self._agent.handle(happened, self._clock.now_ns()):
            self._uplink.send(message)

    # What the connection says.

    def register(self) -> wire.Register:
        """Nothing runs here, and there is no store yet."""
        return wire.Register(
            node=self._describer.node,
            machine=self._machine,
            inventory=self._agent.inventory(),
            version=__version__,
            clock_ns=time.time_ns(),
            description=self._describer.registered(),
        )

    def welcomed(self, welcome: wire.Welcome) -> None:
        """The server let us in."""
        log.info(
            "%s joined as node %d; it starts nothing before a job",
            self._describer.node.name,
            welcome.node,
        )
        self._clock.set(welcome.clock_ns)
        self._agent = Agent(welcome.node, welcome.lease_ns, welcome.heartbeat_ns, self._incarnation)
        self._tell(Connected())
        if self._describer.unsaid():
            self._describe()

    def heard(self, message: wire.Down) -> None:
        """Any order is for the whole agent, which gets it again when it connects."""
        ordered = isinstance(message, wire.Deliver) and isinstance(
            message.command.body, Check | Form
        )
        if ordered or isinstance(message, wire.StartAcceptance):
            self._wanted.set()

    def no_server(self, at: float) -> None:
        """Nothing runs here that would have to end."""

    def parted(self) -> None:
        """The connection is gone."""
        self._tell(Disconnected())
