"""A cluster on this machine: each node an agent of its own, as separate processes.

torch is imported once, by a parent zygote, and each node's zygote is forked from it; from
then on the nodes share nothing, and any of their processes may be killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from phalanx.control.agent.socket_paths import make_runtime_folder, runtime_folder
from phalanx.control.agent.spawn.zygote_client import ZygoteClient, ZygoteError
from phalanx.control.trust.certificates import CERTIFICATE_FILE
from phalanx.control.trust.tls import CA_VARIABLE
from phalanx.control.wire.zygote_messages import Spawn

END_SECONDS = 15.0
ALONE_SECONDS = 5.0  # the parent zygote outlives this process so long
LOOK_SECONDS = 0.5  # between two looks whether agents live
LEAST_PAUSE, MOST_PAUSE = 0.5, 30.0  # seconds before an agent that ended is started again

log = logging.getLogger("phalanx.server")


class LocalNode(Struct):
    """One node of the local cluster."""

    name: str
    state: Path
    agent: subprocess.Popen[bytes] | None = None


class NodeNetworks(Protocol):
    """A network of its own for each node; ``card`` is a node's, in its network."""

    card: str

    def space(self, node: int) -> str:
        """The network namespace of a node."""
        ...

    def path(self, node: int) -> Path:
        """Where a process finds it."""
        ...

    def address(self, node: int) -> str:
        """The address of a node."""
        ...


class LocalCluster:
    """``nodes`` agents that join a server on this machine."""

    def __init__(
        self,
        state: Path,
        url: str,
        join_token: Path,
        *,
        nodes: int,
        gpus_per_node: int,
        network: NodeNetworks | None = None,
        hardware: Sequence[Path] = (),
    ) -> None:
        self._network = network
        self._hardware = hardware  # recorded trees that stand for the nodes' machines, one a node
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.state, self.url, self.join_token = state, url, join_token
        self.gpus_per_node = gpus_per_node
        self.nodes = [LocalNode(f"node-{n}", state / "nodes" / f"node-{n}") for n in range(nodes)]
        self.parent_socket = make_runtime_folder(state) / "parent.sock"
        self.parent_log = state / "parent.log"
        self._parent_zygote = ZygoteClient(self.parent_socket, self.parent_log, lambda end: None)

    async def start(self) -> None:
        """Start every node; returns when their agents run (not: when they have joined)."""
        await self._parent_zygote.open()
        self._parent_zygote.lease(ALONE_SECONDS)
        while not self.join_token.exists():  # a server that has just started is about to write it
            await asyncio.sleep(0.02)
        for node in self.nodes:
            await self.start_zygote(node)
            self.start_agent(node)

    def _number(self, node: LocalNode) -> int:
        return self.nodes.index(node)

    async def start_zygote(self, node: LocalNode) -> None:
        """Fork a node's zygote from the parent zygote, unless one outlived whoever started it."""
        node.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = make_runtime_folder(node.state) / "zygote.sock"
        if _listened(path):
            return
        # One that was just killed may not have been reaped: it is not to pass for its successor.
        self._parent_zygote.signal(node.name, signal.SIGKILL)
        path.unlink(missing_ok=True)
        log_file = node.state / "zygote.log"
        space = ""
        if self._network is not None:
            space = str(self._network.path(self._number(node)))
        order = Spawn(
            key=node.name,
            role="zygote",
            socket=str(path),
            log=str(log_file),
            namespace=space,
            environment=self._environment(),
        )
        child = await self._parent_zygote.spawn(order)
        while not path.exists():
            if self._parent_zygote.children.get(node.name) != child:
                raise ZygoteError(f"the zygote of {node.name} ended at its start: see {log_file}")
            await asyncio.sleep(0.005)

    def _environment(self) -> dict[str, str]:
        """What workers need to find their own card; an agent that is restarted forks them, too."""
        return {} if self._network is None else {"GLOO_SOCKET_IFNAME": self._network.card}

    def _machine_of(self, node: LocalNode) -> list[str]:
        """Options that say what a node is: ranks of this machine, or a recorded one."""
        if self._hardware:
            return ["--hardware", str(self._hardware[self._number(node)])]
        return ["--gpus", str(self.gpus_per_node), "--rack", node.name]

    def start_agent(self, node: LocalNode) -> None:
        """Start a node's agent; it finds what still runs of an earlier one."""
        command = [sys.executable, "-m", "phalanx", "agent", "--join", self.url]
        address = "127.0.0.1"
        if self._network is not None:
            number = self._number(node)
            address = self._network.address(number)
            command = ["ip", "netns", "exec", self._network.space(number), *command]
        command += ["--name", node.name, "--state", str(node.state), "--address", address]
        command += ["--as-agent", *self._machine_of(node)]
        command += ["--follow", str(os.getpid()), "--outlived", "--config", str(_config(node))]
        given = {**self._environment(), "PHALANX_TOKEN_FILE": str(self.join_token)}
        authority = self.join_token.with_name(CERTIFICATE_FILE)  # both in the server's folder
        if self.url.startswith("https:") and authority.exists():
            given[CA_VARIABLE] = str(authority)
        node.agent = start_in_background(command, node.state / "agent.log", given)

    async def run(self) -> None:
        """Start every node and keep its agent running; all end when this is cancelled."""
        try:
            await self.start()
            await asyncio.gather(*(self._keep_agent(node) for node in self.nodes))
        finally:
            await asyncio.shield(self.end())

    async def _keep_agent(self, node: LocalNode) -> None:
        """Start the agent of a node again whenever it has ended, as a service manager would."""
        pause, began = LEAST_PAUSE, time.monotonic()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            if node.agent is None or node.agent.poll() is None:
                continue
            if time.monotonic() - began > MOST_PAUSE:
                pause = LEAST_PAUSE  # it ran for a while
            log.warning(
                "the agent of %s has ended (%d): another one starts in %g s",
                node.name,
                node.agent.returncode,
                pause,
            )
            await asyncio.sleep(pause)
            pause, began = min(2 * pause, MOST_PAUSE), time.monotonic()
            await self.start_zygote(node)
            self.start_agent(node)

    def kill_node(self, node: LocalNode) -> None:
        """End everything of a node at once, as if its power failed; returns when it has ended."""
        kill_and_wait(processes_of(node))
        if node.agent is not None:
            node.agent.kill()
            node.agent.wait()

    async def end(self) -> None:
        """End all nodes, their workers first."""
        for node in self.nodes:
            if node.agent is not None and node.agent.poll() is None:
                node.agent.send_signal(signal.SIGINT)
        deadline = time.monotonic() + END_SECONDS
        for node in self.nodes:
            if node.agent is not None:
                while node.agent.poll() is None and time.monotonic() < deadline:
                    await asyncio.sleep(0.02)
            self.kill_node(node)
            shutil.rmtree(runtime_folder(node.state), ignore_errors=True)
        await self._parent_zygote.leave()
        shutil.rmtree(runtime_folder(self.state), ignore_errors=True)


