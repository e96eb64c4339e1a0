"""The agent: one process a node that joins a server, runs what it is told, and tells what happens.

All decisions of the protocol are in ``phalanx.cluster.protocol.agent_machine``; here are its
sockets and processes.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from phalanx import __version__
from phalanx.cluster.node import Node
from phalanx.cluster.protocol.agent_machine import Agent
from phalanx.cluster.protocol.commands import AgentAction, Command, Form, Stop
from phalanx.cluster.protocol.messages import (
    CheckResult,
    Connected,
    DeviceError,
    Disconnected,
    Heartbeat,
    InspectGang,
    Inventory,
    KeeperSilent,
    LocalFact,
    NodeNotice,
    Wake,
    WorkerFound,
)
from phalanx.control.agent.acceptance import NodeAcceptance
from phalanx.control.agent.config import AgentConfig, with_own_user
from phalanx.control.agent.description import DescriptionSources, NodeDescriber
from phalanx.control.agent.faults import FaultSources
from phalanx.control.agent.identity import machine_id, next_incarnation
from phalanx.control.agent.inspect.details import DetailReader
from phalanx.control.agent.inspect.evidence import Evidence
from phalanx.control.agent.inspect.logs import LogReader
from phalanx.control.agent.inspect.shell import NodeShells
from phalanx.control.agent.jobs.jobs import NodeJobs
from phalanx.control.agent.jobs.local_job import NodeSettings
from phalanx.control.agent.jobs.program_activity import ProgramActivity
from phalanx.control.agent.jobs.program_lease import ProgramLease
from phalanx.control.agent.jobs.worker_events import at_own_time, at_server_time
from phalanx.control.agent.node_check import NodeChecker
from phalanx.control.agent.socket_paths import make_runtime_folder, runtime_folder
from phalanx.control.agent.spawn.zygote_client import ZygoteClient
from phalanx.control.agent.tasks import Tasks, kept
from phalanx.control.agent.telemetry import Telemetry
from phalanx.control.agent.uplink import JoinError, Uplink
from phalanx.control.host.server_time import ServerTime
from phalanx.control.wire import agent_messages as wire
from phalanx.control.wire.shell_messages import CloseShell, OpenShell, ShellInput
from phalanx.control.wire.zygote_messages import Ended, Spawn
from phalanx.observe.node.node_sample import Sampler

STORE = "store"  # the zygote's name of the process where the ranks of gangs meet
REPORT_NS = 10**9  # between two reports of progress
UNSAID_FACTS = 100  # about the node, kept while there is no connection
UNCLAIMED_SECONDS = 10.0  # for the core to say what it wants of what outlived an agent
FOUND_SECONDS = 1.0  # for workers that outlived an agent to say where they stand

log = logging.getLogger("phalanx.agent")


class AgentOptions(Struct, frozen=True, kw_only=True):
    """How an agent is started."""

    urls: tuple[str, ...]
    state: Path
    node: Node  # what it offers
    sources: DescriptionSources = DescriptionSources()  # of what else it is
    address: str  # that other nodes reach this one at
    join_token: str = ""
    ca: str = ""
    fingerprint: str = ""  # of the server's authority
    switch_users: bool = True  # jobs run as whoever submitted them, where the agent is root
    config: AgentConfig = AgentConfig()


class AgentProcess:
    """Runs until it is told to stop, or is not let in."""

    def __init__(self, options: AgentOptions) -> None:
        self.options = options
        self.state = options.state
        self.machine = machine_id(options.state)
        self.incarnation = next_incarnation(options.state)
        join = wire.JoinRequest(name=options.node.name, machine=self.machine, key="")
        self.uplink = Uplink(
            options.urls,
            options.state,
            join,
            options.join_token,
            options.ca,
            options.fingerprint,
        )
        self.agent: Agent | None = None
        self.clock = ServerTime()
        # The newest of each job, where its ranks meet, and the key of its keepers.
        self.forms: dict[int, tuple[Form, str, bytes]] = {}
        self.zygote = ZygoteClient(
            make_runtime_folder(options.state) / "zygote.sock",
            options.state / "zygote.log",
            lambda end: self._ended(end),
        )
        settings = NodeSettings(
            options.node.name,
            options.state,
            options.address,
            options.switch_users,
            options.node.gpus,
            with_own_user(options.config, options.urls),
        )
        self.program_lease = ProgramLease(self.zygote, self._ask, lambda: self.activity.wanted())
        self.node_jobs = NodeJobs(settings, self.zygote, self.happened, self.program_lease.held)
        local = options.address.startswith("127.")  # jobs use no network card then
        self.faults = FaultSources(options.config.faults, self.happened, links=not local)
        self.node_jobs.out_of_memory = self.faults.ran_out_of_memory
        self.logs = LogReader(self.node_jobs, self.uplink.send)
        self.shells = NodeShells(self.node_jobs, self.uplink.send)
        describe = options.config.describe
        self.describer = NodeDescriber(options.node, options.sources, options.state, describe)
        self.faults.rails = self.describer.port_rails
        self.checker = NodeChecker(options.node, options.state, self.zygote)
        self.acceptance = NodeAcceptance(self.describer, self.node_jobs.jobs, self.uplink.send)
        self.first_check: CheckResult | None = None  # at start; None: work was going on
        sampler = Sampler(options.state, dcgm=options.config.telemetry.dcgm)
        clock = self._telemetry_clock
        told = self.node_jobs.jobs if options.config.telemetry.steps else {}
        self.telemetry = Telemetry(told, self.uplink.send, clock, sampler)
        self.node_jobs.before_stop = lambda job: self.telemetry.collect(job, last=True)
        self.activity = ProgramActivity(
            self.node_jobs.jobs, self.uplink.send, lambda: clock()[0], lambda: self.telemetry.gpus
        )
        self.evidence = Evidence(self.node_jobs.jobs, self.uplink.send)
        self.details = DetailReader(self.node_jobs, self.uplink.send, lambda: self.clock.skew_ns)
        self.store = ""
        self._tasks = Tasks()
        self._early: list[LocalFact] = []  # before there is a machine
        self._unsaid: list[LocalFact] = []  # about the node, while there is no connection
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled; raises JoinError where the server refuses for good."""
        following = asyncio.create_task(kept(self._follow_description))
        await self.zygote.open()
        await self.node_jobs.open()
        await self._open_store()
        if self.node_jobs.left_over():
            await asyncio.sleep(FOUND_SECONDS)
            running = {fact.job for fact in self._early if isinstance(fact, WorkerFound)}
            await self.node_jobs.find_kept(running)
        else:
            log.info("checking this machine before it joins: some seconds")
            self.first_check = await self.checker.check("quick")
        await self.faults.start()
        await self.describer.ready()
        loops = self._keep_time, self.logs.rotate_forever, self.telemetry.run, self.activity.run
        more = self.program_lease.run, self.acceptance.follow_setup
        others = [asyncio.create_task(kept(loop)) for loop in (*loops, *more)]
        lost = asyncio.create_task(self.zygote.lost.wait())
        serving = asyncio.create_task(self.uplink.serve(self))
        try:
            await asyncio.wait([serving, lost], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await self._refused(serving)
            else:
                raise JoinError("the zygote is gone, and with it everything that ran here")
        finally:
            for task in (following, *others, lost, serving):
                task.cancel()
            self._tasks.close()
            self.acceptance.close()
            self.faults.close()
            self.node_jobs.close()

    async def _refused(self, serving: asyncio.Task[None]) -> None:
        """The server does not want this agent: unless something runs here, nothing stays."""
        try:
            serving.result()
        except JoinError:
            if not any(key.startswith("job") for key in self.zygote.children):
                await self.leave()
            raise

    async def leave(self) -> None:
        """End everything on this node, and leave no sockets behind."""
        await self.zygote.leave()
        shutil.rmtree(runtime_folder(self.options.state), ignore_errors=True)

    async def _open_store(self, port: int = 0) -> None:
        child = self.zygote.children.get(STORE)
        if child is None:
            child = await self.zygote.spawn(
                Spawn(key=STORE, role="store", host=self.options.address, port=port)
            )
        self.store = f"{self.options.address}:{child.port}"

    async def _replace_store(self) -> None:
        """Gangs still form at the address of the one that ended: the next one is there, too."""
        port = int(self.store.rpartition(":")[2])
        await self._open_store(port)
        log.warning("the store of this node ended: another one is at %s", self.store)
        if not self.store.endswith(f":{port}"):
            await self.uplink.reconnect()  # the server hears of addresses when a node registers

    # The machine.

    def happened(self, what: Command | LocalFact) -> None:
        """Something for the machine; its answers are sent and its actions taken."""
        if self.agent is None:
            if not isinstance(what, Command):
                self._early.append(what)
            return
        about_node = isinstance(what, DeviceError | NodeNotice | CheckResult | KeeperSilent)
        if about_node and not isinstance(what, Command) and not self.agent.connected:
            self._unsaid = [*self._unsaid, what][-UNSAID_FACTS:]
            return
        if not isinstance(what, Command):
            what = at_server_time(what, self.clock.skew_ns)
        try:
            for output in self.agent.handle(what, self.clock.now_ns()):
                if isinstance(output, AgentAction):
                    self._act(output)
                else:
                    self.uplink.send(output)
        except Exception:  # one job's trouble must not end what others have here
            log.exception("%s cannot be dealt with; the agent goes on", type(what).__name__)
        self._changed.set()

    def _telemetry_clock(self) -> tuple[int, int, int]:
        connected = self.agent is not None and self.agent.connected
        return (
            self.agent.node if self.agent and connected else -1,
            self.clock.now_ns(),
            self.clock.skew_ns,
        )

    def _act(self, action: AgentAction) -> None:
        assert self.agent is not None
        match action:
            case Form():
                _, store, key = self.forms[action.job]
                self.node_jobs.form(action, self.agent.node, store, key)
            case Stop():
                self.forms.pop(action.job, None)
                self.node_jobs.stop(action)
            case Command():
                self.checker.later(action, self.clock.skew_ns, self.happened)
            case _:
                self.node_jobs.pass_on(at_own_time(action, self.clock.skew_ns))

    def _ended(self, end: Ended) -> None:
        if end.key == STORE and self.store:
            self._tasks.later(self._replace_store())
        self.checker.ended(end)
        self.node_jobs.ended(end)

    async def _keep_time(self) -> None:
        while True:
            self._changed.clear()
            at = self.agent.next_deadline_ns() if self.agent is not None else None
            wait = None if at is None else max(0.0, (at - self.clock.now_ns()) / 1e9)
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                self.happened(Wake())

    # The server.

    def register(self) -> wire.Register:
        """Who this is and what runs here."""
        inventory = self.agent.inventory() if self.agent else self._first_inventory()
        return wire.Register(
            node=self.describer.node,
            machine=self.machine,
            inventory=inventory,
            version=__version__,
            clock_ns=time.time_ns(),
            healthy=self.first_check is None or self.first_check.passed,
            store=self.store,
            description=self.describer.registered(),
        )

    async def _follow_description(self) -> None:
        await self.describer.follow(self._describe)

    def _describe(self) -> None:
        """The node is not what the server was told: it is told again, now or when it connects."""
        if self.agent is not None and self.agent.connected:
            self.uplink.send(self.describer.message(self.agent.node))

    def _first_inventory(self) -> Inventory:
        """What outlived the agent before this one, told by a machine of its own."""
        looking = Agent(0, 0, 0, self.incarnation)
        for fact in self._early:
            looking.handle(fact, 0)
        return looking.inventory()

    def welcomed(self, welcome: wire.Welcome) -> None:
        """The server has let us in: it says what time it is, and what is to be resumed."""
        self.clock.set(welcome.clock_ns)
        lease_seconds = welcome.lease_ns / 1e9
        self.node_jobs.processes.lease_seconds = lease_seconds
        self.node_jobs.processes.silent_seconds = welcome.silent_ns / 1e9
        self.zygote.lease(lease_seconds)
        if self.agent is None:
            self.agent = Agent(
                welcome.node, welcome.lease_ns, welcome.heartbeat_ns, self.incarnation, REPORT_NS
            )
            early, self._early = self._early, []
            for fact in early:
                self.happened(fact)
            log.info("%s joined as node %d", self.options.node.name, welcome.node)
            asyncio.get_running_loop().call_later(UNCLAIMED_SECONDS, self._end_unclaimed)
        self.agent.lease_ns, self.agent.heartbeat_ns = welcome.lease_ns, welcome.heartbeat_ns
        self.happened(Connected())
        if self.describer.unsaid():
            self._describe()
        self.acceptance.welcomed(welcome.node)
        unsaid, self._unsaid = self._unsaid, []
        if self.first_check is not None and not self.first_check.passed:
            unsaid.append(self.first_check)
        self.first_check = None
        for fact in unsaid:
            self.happened(fact)
        self.program_lease.agree(welcome.program_lease_ns / 1e9, welcome.heartbeat_ns / 1e9)

    def _end_unclaimed(self) -> None:
        """Workers that outlived an agent, and that the core wants nothing of, are orphans."""
        assert self.agent is not None
        if not self.agent.connected:
            loop = asyncio.get_running_loop()
            loop.call_later(UNCLAIMED_SECONDS, self._end_unclaimed)
            return
        for job in list(self.node_jobs.jobs):
            if job not in self.agent.jobs and job not in self.forms:
                needed = job in self.agent.memory
                log.warning("job %d: nobody wants what is left of it here", job)
                self.node_jobs.abandon(job, keep_snapshots=needed)

    def heard(self, message: wire.Down) -> None:
        """A command, or a request for a log; whatever it asks for, the agent goes on."""
        try:
            self._obey(message)
        except Exception:
            log.exception("%s cannot be carried out; the agent goes on", type(message).__name__)

    def _obey(self, message: wire.Down) -> None:
        match message:
            case wire.Deliver(command=command, store=store, key=key):
                if isinstance(command.body, Form):
                    if not store:
                        return  # its host is still starting; the order comes again
                    self._remember(command.body, store, key)
                self.happened(command)
            case wire.ReadLog():
                self.logs.read(message)
            case wire.StopLog():
                self.logs.stop(message.request, finish=message.finish)
            case InspectGang():
                self.evidence.look(message, self.agent.node if self.agent else -1)
            case OpenShell() | ShellInput() | CloseShell():
                self.shells.hear(message)
            case wire.StartAcceptance() | wire.StopAcceptance():
                self.acceptance.hear(message)
            case wire.Profile():
                self.node_jobs.trace(message.job, message.ranks, message.steps)
            case wire.ReadSteps() | wire.ReadTrace() | wire.ReadEvidence():
                self.details.hear(message)

    def _remember(self, form: Form, store: str, key: bytes) -> None:
        known = self.forms.get(form.job)
        if known is None or known[0].generation <= form.generation:
            self.forms[form.job] = (form, store, key)

    def _ask(self, answered: Callable[[], None]) -> None:
        """Have the server answer what it took for a sign of life of this node."""
        if self.agent is not None:
            self.uplink.send(Heartbeat(node=self.agent.node, incarnation=self.incarnation))
            self.uplink.ask(answered)

    def no_server(self, at: float) -> None:
        """Nobody is there who could start elsewhere what runs here."""
        self.program_lease.counted_on(at)

    def parted(self) -> None:
        """The connection is gone; what runs, runs on for the lease."""
        self.logs.stop_all()
        self.shells.close_all()
        self.happened(Disconnected())
