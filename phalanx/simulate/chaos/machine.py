"""A node's life: power, memory and disk, the agent's process, what each leaves to the next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from phalanx.cluster.protocol.agent_machine import Agent
from phalanx.cluster.protocol.commands import Form
from phalanx.cluster.protocol.keeper_state import KeptSteps
from phalanx.cluster.protocol.messages import (
    THIS_NODE,
    DeviceError,
    KeeperFound,
    LocalFact,
    WorkerFound,
)
from phalanx.simulate.chaos.programs import ProgramProcesses
from phalanx.simulate.chaos.workers import KEPT, SECOND, NodeWorkers

if TYPE_CHECKING:
    from phalanx.simulate.chaos.controller import SimulatedController
    from phalanx.simulate.chaos.world import ChaosWorld

Slot = tuple[int, str, int]  # generation, "own" or "ward", slot


class SimulatedMachine(ABC):
    """What survives whom: memory its workers and agent, the disk everything."""

    def __init__(self, world: ChaosWorld, node: int, lease_ns: int, heartbeat_ns: int) -> None:
        self.world = world
        self.node = node
        self.alive = True
        self.slow = 1.0
        self.skew_ns = 0
        self.broken = ""  # cause of a hardware fault
        self.lying = False  # its check passes all the same
        self.frozen = False  # heartbeats go on, nothing else does
        self.workers: dict[int, NodeWorkers] = {}
        self.programs = ProgramProcesses(world, node, self.lapsed)
        self.memory: dict[int, dict[Slot, dict[int, int]]] = {}  # job: slot: step: branch
        self.disk: dict[int, dict[int, int]] = {}
        self.durable: dict[int, int] = {}
        self.gone: dict[int, int] = {}  # by job: last generation that was told to go here
        self.connection = 0
        self.controller: SimulatedController | None = None
        self.incarnation = 1
        self._lease_ns, self._heartbeat_ns = lease_ns, heartbeat_ns
        self.agent: Agent | None = self._new_agent()
        self._armed_ns: int | None = None

    def _new_agent(self) -> Agent:
        return Agent(self.node, self._lease_ns, self._heartbeat_ns, self.incarnation)

    # What the processes on it do.

    @abstractmethod
    def connect(self) -> None:
        """Tries to reach the controller that leads."""

    @abstractmethod
    def feed(self, fact: LocalFact) -> None:
        """Tells the agent of something that happened on this node."""

    @abstractmethod
    def stop(self, job: int) -> None:
        """Workers of a job end here."""

    @abstractmethod
    def lapsed(self, job: int) -> None:
        """The node's lease has ended a program here."""

    def crash(self) -> None:
        """Power is gone: processes and memory with it."""
        if not self.alive:
            return
        self.alive = False
        for worker in list(self.workers.values()):
            worker.token += 1
            self.world.workers.leave(worker.job, worker.generation, self.node)
        self.workers, self.memory, self.durable, self.gone = {}, {}, {}, {}
        self.agent = None
        self.programs.power_off()
        self._unplug()

    def boot(self) -> None:
        """The machine comes back, empty."""
        if self.alive:
            return
        self.alive = True
        self.frozen = False
        self.incarnation += 1
        self.agent = self._new_agent()
        self.connect()

    def kill_agent(self) -> None:
        """The agent's process dies; workers and memory stay."""
        if self.alive and self.agent is not None:
            self.agent = None
            self._unplug()

    def start_agent(self) -> None:
        """A new agent finds what outlived the one before it."""
        if not self.alive or self.agent is not None:
            return
        self.incarnation += 1
        self.agent = self._new_agent()
        for job in list(self.memory):
            self._found_memory(job)
        for job, worker in list(self.workers.items()):
            if worker.phase not in ("ready", "running"):
                self.stop(job)
                continue
            for rank in worker.ranks:
                fact = WorkerFound(
                    job=job,
                    generation=worker.generation,
                    rank=rank,
                    step=worker.step,
                    committed=worker.step,
                    durable=self.durable.get(job, 0),
                    running=worker.phase == "running",
                )
                self.feed(fact)
        self.connect()

    def _found_memory(self, job: int) -> None:
        """What the keeper holds of the last generation that ran here, or of one it backs up."""
        kept = self.memory[job]
        generation = self.gone.get(job, 0)
        if not any(sealed == generation for sealed, _, _ in kept):
            generation = max((sealed for sealed, _, _ in kept), default=generation)
        own, ward = (
            [
                step
                for (sealed, which, _), held in kept.items()
                if sealed == generation and which == holder
                for step in held
            ]
            for holder in ("own", "ward")
        )
        steps = KeptSteps.newest(own, ward)
        self.feed(KeeperFound(job=job, kept_generation=generation, kept=steps))

    def _unplug(self) -> None:
        controller, connection = self.controller, self.connection
        self.controller, self.connection = None, 0
        self._armed_ns = None
        if controller is not None and self.world.luck.chance(0.5):
            # The kernel closed the socket: the controller sees it at once. Otherwise it is silent.
            delay = SECOND * (1 + self.world.luck.below(2))
            self.world.agenda.after(delay, controller.broke, self.node, connection)

    def fault(self, cause: str, rail: int = -1) -> None:
        """A device reports an error."""
        self.feed(DeviceError(node=THIS_NODE, cause=cause, rail=rail))

    def keep(self, form: Form, holder: str, slot: int, step: int, branch: int) -> None:
        """A snapshot is in this node's memory."""
        steps = self.memory.setdefault(form.job, {}).setdefault((form.generation, holder, slot), {})
        for later in [each for each in steps if each > step]:  # its generation restored again
            del steps[later]
        steps[step] = branch
        while len(steps) > KEPT[holder]:
            del steps[min(steps)]
