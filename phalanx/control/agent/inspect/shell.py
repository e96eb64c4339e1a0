"""Shells of people in the environment of a job on this node: a terminal each, as the job's user."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from phalanx.control.agent.jobs.jobs import NodeJobs
from phalanx.control.agent.jobs.local_job import LocalJob
from phalanx.control.agent.spawn.containment import contain
from phalanx.control.agent.spawn.job_environment import passed_on
from phalanx.control.host.parent_death import follow
from phalanx.control.host.users import UnknownUserError, known_user
from phalanx.control.wire.shell_messages import (
    MOST_UNREAD,
    PIECE_BYTES,
    CloseShell,
    OpenShell,
    ShellDown,
    ShellInput,
    ShellOutput,
)
from phalanx.control.wire.zygote_messages import Containment

MOST_SHELLS = 16  # of a node at a time
INPUT_BYTES = 1 << 20  # typed ahead; more ends the shell
END_SECONDS = 2.0  # after a hang-up, before it is killed

log = logging.getLogger("phalanx.agent")


class Shell:
    """One terminal and what runs in it."""

    def __init__(self, request: int, send: Callable[[msgspec.Struct], None]) -> None:
        self.request, self._send = request, send
        self._master = -1
        self._unread = 0
        self._typed = b""
        self._reading = False
        self._process: asyncio.subprocess.Process | None = None

    async def run(self, order: OpenShell, node_jobs: NodeJobs, job: LocalJob) -> None:
        """Until the shell ends."""
        user = node_jobs.processes.user(job)
        argv = order.argv or (_own_shell(user),)
        self._master, slave = pty.openpty()
        try:
            self.resize(order.rows, order.columns)
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                env=_environment(node_jobs, job, user, order.terminal),
                start_new_session=True,
                preexec_fn=partial(
                    _begin, os.getpid(), _folders(job), node_jobs.processes.containment(job)
                ),
                **_identity(user),
            )
        finally:
            os.close(slave)
        os.set_blocking(self._master, False)
        self._listen()
        status = await self._process.wait()
        self._drain()
        self._send(ShellOutput(request=self.request, end=True, status=status))

    def resize(self, rows: int, columns: int) -> None:
        """The terminal has another size."""
        size = struct.pack("HHHH", *(max(0, min(cells, 1000)) for cells in (rows, columns)), 0, 0)
        with suppress(OSError):
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def type(self, order: ShellInput) -> None:
        """What was typed, a new size, or room for more output."""
        if order.rows and order.columns:
            self.resize(order.rows, order.columns)
        if order.read:
            self._unread -= order.read
            self._listen()
        self._typed += order.data
        if len(self._typed) > INPUT_BYTES:
            self.hang_up()
            return
        with suppress(OSError):
            self._typed = self._typed[os.write(self._master, self._typed) :]

    def _listen(self) -> None:
        if not self._reading and self._unread < MOST_UNREAD:
            self._reading = True
            asyncio.get_running_loop().add_reader(self._master, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._master, PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:  # its end of the terminal is closed
            data = b""
        if data:
            self._unread += 1
            self._send(ShellOutput(request=self.request, data=data))
        if not data or self._unread >= MOST_UNREAD:  # whoever reads is slower than it prints
            self._pause()

    def _pause(self) -> None:
        if self._reading:
            self._reading = False
            asyncio.get_running_loop().remove_reader(self._master)

    def _drain(self) -> None:
        """What it printed last."""
        self._pause()
        with suppress(OSError):
            while data := os.read(self._master, PIECE_BYTES):
                self._send(ShellOutput(request=self.request, data=data))

    def hang_up(self) -> None:
        """End it as a terminal that is closed does, and for good a little later."""
        process = self._process
        if process is not None and process.returncode is None:
            for number, seconds in ((signal.SIGHUP, 0.0), (signal.SIGKILL, END_SECONDS)):
                asyncio.get_running_loop().call_later(seconds, _signal, process, number)

    def close(self) -> None:
        """Let go of the terminal."""
        if self._master >= 0:
            self._pause()
            os.close(self._master)
            self._master = -1


class NodeShells:
    """All shells of a node."""

    def __init__(self, node_jobs: NodeJobs, send: Callable[[msgspec.Struct], None]) -> None:
        self._node_jobs, self._send = node_jobs, send
        self._shells: dict[int, Shell] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def hear(self, order: ShellDown) -> None:
        """Something for a shell."""
        match order:
            case OpenShell():
                task = asyncio.ensure_future(self._open(order))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case ShellInput():
                if (shell := self._shells.get(order.request)) is not None:
                    shell.type(order)
            case CloseShell():
                if (shell := self._shells.get(order.request)) is not None:
                    shell.hang_up()

    def close_all(self) -> None:
        """Nobody can be reached any more."""
        for shell in self._shells.values():
            shell.hang_up()

    async def _open(self, order: OpenShell) -> None:
        job = self._node_jobs.jobs.get(order.job)
        problem = ""
        if job is None or job.work is None:
            problem = f"job {order.job} has nothing on this node"
        elif len(self._shells) >= MOST_SHELLS:
            problem = f"there are {MOST_SHELLS} shells on this node already"
        else:
            shell = self._shells[order.request] = Shell(order.request, self._send)
            log.info("a shell in job %d", order.job)
            try:
                await shell.run(order, self._node_jobs, job)
            except (OSError, UnknownUserError, ValueError, subprocess.SubprocessError) as error:
                problem = str(error)
            finally:
                del self._shells[order.request]
                shell.close()
        if problem:
            self._send(ShellOutput(request=order.request, end=True, status=1, problem=problem))


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def _begin(agent: int, folders: list[str], bounds: Containment) -> None:
    """In the child: its terminal is the one that signals come from; it ends with the agent.

    It is the job's user by now, and enters what that one may enter.
    """
    contain(bounds, "shell")
    for folder in folders:
        with suppress(OSError):
            os.chdir(folder)
            break
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    follow(agent, signal.SIGKILL)


def _own_shell(user: str) -> str:
    if user:
        return known_user(user).pw_shell or "/bin/sh"
    return os.environ.get("SHELL") or "/bin/sh"


def _folders(job: LocalJob) -> list[str]:
    """Where a shell begins: the first of them that it can enter."""
    wanted = job.work.folder if job.work is not None else ""
    return [*([wanted] if wanted else []), str(job.own_folder), "/"]


def _environment(node_jobs: NodeJobs, job: LocalJob, user: str, terminal: str) -> dict[str, str]:
    """As a worker of the job has it; the agent's own secrets stay where they are."""
    assert job.work is not None
    variables = passed_on(os.environ)
    if user:
        entry = known_user(user)
        variables |= {"HOME": entry.pw_dir, "USER": user, "LOGNAME": user}
    first = next(iter(job.processes.values()), None) or job.new_process(0, 0)
    return (
        variables
        | node_jobs.processes.given(job)
        | node_jobs.processes.environment(job, first)
        | {"TERM": terminal}
    )


def _identity(user: str) -> dict[str, Any]:
    if not user or os.getuid() != 0:
        return {}
    entry = known_user(user)
    groups = os.getgrouplist(user, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}