def start_in_background(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command that we end in order: Ctrl-C is for whoever started us."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environment},
        )


def _listened(path: Path) -> bool:
    """Whether a process has this Unix socket, as the kernel knows: a word to it might be missed."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return any(line.endswith(f" {path}") for line in lines)


def _config(node: LocalNode) -> Path:
    """Nodes that share a machine share its cores: nobody is bound to any, unless somebody says."""
    path = node.state / "agent.toml"
    if not path.exists():
        path.write_text('[binding]\npolicy = "none"\n')
    return path


def processes_of(node: LocalNode) -> list[int]:
    """The processes of a node: whoever has its folder in the command line or environment."""
    return [pid for pid in all_processes() if _belongs(pid, node)]


def kill_and_wait(pids: Sequence[int]) -> None:
    """SIGKILL to all, then wait until each has ended, reaped or not: sockets are closed then."""
    with ExitStack() as opened:
        ends = []
        for pid in pids:
            with suppress(ProcessLookupError):
                end = os.pidfd_open(pid)
                opened.callback(os.close, end)
                signal.pidfd_send_signal(end, signal.SIGKILL)
                ends.append(end)
        deadline = time.monotonic() + END_SECONDS
        for end in ends:
            waiting = select.poll()
            waiting.register(end, select.POLLIN)
            waiting.poll(1000 * max(0.0, deadline - time.monotonic()))


def program_of(pid: int, node: LocalNode) -> tuple[int, int] | None:
    """Job and index of a program that runs on a node, or of what it started."""
    with suppress(OSError, ValueError, KeyError):
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        given = dict(word.partition("=")[::2] for word in words)
        if Path(given["PHALANX_AGENT"]).is_relative_to(runtime_folder(node.state)):
            return int(given["PHALANX_JOB"]), int(given["PHALANX_INDEX"])
    return None


def open_files(pid: int) -> Iterator[Path]:
    """What a process has open; nothing of one that is gone or somebody else's."""
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                yield descriptor.readlink()


def all_processes() -> Iterator[int]:
    """Every process of this machine but ours."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            yield int(path.name)


def _belongs(pid: int, node: LocalNode) -> bool:
    """A zygote and its children were forked, not started: their open files tell."""
    with suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if str(node.state).encode() in command:
            return True
    if program_of(pid, node) is not None:
        return True
    return any(path.is_relative_to(node.state) for path in open_files(pid))
