"""Keeps the description of a node: read at start beside everything else, and again after changes.

Whatever hangs, hangs in a thread of its own; the agent goes on with what was read before.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import structs

from phalanx.cluster.node import Node
from phalanx.control.agent.config import DescribeOptions
from phalanx.control.agent.description.node import count_warning, described_node
from phalanx.control.agent.description.sources import DescriptionSources
from phalanx.control.wire.agent_messages import Described
from phalanx.hardware.probe.describe import until_read
from phalanx.hardware.probe.description import (
    NodeDescription,
    changed_facts,
    kept_description,
)

FILE = "description.json"
REREAD_SECONDS = 3600.0  # though nothing is seen to have changed
RETRY_POLLS = 10  # looks after which what could not be read is tried again

T = TypeVar("T")
log = logging.getLogger("phalanx.agent")


async def in_thread(work: Callable[[], T]) -> T | None:
    """What a function returns; None where it fails. A thread that hangs keeps no process alive."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T | None] = loop.create_future()

    def finish(result: T | None) -> None:
        if not done.done():
            done.set_result(result)

    def run() -> None:
        result = None
        try:
            result = work()
        except Exception:
            log.exception("this node cannot be described; the agent goes on")
        with suppress(RuntimeError):  # the agent has ended meanwhile
            loop.call_soon_threadsafe(finish, result)

    threading.Thread(target=run, name="describe", daemon=True).start()
    return await done


class NodeDescriber:
    """``node`` and ``description`` are what is known now."""

    def __init__(
        self, base: Node, sources: DescriptionSources, state: Path, options: DescribeOptions
    ) -> None:
        self._base, self._sources, self.state = base, sources, state
        self.options = options
        self.hardware = sources.hardware  # folder of a recorded machine; "": this one
        self._read_once = asyncio.Event()
        self._mark: tuple[str, ...] = ()
        self._read_at = time.monotonic()
        before = self._kept()
        self.description = until_read(sources.told, before)
        self.node = described_node(base, self.description)
        self._before = before
        self._said = self.description  # to the server

    async def ready(self) -> None:
        """Until the machine has been read, but no longer than a join may wait for it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.options.join_seconds):
                await self._read_once.wait()

    def port_rails(self) -> dict[str, int]:
        """Rails of ports by their names in sysfs: "mlx5_0/1"."""
        ports = [(*card.name.partition(":")[::2], card.rail) for card in self.description.nics]
        return {f"{device}/{port or 1}": rail for device, port, rail in ports if rail >= 0}

    def registered(self) -> NodeDescription:
        """What is known now, for the first message of a connection."""
        self._said = self.description
        return self.description

    def unsaid(self) -> bool:
        """Whether more became known while the agent connected."""
        return self._said is not self.description

    def message(self, node: int) -> Described:
        """What is known now, for a server that knew it otherwise."""
        self._said = self.description
        return Described(node=node, described=self.node, description=self.description)

    async def follow(self, changed: Callable[[], None]) -> None:
        """Reads now, and whenever something looks different; says when the description changed."""
        while True:
            described = await in_thread(self._read)
            if described is not None and self._take(described):
                changed()
            self._read_once.set()
            await self._until_different()

    async def _until_different(self) -> None:
        polls = 0
        while True:
            await asyncio.sleep(self.options.poll_seconds)
            polls += 1
            mark = await in_thread(self._sources.fingerprint)
            late = time.monotonic() - self._read_at > REREAD_SECONDS
            failed = any("not there" not in line for line in self.description.unread)
            if (mark is not None and mark != self._mark) or late:
                return
            if failed and polls >= RETRY_POLLS:
                return

    def _read(self) -> NodeDescription:
        self._mark, self._read_at = self._sources.fingerprint(), time.monotonic()
        return self._sources.describe(self._base.name, self._before)

    def _take(self, described: NodeDescription) -> bool:
        """Whether anything differs from what was known."""
        if warning := count_warning(self._base, described):
            described = structs.replace(described, warnings=(*described.warnings, warning))
        if described == self.description:
            return False
        for text in described.warnings:
            if text not in self.description.warnings:
                log.warning("%s", text)
        for text in described.unread:
            if text not in self.description.unread:
                log.info("not read: %s", text)
        if self._before is not None:
            for text in changed_facts(self._before, described):
                log.info("this node: %s", text)
        self.description = self._before = described
        self.node = described_node(self._base, described)
        self._keep(described)
        return True

    def _kept(self) -> NodeDescription | None:
        with suppress(OSError):
            return kept_description((self.state / FILE).read_bytes())
        return None

    def _keep(self, described: NodeDescription) -> None:
        draft = self.state / f"{FILE}.new"
        try:
            draft.touch(mode=0o600)
            draft.write_bytes(msgspec.json.encode(described))
            draft.rename(self.state / FILE)
        except OSError as error:
            log.warning("the description of this node cannot be kept: %s", error)
