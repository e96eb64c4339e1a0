"""Real servers and agents for tests: processes and sockets, no stand-ins.

``PlayedAgent`` speaks the agent's protocol with the real machine of the cluster room; only its
workers are played: each joins, restores and makes steps at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from phalanx import __version__
from phalanx.cluster.node import Node
from phalanx.cluster.protocol.agent_machine import Agent
from phalanx.cluster.protocol.commands import AgentAction, Check, Command, Drain, Form, Go, Restore
from phalanx.cluster.protocol.messages import (
    THIS_NODE,
    CheckResult,
    Connected,
    Disconnected,
    Inventory,
    Restored,
    Sealed,
    Wake,
    WorkerExited,
    WorkerUp,
)
from phalanx.control.trust.node_key import (
    AGREEMENT_HEADER,
    NONCE_HEADER,
    SERVER_HEADER,
    NodeClaim,
    NodeKey,
)
from phalanx.control.wire import agent_messages as wire
from tests.forked_process import start_in_background
from tests.ports import free_port

MACHINE = "test-machine-0001"
WORK = {"kind": "Script", "argv": ["true"]}  # what a job runs where nobody looks


def wait_for_port(port: int, seconds: float = 60.0) -> None:
    """Return once somebody listens on ``port`` of loopback."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class ServerProcess:
    """``phalanx up`` as a process that may be killed and started again on its port."""

    def __init__(self, state: Path, *options: str, port: int = 0) -> None:
        self.state = state
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.options = options
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, wait: bool = True) -> ServerProcess:
        """Start it and, unless told otherwise, wait until it leads."""
        self.state.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "phalanx", "up", "--state", str(self.state)]
        command += ["--port", str(self.port), *self.options]
        log = self.state / "out.txt"
        self.process = start_in_background(command, log, {}, new_session=False)
        if wait:
            self.wait()
        return self

    def wait(self, seconds: float = 120.0) -> None:
        """Wait until it leads."""
        deadline = time.monotonic() + seconds
        while True:
            with suppress(OSError, json.JSONDecodeError):
                if self.token_file.exists() and self.call("GET", "/v1/status")[0] == 200:
                    return
            assert self.process is not None and self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    @property
    def token_file(self) -> Path:
        return self.state / "admin.token"

    def admin(self) -> str:
        return self.token_file.read_text().strip()

    def output(self) -> str:
        return (self.state / "out.txt").read_text()

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM; it ends in order."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(90)
            self.process = None

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        token: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """One request; returns status and JSON. ``token`` "": none; None: the administrator's."""
        given = dict(headers or {})
        token = self.admin() if token is None else token
        if token:
            given["Authorization"] = f"Bearer {token}"
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            given.setdefault("Content-Type", "application/json")
        request = urllib.request.Request(self.url + path, data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, _json(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _json(error.read())

    def token(self, role: str, name: str = "", **more: object) -> str:
        """A new token's secret."""
        body = {"name": name or role, "role": role, **more}
        status, made = self.call("POST", "/v1/tokens", body)
        assert status == 201, made
        return str(made["secret"])

    def wait_for(self, path: str, found: Any, seconds: float = 120.0) -> Any:
        """Reads a path until ``found`` (a function of its JSON) is true."""
        deadline = time.monotonic() + seconds
        while True:
            answer = self.call("GET", path)[1]
            if found(answer):
                return answer
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError:
        return data.decode(errors="replace")


class PlayedAgent:
    """One agent with workers that do at once whatever they are told."""

    def __init__(
        self, urls: list[str], join_token: str, name: str, gpus: int = 2, **node: Any
    ) -> None:
        self.urls = urls
        self.join_token = join_token
        self.node = Node(name=name, gpus=gpus, cpus=8, memory_bytes=1 << 34, **node)
        self.machine = MACHINE + name
        self.version, self.protocol = __version__, wire.PROTOCOL
        self.clock_skew_ns = 0
        self.token = ""
        self.key = NodeKey(secrets.token_bytes(32))
        self.agent: Agent | None = None
        self.rejected: list[wire.Rejected] = []
        self.started: list[tuple[int, int]] = []  # (job, generation) that workers were made for
        self.epochs: list[int] = []  # of commands, as they came
        self.keys: list[tuple[int, bytes]] = []  # of each gang's keepers, with the job's number
        self.steps_until = 5
        self.step_seconds = 0.05
        self.connected = asyncio.Event()
        self.times = 0  # it has connected
        self.mute = False  # its connection stands, but it says nothing: as a machine without power
        self.socket: ClientConnection | None = None
        self._restored: dict[tuple[int, int], int] = {}
        self._steppers: dict[tuple[int, int], asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Connect and serve; connect again when the connection breaks."""
        while True:
            for url in list(self.urls):
                with suppress(
                    OSError, ConnectionClosed, InvalidStatus, urllib.error.URLError, TimeoutError
                ):
                    await self.once(url)
            await asyncio.sleep(0.1)

    async def join(self, url: str) -> None:
        """Exchange the join token."""
        asked = {"name": self.node.name, "machine": self.machine, "key": self.key.public}
        body = json.dumps(asked).encode()
        headers = {"Authorization": f"Bearer {self.join_token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/join", body, headers, method="POST")
        answer = await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=60).read())
        self.token = json.loads(answer)["token"]

    async def once(self, url: str) -> None:
        """One connection, until it ends."""
        if not self.token:
            await self.join(url)
        address = url.replace("http", "ws", 1) + wire.AGENT_PATH
        headers = {"Authorization": f"Bearer {self.token}"}
        async with connect(
            address, additional_headers=headers, compression=None, max_size=None
        ) as socket:
            inventory = self.agent.inventory() if self.agent else Inventory()
            register = wire.Register(
                node=self.node,
                machine=self.machine,
                inventory=inventory,
                version=self.version,
                clock_ns=time.time_ns() + self.clock_skew_ns,
                protocol=self.protocol,
                key=self.key.public,
                proof=self.proof(socket),
            )
            await socket.send(wire.encode(register))
            first = wire.decode_down(await socket.recv())
            if isinstance(first, wire.Rejected):
                self.rejected.append(first)
                return
            assert isinstance(first, wire.Welcome)
            if self.agent is None:
                self.agent = Agent(first.node, first.lease_ns, first.heartbeat_ns)
            self.socket = socket
            self.connected.set()
            self.times += 1
            beating = asyncio.create_task(self._beat())
            try:
                await self._act(Connected())
                async for data in socket:
                    await self._receive(wire.decode_down(data))
            finally:
                beating.cancel()
                self.connected.clear()
                self.socket = None
                self.agent.handle(Disconnected(), time.time_ns())

    def proof(self, socket: ClientConnection) -> bytes:
        """What the server asks for in its answer to the handshake."""
        assert socket.response is not None
        nonce, server, agreement = (
            bytes.fromhex(socket.response.headers[name])
            for name in (NONCE_HEADER, SERVER_HEADER, AGREEMENT_HEADER)
        )
        claim = NodeClaim(nonce, server, self.node.name, self.machine)
        return self.key.prove(claim, agreement)

    async def _receive(self, message: wire.Down) -> None:
        match message:
            case wire.Deliver(command=command, key=key):
                self.epochs.append(command.controller_epoch)
                if isinstance(command.body, Form):
                    self.keys.append((command.body.job, key))
                await self._act(command)
            case wire.Signed(order=order):
                await self._receive(wire.decode_down(order))
            case wire.Rejected():
                self.rejected.append(message)
            case wire.ReadLog(request=request, job=job, rank=rank):
                text = f"job {job} rank {rank} says hello\n".encode()
                await self._send(wire.LogPart(request=request, data=text))
                await self._send(wire.LogPart(request=request, end=True))
            case (
                wire.ReadSteps(request=request)
                | wire.ReadTrace(request=request)
                | wire.ReadEvidence(request=request)
            ):
                await self._send(wire.LogPart(request=request, end=True, problem="it is played"))

    async def _act(self, happened: Any) -> None:
        assert self.agent is not None
        facts = [happened]
        while facts:
            outputs = self.agent.handle(facts.pop(0), time.time_ns())
            for output in outputs:
                if isinstance(output, AgentAction):
                    facts += self._play(output)
                else:
                    await self._send(output)

    async def tell(self, happened: Any) -> None:
        """Something happens on this node."""
        await self._act(happened)

    async def _send(self, message: Any) -> None:
        if self.socket is not None and not self.mute:
            with suppress(ConnectionClosed):
                await self.socket.send(wire.encode(message))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self._act(Wake())

    def _play(self, action: AgentAction) -> list[Any]:
        match action:
            case Form(job=job, generation=generation):
                assert self.agent is not None
                ranks = action.ranks_on(self.agent.node)
                if ranks:
                    self.started.append((job, generation))
                return [WorkerUp(job=job, generation=generation, rank=rank) for rank in ranks]
            case Restore(job=job, generation=generation, step=step, source=source):
                self._restored[job, generation] = step
                return [
                    Restored(job=job, generation=generation, rank=rank, step=step, source=source)
                    for rank in self._ranks(job)
                ]
            case Go(job=job, generation=generation):
                first = self._restored[job, generation]
                if (job, generation) not in self._steppers:
                    steps = self._steps(job, generation, self._ranks(job), first)
                    self._steppers[job, generation] = asyncio.ensure_future(steps)
            case Drain(job=job, generation=generation):
                return [ended(job, generation, rank, step=1) for rank in self._ranks(job)]
            case Command(sequence=command, body=Check(check=check)):
                return [CheckResult(node=THIS_NODE, check=check, passed=True, command=command)]
        return []

    def _ranks(self, job: int) -> tuple[int, ...]:
        assert self.agent is not None
        return tuple(self.agent.jobs[job].ranks)

    async def _steps(self, job: int, generation: int, ranks: tuple[int, ...], first: int) -> None:
        step = first
        while step < self.steps_until:
            await asyncio.sleep(self.step_seconds)
            step += 1
            local = self.agent.jobs.get(job) if self.agent else None
            if local is None or local.generation != generation:
                return
            for rank in ranks:
                await self._act(
                    Sealed(
                        job=job, generation=generation, rank=rank, step=step, at_ns=time.time_ns()
                    )
                )
        for rank in ranks:
            await self._act(ended(job, generation, rank, step))


def postgres_program() -> Path | None:
    """Folder of PostgreSQL's programs, where they are installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


class Postgres:
    """A private PostgreSQL on a unix socket, run by an unprivileged user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = postgres_program()
        self.user = "postgres" if os.getuid() == 0 else None
        self.url = f"postgresql:///postgres?host={folder}/run&user=phalanx"

    def start(self) -> Postgres:
        assert self.bin is not None
        for name in ("data", "run"):
            (self.folder / name).mkdir(parents=True)
            if self.user:
                subprocess.run(["chown", self.user, self.folder / name], check=True)
        self._run("initdb", "-D", "data", "-U", "phalanx", "-A", "trust", "--no-sync")
        options = f"-c listen_addresses= -c unix_socket_directories={self.folder}/run"
        self._run("pg_ctl", "-D", "data", "-w", "-l", "run/log", "-o", options, "start")
        return self

    def stop(self) -> None:
        self._run("pg_ctl", "-D", "data", "-m", "immediate", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        assert self.bin is not None
        done = subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.folder,
            user=self.user,
            group=self.user,
            capture_output=True,
            check=False,
            timeout=120,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
        assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()


def ended(job: int, generation: int, rank: int, step: int) -> WorkerExited:
    """A worker is gone as it should."""
    return WorkerExited(
        job=job, generation=generation, node=THIS_NODE, rank=rank, cause="", step=step
    )
