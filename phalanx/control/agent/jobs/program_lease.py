"""How long programs of this node may run: renewed while the server is known to count on the node.

The server takes a node for lost some time after it last heard of it, and only then starts the
node's programs elsewhere. So they may run for a little less than that, counted from when the agent
asked something that the server has answered: see ``timeouts.program_lease_ns``. A server that is
known not to run starts nothing, and gives every node its whole time when it does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from phalanx.control.agent.spawn.zygote_client import ZygoteClient

ASK_SECONDS = 1.0  # between two questions while a program waits to start

Ask = Callable[[Callable[[], None]], None]


class ProgramLease:
    """One node's lease. ``ask`` asks the server, which calls back when it has answered.

    ``wanted``: whether a program runs here; nobody is asked without one.
    """

    def __init__(self, zygote: ZygoteClient, ask: Ask, wanted: Callable[[], bool]) -> None:
        self._zygote, self._ask_server, self._wanted = zygote, ask, wanted
        self._seconds = self._every = 0.0  # 0: the server has not said it yet
        self._until = 0.0
        self._renewed = asyncio.Event()

    def agree(self, seconds: float, every: float) -> None:
        """What the server says; it is asked so often. 0 seconds: it waits for no program's end."""
        self._seconds, self._every = seconds, every
        if self._wanted():
            self._ask()

    async def run(self) -> None:
        """Renew it until cancelled."""
        while True:
            await asyncio.sleep(self._every or ASK_SECONDS)
            if self._wanted():
                self._ask()

    async def held(self) -> None:
        """Wait until the server is known to count on this node, for a while yet."""
        while self._seconds and time.monotonic() >= self._until - self._seconds / 2:
            self._renewed.clear()
            self._ask()
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_SECONDS):
                    await self._renewed.wait()

    def counted_on(self, asked: float) -> None:
        """At this time (monotonic) the server counted on this node, or did not run."""
        seconds = self._seconds or self._zygote.program_lease
        until = asked + seconds
        left = until - time.monotonic()
        if seconds > 0 and left > 0 and until > self._until:
            self._until = until
            self._zygote.renew_programs(seconds, left)
            self._renewed.set()

    def _ask(self) -> None:
        asked = time.monotonic()
        self._ask_server(lambda: self.counted_on(asked))
