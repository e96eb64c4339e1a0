"""The agent: one process a node that joins a server, runs what it is told, and tells what happens.

All decisions of the protocol are in ``phalanx.cluster.agent``; here are its sockets and processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import ssl
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from phalanx import __version__
from phalanx.cluster.agent import Agent
from phalanx.cluster.commands import Command, Form
from phalanx.cluster.fleet import Node
from phalanx.cluster.messages import (
    CheckDone,
    Connected,
    Disconnected,
    Inventory,
    LocalFact,
    Message,
    RunCheck,
    Wake,
    WorkerForm,
    WorkerStop,
)
from phalanx.control import wire
from phalanx.control.agent_logs import LogReader
from phalanx.control.crew import Crew, at_server_time
from phalanx.control.examiner import Examiner
from phalanx.control.hands import Place
from phalanx.control.runtime import make_runtime_folder
from phalanx.control.secret_file import write_secret
from phalanx.control.zygote_client import ZygoteClient
from phalanx.control.zygote_wire import Ended, Spawn

FOUND_SECONDS = 1.0  # for workers that outlived an agent to say where they stand
PAUSES = (0.05, 0.1, 0.2, 0.5, 1.0)  # between tries to connect
FRAME_BYTES = 64 << 20

log = logging.getLogger("phalanx.agent")


class JoinError(Exception):
    """The server does not let this agent in, and trying again would not help."""


class AgentOptions(Struct, frozen=True, kw_only=True):
    """How an agent is started."""

    urls: tuple[str, ...]
    state: Path
    node: Node
    address: str  # that other nodes reach this one at
    join_token: str = ""
    ca: str = ""
    switch_users: bool = True  # jobs run as whoever submitted them, where the agent is root


class AgentProcess:
    """Runs until it is told to stop, or is not let in."""

    def __init__(self, options: AgentOptions) -> None:
        self.options = options
        self.state = options.state
        self.machine_id = _machine_id(options.state)
        self.incarnation = _next_incarnation(options.state)
        self.token = _read(options.state / "agent.token")
        self.agent: Agent | None = None
        self.skew_ns = 0  # to be added to our clock
        self.forms: dict[int, tuple[Form, str]] = {}  # newest of each job, and where its ranks meet
        self.zygote = ZygoteClient(
            make_runtime_folder(options.state) / "zygote.sock",
            options.state / "zygote.log",
            lambda end: self._ended(end),
        )
        self.crew = Crew(
            Place(options.node.name, options.state, options.address, options.switch_users),
            self.zygote,
            self.happened,
        )
        self.logs = LogReader(self.crew, self._send)
        self.examiner = Examiner(options.node, options.state, self.zygote)
        self.first_check: CheckDone | None = None  # at start; None: work was going on
        self.store = ""
        self._socket: ClientConnection | None = None
        self._early: list[LocalFact] = []  # before there is a machine
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled; raises JoinError where the server refuses for good."""
        await self.zygote.open()
        await self.crew.open()
        await self._open_store()
        if any("/worker" in key for key in self.zygote.children):
            await asyncio.sleep(FOUND_SECONDS)
        else:
            self.first_check = await self.examiner.check("quick")
        waking = asyncio.create_task(self._keep_time())
        rotating = asyncio.create_task(self.logs.rotate_forever())
        lost = asyncio.create_task(self.zygote.lost.wait())
        serving = asyncio.create_task(self._serve())
        try:
            await asyncio.wait([serving, lost], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            else:
                raise JoinError("the zygote is gone, and with it everything that ran here")
        finally:
            for task in (waking, rotating, lost, serving):
                task.cancel()
            self.crew.close()

    async def leave(self) -> None:
        """End everything on this node."""
        await self.zygote.leave()

    async def _open_store(self) -> None:
        child = self.zygote.children.get("store")
        if child is None:
            child = await self.zygote.spawn(
                Spawn(key="store", role="store", host=self.options.address)
            )
        self.store = f"{self.options.address}:{child.port}"

    # The machine.

    def now_ns(self) -> int:
        """The server's time."""
        return time.time_ns() + self.skew_ns

    def happened(self, what: Command | LocalFact) -> None:
        """Something for the machine; its answers are sent and its actions taken."""
        if self.agent is None:
            if not isinstance(what, Command):
                self._early.append(what)
            return
        if not isinstance(what, Command):
            what = at_server_time(what, self.skew_ns)
        for output in self.agent.handle(what, self.now_ns()):
            if hasattr(output, "node"):
                self._send(output)
            else:
                self._act(output)
        self._changed.set()

    def _act(self, action: Message) -> None:
        match action:
            case WorkerForm():
                form, store = self.forms[action.job]
                self.crew.form(action, form, store)
            case WorkerStop():
                self.forms.pop(action.job, None)
                self.crew.stop(action)
            case RunCheck():
                self.examiner.later(action, self.skew_ns, self.happened)
            case _:
                self.crew.pass_on(action)  # type: ignore[arg-type]

    def _ended(self, end: Ended) -> None:
        self.examiner.ended(end)
        self.crew.ended(end)

    async def _keep_time(self) -> None:
        while True:
            self._changed.clear()
            at = self.agent.next_deadline_ns() if self.agent is not None else None
            wait = None if at is None else max(0.0, (at - self.now_ns()) / 1e9)
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                self.happened(Wake())

    # The server.

    async def _serve(self) -> None:
        tries = 0
        while True:
            for url in self.options.urls:
                try:
                    if await self._once(url):
                        tries = 0
                except (OSError, ConnectionClosed, InvalidHandshake, TimeoutError) as error:
                    level = logging.WARNING if tries == 0 else logging.DEBUG
                    log.log(level, "%s: %s; trying again", url, error)
            await asyncio.sleep(PAUSES[min(tries, len(PAUSES) - 1)])
            tries += 1

    async def _once(self, url: str) -> bool:
        """One connection, until it ends; whether it was let in."""
        if not self.token:
            await asyncio.to_thread(self._join, url)
        address = url.replace("http", "ws", 1) + wire.AGENT_PATH
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            connecting = connect(
                address,
                additional_headers=headers,
                compression=None,
                max_size=FRAME_BYTES,
                ping_interval=None,
                open_timeout=10,
                ssl=_tls(url, self.options.ca),
                proxy=None,
            )
            async with connecting as connection:
                return await self._talk(connection)
        except InvalidStatus as error:
            if error.response.status_code in (401, 403):
                if self.options.join_token:
                    log.warning("the server no longer knows this node's token: joining again")
                    self.token = ""
                    (self.state / "agent.token").unlink(missing_ok=True)
                    return False
                raise JoinError(_why(error.response.body)) from None
            raise

    async def _talk(self, connection: ClientConnection) -> bool:
        await connection.send(wire.encode(self._register()))
        first = wire.decode_down(await connection.recv(decode=False))
        if isinstance(first, wire.Rejected):
            return self._rejected(first)
        assert isinstance(first, wire.Welcome)
        self._welcome(first)
        self._socket = connection
        self._outgoing = asyncio.Queue()
        sending = asyncio.create_task(self._pump(connection, self._outgoing))
        try:
            self.happened(Connected())
            if self.first_check is not None and not self.first_check.passed:
                self.happened(self.first_check)
            self.first_check = None
            async for data in connection:
                assert isinstance(data, bytes)
                message = wire.decode_down(data)
                if isinstance(message, wire.Rejected):
                    return self._rejected(message)
                self._hear(message)
        finally:
            sending.cancel()
            self._socket = None
            self.logs.stop_all()
            self.happened(Disconnected())
        return True

    def _register(self) -> wire.Register:
        inventory = self.agent.inventory() if self.agent else self._first_inventory()
        return wire.Register(
            node=self.options.node,
            machine=self.machine_id,
            inventory=inventory,
            version=__version__,
            clock_ns=time.time_ns(),
            healthy=self.first_check is None or self.first_check.passed,
            store=self.store,
        )

    def _first_inventory(self) -> Inventory:
        """What outlived the agent before this one, told by a machine of its own."""
        looking = Agent(0, 0, 0, self.incarnation)
        for fact in self._early:
            looking.handle(fact, 0)
        return looking.inventory()

    def _welcome(self, welcome: wire.Welcome) -> None:
        self.skew_ns = welcome.clock_ns - time.time_ns()
        lease_seconds = welcome.lease_ns / 1e9
        self.crew.lease_seconds = lease_seconds
        self.zygote.lease(lease_seconds)
        if self.agent is None:
            self.agent = Agent(
                welcome.node, welcome.lease_ns, welcome.heartbeat_ns, self.incarnation
            )
            early, self._early = self._early, []
            for fact in early:
                self.happened(fact)
            log.info("%s joined as node %d", self.options.node.name, welcome.node)
        self.agent.lease_ns, self.agent.heartbeat_ns = welcome.lease_ns, welcome.heartbeat_ns

    def _hear(self, message: wire.Down) -> None:
        match message:
            case wire.Deliver(command=command, store=store):
                if isinstance(command.body, Form):
                    self._remember(command.body, store)
                self.happened(command)
            case wire.ReadLog():
                self.logs.read(message)
            case wire.StopLog():
                self.logs.stop(message.request)

    def _remember(self, form: Form, store: str) -> None:
        known = self.forms.get(form.job)
        if known is None or known[0].generation <= form.generation:
            self.forms[form.job] = (form, store)

    def _send(self, message: msgspec.Struct) -> None:
        if self._socket is not None:
            self._outgoing.put_nowait(wire.encode(message))

    async def _pump(self, connection: ClientConnection, outgoing: asyncio.Queue[bytes]) -> None:
        with suppress(ConnectionClosed):
            while True:
                await connection.send(await outgoing.get())

    def _rejected(self, rejected: wire.Rejected) -> bool:
        if not rejected.retry and rejected.code != "replaced":
            raise JoinError(
                f"the server (phalanx {rejected.version}) refuses this agent (phalanx "
                f"{__version__}): {rejected.message}"
            )
        if rejected.code == "replaced" and not rejected.retry:
            raise JoinError("another process has connected as this agent")
        log.info("the server: %s", rejected.message)
        return False

    def _join(self, url: str) -> None:
        """Exchanges the join token for one that is good for this node alone."""
        if not self.options.join_token:
            raise JoinError(
                "no join token: set PHALANX_TOKEN_FILE to a file that has one "
                "(`phalanx token create --role agent`, or join.token in the server's state folder)"
            )
        request = wire.JoinRequest(name=self.options.node.name, machine=self.machine_id)
        headers = {
            "Authorization": f"Bearer {self.options.join_token}",
            "Content-Type": "application/json",
        }
        call = urllib.request.Request(
            f"{url}/v1/join", msgspec.json.encode(request), headers, method="POST"
        )
        try:
            with urllib.request.urlopen(
                call, timeout=10, context=_tls(url, self.options.ca)
            ) as got:
                answer = msgspec.json.decode(got.read(), type=wire.JoinAnswer)
        except urllib.error.HTTPError as error:
            if error.code in (429, 503):
                raise OSError(_why(error.read())) from None
            raise JoinError(_why(error.read())) from None
        self.token = answer.token
        write_secret(self.state / "agent.token", answer.token)


def _why(body: bytes | bytearray | None) -> str:
    try:
        return str(json.loads(body or b"")["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server refused: {(body or b'')[:200]!r}"


def _tls(url: str, ca: str) -> ssl.SSLContext | None:
    if not url.startswith("https:"):
        return None
    return ssl.create_default_context(cafile=ca or None)


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _machine_id(state: Path) -> str:
    """Made once: tells two agents of one name apart."""
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = state / "machine"
    if not path.exists():
        path.write_text(secrets.token_hex(16))
    return _read(path)


def _next_incarnation(state: Path) -> int:
    """Rises with every start of the agent."""
    path = state / "incarnation"
    number = int(_read(path) or 0) + 1
    draft = path.with_suffix(".new")
    draft.write_text(str(number))
    draft.rename(path)
    return number


def own_address(url: str) -> str:
    """The address of this machine that the server, and so other nodes, can reach."""
    where = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((where.hostname or "127.0.0.1", where.port or 80))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def describe_node(name: str, gpus: int | None, **more: str) -> Node:
    """This machine as the fleet sees it."""
    from phalanx.hardware import count_cuda

    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return Node(
        name=name,
        gpus=count_cuda() if gpus is None else gpus,
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=pages * size,
        **more,  # type: ignore[arg-type]
    )
