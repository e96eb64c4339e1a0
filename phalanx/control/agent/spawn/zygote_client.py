"""The agent's end of its zygote: starts one where none runs, spawns children, hears of ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.checkpoint.keeper.frames import Unframer, framed
from phalanx.control.agent.spawn.job_environment import passed_on
from phalanx.control.wire.zygote_messages import (
    Child,
    Ended,
    FromZygote,
    Heard,
    Lease,
    Leave,
    NotStarted,
    RenewPrograms,
    Signal,
    Spawn,
    ToZygote,
    ZygoteReady,
    decode_from_zygote,
)

START_SECONDS = 120.0  # importing torch on a busy machine
END_SECONDS = 10.0


class ZygoteError(Exception):
    """The zygote does not come up."""


class ZygoteClient:
    """One connection to a zygote. ``ended`` hears of children that are gone."""

    def __init__(self, path: Path, log: Path, ended: Callable[[Ended], None]) -> None:
        self.path, self._log = path, log
        self.children: dict[str, Child] = {}
        self.pid = 0
        self.lost = asyncio.Event()
        self._ended = ended
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._waiting: dict[str, tuple[asyncio.Future[Child], Callable[[Child], None]]] = {}
        self._ready = asyncio.Event()
        self._hears = False  # a zygote of an earlier version does not
        self.program_lease = 0.0  # of programs that live; -1: it ends none of them
        self._unsaid: list[Ended] = []  # that were heard of before it was ready
        self._process: subprocess.Popen[bytes] | None = None  # where we started it

    async def open(self) -> None:
        """Connect to the zygote that runs here, or to a new one."""
        deadline = asyncio.get_running_loop().time() + START_SECONDS
        while True:
            with suppress(OSError):
                reader, self._writer = await asyncio.open_unix_connection(str(self.path))
                break
            if self._process is None:
                self._process = self._start()
            elif self._process.poll() is not None:
                raise ZygoteError(f"the zygote ended at its start: see {self._log}")
            if asyncio.get_running_loop().time() > deadline:
                raise ZygoteError(f"no zygote within {START_SECONDS:.0f} s: see {self._log}")
            await asyncio.sleep(0.05)
        self._listening = asyncio.create_task(self._listen(reader))
        async with asyncio.timeout(START_SECONDS):
            await self._ready.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-m",
            "phalanx.control.agent.spawn.zygote",
            "--socket",
            str(self.path),
        ]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # it outlives its agent, and signals to the agent's group
                env={**passed_on(os.environ), "OMP_NUM_THREADS": "1"},
            )

    async def spawn(
        self, order: Spawn, started: Callable[[Child], None] = lambda child: None
    ) -> Child:
        """Fork a child; returns when it is there.

        ``started`` is called before anything else of it is heard: it may end at once.
        """
        if self.lost.is_set():
            raise ZygoteError("the zygote is gone")
        future: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
        self._waiting[order.key] = (future, started)
        self._send(order)
        return await future

    def signal(self, key: str, number: int) -> None:
        """Signal a child and whatever it started."""
        self._send(Signal(key=key, number=number))

    def lease(self, seconds: float) -> None:
        """How long everything may outlive this agent."""
        self._send(Lease(seconds=seconds))

    def renew_programs(self, lease: float, left: float) -> None:
        """How long programs may run from now on, whatever becomes of this agent."""
        if self.program_lease >= 0:
            self._send(RenewPrograms(lease=lease, left=left))

    async def leave(self) -> None:
        """End the zygote and all its children."""
        self._send(Leave())
        with suppress(TimeoutError):
            async with asyncio.timeout(END_SECONDS):
                await self.lost.wait()
                while self._lives():
                    await asyncio.sleep(0.01)

    def _lives(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        return Path(f"/proc/{self.pid}").exists()

    def close(self) -> None:
        """Let go of it; it waits for the next agent."""
        if self._listening is not None:
            self._listening.cancel()
        if self._writer is not None:
            self._writer.close()

    def _send(self, message: ToZygote) -> None:
        if self._writer is not None and not self.lost.is_set():
            self._writer.write(framed(message))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        unframer = Unframer()
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                for body in unframer.feed(data):
                    self._hear(decode_from_zygote(body))
        self.lost.set()
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_exception(ZygoteError("the zygote is gone"))

    def _hear(self, message: FromZygote) -> None:
        match message:
            case Child():
                self.children[message.key] = message
                future, started = self._waiting.pop(message.key, (None, None))
                if future is not None and started is not None and not future.done():
                    started(message)
                    future.set_result(message)
            case Ended():
                self.children.pop(message.key, None)
                self._ended(message)
                self._acknowledge(message)
            case NotStarted():
                future, _ = self._waiting.pop(message.key, (None, None))
                if future is not None and not future.done():
                    future.set_exception(ZygoteError(message.problem))
            case ZygoteReady():
                self.pid, self._hears = message.pid, message.hears
                self.program_lease = message.program_lease
                self._ready.set()
                for end in self._unsaid:
                    self._acknowledge(end)

    def _acknowledge(self, end: Ended) -> None:
        if not self._ready.is_set():
            self._unsaid.append(end)  # nobody knows yet whether it would understand
        elif self._hears:
            self._send(Heard(pid=end.pid))
