"""Burn-ins of this node that the server orders, and what its settings are now and then.

Both work in programs of their own: what hangs there holds up no agent, and a program whose agent is
gone ends by itself. What a burn-in measured is signed here, with the node's key.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Sized
from contextlib import suppress

import msgspec

from phalanx.control.agent.description import NodeDescriber
from phalanx.control.agent.tasks import Tasks
from phalanx.control.trust.acceptance_signature import sign_certificate
from phalanx.control.trust.node_key import fingerprint, node_key
from phalanx.control.wire.agent_messages import (
    AcceptanceNews,
    SetUp,
    StartAcceptance,
    StopAcceptance,
)
from phalanx.doctor.acceptance.certificate import make_certificate
from phalanx.doctor.acceptance.program import MARK, find_measured
from phalanx.doctor.acceptance.report import AcceptanceRequest
from phalanx.doctor.setup import NodeSetup

PROGRAM = (sys.executable, "-m", "phalanx.doctor.acceptance.program")
LOG = "acceptance.log"  # what the program says beside its results
LINE_BYTES = 16 << 20  # of the program's output: its last line is everything it found
SETUP_SECONDS = 120.0  # for reading settings

log = logging.getLogger("phalanx.agent")


class NodeAcceptance:
    """At most one burn-in at a time. ``jobs``: what runs on the node beside it."""

    def __init__(
        self,
        describer: NodeDescriber,
        jobs: Sized,
        send: Callable[[msgspec.Struct], None],
    ) -> None:
        self._describer, self._jobs, self._send = describer, jobs, send
        self._node = -1
        self._request = 0  # of the burn-in that runs
        self._process: Process | None = None
        self._ended: AcceptanceNews | None = None  # the last word of the last one
        self._setup: NodeSetup | None = None
        self._tasks = Tasks()

    def welcomed(self, node: int) -> None:
        """The node is connected, as this number: a server that is new knows no settings."""
        self._node = node
        self._tell_setup()

    def hear(self, order: StartAcceptance | StopAcceptance) -> None:
        """An order of the server, which has signed what starts something."""
        if isinstance(order, StartAcceptance):
            if self._ended is not None and self._ended.request == order.request:
                self._send(self._ended)  # the server asks again: it was not connected then
            elif order.request != self._request:
                self._tasks.later(self._run(order))
        elif order.request == self._request and self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End what runs."""
        self._tasks.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()

    # Burn-ins.

    async def _run(self, order: StartAcceptance) -> None:
        problem = self._obstacle()
        if problem:
            self._tell(order, problem=problem, end=True)
            return
        self._request = order.request
        try:
            request = msgspec.convert(
                {
                    "node": self._describer.node.name,
                    "folder": str(self._describer.state),
                    "seconds": order.seconds,
                    "loads": order.loads,
                    "dcgm_level": order.dcgm_level,
                },
                AcceptanceRequest,
            )
            output = await self._follow(order, request)
            self._end(order, output)
        except (msgspec.MsgspecError, OSError, ValueError) as error:
            self._tell(order, problem=f"the burn-in did not run: {error}"[:500], end=True)
        finally:
            self._request, self._process = 0, None

    def _obstacle(self) -> str:
        if self._request:
            return "a burn-in runs on this node already"
        if len(self._jobs):
            return "jobs run on this node: drain it first"
        return ""

    async def _follow(self, order: StartAcceptance, request: AcceptanceRequest) -> bytes:
        """The program's last line; those before it are told."""
        text = msgspec.json.encode(request).decode()
        log_file = (self._describer.state / LOG).open("wb")
        with log_file:
            self._process = await asyncio.create_subprocess_exec(
                *PROGRAM, text, stdin=DEVNULL, stdout=PIPE, stderr=log_file, limit=LINE_BYTES
            )
        assert self._process.stdout is not None
        last = b""
        try:
            async for line in self._process.stdout:
                last = line
                if not line.startswith(MARK.encode()):
                    self._tell(order, text=line.decode(errors="replace").strip()[:500])
            await self._process.wait()
        finally:
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.kill()
        return last

    def _end(self, order: StartAcceptance, output: bytes) -> None:
        measured = find_measured(output)
        if measured is None:
            problem = (
                f"the burn-in ended without a result: see {self._describer.state}/acceptance.log"
            )
            self._tell(order, problem=problem, end=True)
            return
        key = node_key(self._describer.state)
        description = self._describer.description
        made = make_certificate(
            measured.report, description, measured.setup, fingerprint(key.public)
        )
        signed = msgspec.json.encode(sign_certificate(made, key))
        self._tell(order, certificate=signed, end=True)

    def _tell(
        self,
        order: StartAcceptance,
        *,
        text: str = "",
        certificate: bytes = b"",
        problem: str = "",
        end: bool = False,
    ) -> None:
        news = AcceptanceNews(
            node=self._node,
            request=order.request,
            text=text,
            certificate=certificate,
            problem=problem,
            end=end,
        )
        if end:
            self._ended = news
        self._send(news)

    # Versions and settings.

    async def follow_setup(self) -> None:
        """Read them some time after the start, and again now and then."""
        options = self._describer.options
        if not options.settings_every_seconds:
            return
        await asyncio.sleep(options.settings_after_seconds)
        while True:
            setup = await self._read_setup()
            if setup is not None and setup != self._setup:
                self._setup = setup
                self._tell_setup()
            await asyncio.sleep(options.settings_every_seconds)

    def _tell_setup(self) -> None:
        if self._setup is not None and self._node >= 0:
            versions, settings = self._setup.versions, self._setup.settings
            self._send(SetUp(node=self._node, versions=versions, settings=settings))

    async def _read_setup(self) -> NodeSetup | None:
        recorded = self._describer.hardware
        command = (
            *PROGRAM,
            "--setup",
            str(self._describer.state),
            *((recorded,) if recorded else ()),
        )
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
        try:
            async with asyncio.timeout(SETUP_SECONDS):
                output, _ = await process.communicate()
            return msgspec.json.decode(output, type=NodeSetup)
        except (TimeoutError, msgspec.MsgspecError) as error:
            log.warning(
                "the settings of this node cannot be read: %s", error or "it takes too long"
            )
            return None
        finally:
            if process.returncode is None:
                process.kill()
