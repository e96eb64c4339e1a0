"""The agent's side of the protocol: commands and local facts in, messages and actions out.

Fences: a command of an older controller, or of an older generation of a job, is ignored. Nothing
that a worker of an older generation says counts. Everything is answered again when it is asked
again, so lost and doubled messages do no harm.
"""

from __future__ import annotations

from typing import Literal

from msgspec import structs

from phalanx.cluster.protocol.commands import (
    Abort,
    Check,
    Command,
    Drain,
    FailureRate,
    Flush,
    Form,
    Go,
    Rebalance,
    Restore,
    Stop,
)
from phalanx.cluster.protocol.keeper_state import KeeperState
from phalanx.cluster.protocol.local_gang import LocalGang, LocalRank, Output, Phase
from phalanx.cluster.protocol.messages import (
    Applied,
    Busy,
    CheckResult,
    Connected,
    DeviceError,
    Disconnected,
    FlushWanted,
    Heartbeat,
    Holding,
    Inventory,
    KeeperFound,
    KeeperSilent,
    LocalFact,
    NodeNotice,
    NodeSeen,
    ProgramEnded,
    ReplicasDiffer,
    Restored,
    RestoreFailed,
    Sealed,
    Wake,
    WardSealed,
    WorkerExited,
    WorkerFound,
    WorkerUp,
)
from phalanx.cluster.reasons import reason

APPLIED_KEPT = 1024  # commands that are remembered, to drop them when they come twice


class Agent:
    """One node's machine. ``handle`` is all there is; time comes with what happens."""

    def __init__(
        self,
        node: int,
        lease_ns: int,
        heartbeat_ns: int,
        incarnation: int = 0,
        report_ns: int = 0,  # between two reports of progress; 0: with every heartbeat
    ) -> None:
        self.node = node
        self.lease_ns = lease_ns
        self.heartbeat_ns = heartbeat_ns
        self.report_ns = min(report_ns or heartbeat_ns, heartbeat_ns)
        self.incarnation = incarnation
        self.epoch = 0
        self.connected = False
        self.jobs: dict[int, LocalGang] = {}
        self.memory: dict[int, KeeperState] = {}  # by job, also of jobs that left and may return
        self.fences: dict[int, int] = {}  # by job: generations up to this one are over here
        self._applied: dict[tuple[int, int, int], None] = {}
        self._lease_ends_ns: int | None = None
        self._beat_ns = 0
        self._report_ns = 0

    def handle(self, happened: Command | LocalFact, now_ns: int) -> list[Output]:
        """Takes in a command or a fact; returns messages to send and actions to take."""
        match happened:
            case Command():
                return self._command(happened)
            case Connected():
                return self._hello(now_ns)
            case Disconnected():
                self.connected = False
                self._lease_ends_ns = now_ns + self.lease_ns
                return []
            case Wake():
                return self._wake(now_ns)
            case (
                Sealed()
                | WorkerUp()
                | Restored()
                | RestoreFailed()
                | WorkerExited()
                | WardSealed()
                | FlushWanted()
                | ReplicasDiffer()
                | Busy()
            ):
                local = self.jobs.get(happened.job)
                if local is None or local.generation != happened.generation:
                    return []  # of a generation that is over
                return self._of_gang(local, happened)
            case _:
                return self._of_node(happened)

    def next_deadline_ns(self) -> int | None:
        """When the agent wants a ``Wake``: its next heartbeat, or the end of its lease."""
        if not self.connected:
            return self._lease_ends_ns
        return min(self._beat_ns, self._report_ns) if self.jobs else self._beat_ns

    def inventory(self) -> Inventory:
        """What runs here, and what is kept."""
        snapshots_held = [
            Holding(
                job,
                local.generation,
                _PHASES[local.phase],
                local.kept.reached,
                local.kept.committed,
            )
            for job, local in self.jobs.items()
            if local.phase != "spare"
        ]
        kept = [(job, max(kept.committed, kept.ward)) for job, kept in self.memory.items()]
        known = tuple((job, step) for job, step in kept if step >= 0)
        return Inventory(self.incarnation, tuple(snapshots_held), known)

    def committed(self, job: int) -> int:
        """The newest step of a job that every rank here has committed; -1: none."""
        return self.memory[job].committed if job in self.memory else -1

    # Commands.

    def _command(self, command: Command) -> list[Output]:
        if command.controller_epoch < self.epoch:
            return []  # a deposed controller
        self.epoch = command.controller_epoch
        key = (command.controller_epoch, command.sequence, command.index)
        applied = Applied(node=self.node, sequence=command.sequence, index=command.index)
        if key in self._applied:
            return [applied]
        self._applied[key] = None
        if len(self._applied) > APPLIED_KEPT:
            del self._applied[next(iter(self._applied))]
        return [applied, *self._order(command)]

    def _order(self, command: Command) -> list[Output]:
        match command.body:
            case Form() as order:
                return self._form(order)
            case Stop() as order:
                return self._stop(order)
            case Check():
                return [command]
            case (
                Restore() | Go() | Abort() | Drain() | Rebalance() | FailureRate() | Flush()
            ) as order:
                local = self.jobs.get(order.job)
                if local is None or local.generation != order.generation:
                    return []
                return local.tell(order)
        return []

    def _form(self, order: Form) -> list[Output]:
        local = self.jobs.get(order.job)
        fence = self.fences.get(order.job, 0)
        if order.generation <= fence or (local and order.generation < local.generation):
            return []
        if self.node not in order.nodes and self.node not in order.spares:
            return []  # meant for somebody else
        if local is not None and order.generation == local.generation:
            return local.say_again()
        self.fences.pop(order.job, None)
        kept = self.memory.setdefault(order.job, KeeperState())
        kept.fence(order.kept_generation)
        outputs: list[Output] = []
        if local is not None and local.phase in ("restoring", "ready", "running", "draining"):
            abort = Abort(reason=order.reason, job=order.job, generation=local.generation)
            outputs.append(abort)
        self.jobs[order.job] = LocalGang(
            node=self.node,
            job=order.job,
            generation=order.generation,
            kept=kept,
            phase="spare" if self.node in order.spares else "forming",
            ranks={rank: LocalRank() for rank in order.ranks_on(self.node)},
        )
        return [*outputs, order]

    def _stop(self, order: Stop) -> list[Output]:
        local = self.jobs.get(order.job)
        self.fences[order.job] = max(self.fences.get(order.job, 0), order.generation)
        if local is not None and local.generation > order.generation:
            return []
        self.jobs.pop(order.job, None)
        is_here = local is not None or order.job in self.memory
        last = local.say_last() if local is not None else []
        if not order.keep_snapshots:
            self.memory.pop(order.job, None)
        return [*last, order] if is_here or order.confirm else []

    # Facts.

    def _of_gang(
        self,
        local: LocalGang,
        fact: Sealed
        | WorkerUp
        | Restored
        | RestoreFailed
        | WorkerExited
        | WardSealed
        | FlushWanted
        | ReplicasDiffer
        | Busy,
    ) -> list[Output]:
        match fact:
            case Sealed():
                return local.sealed(fact)
            case WardSealed(step=step):
                local.ward_sealed(step)
            case WorkerUp(rank=rank):
                return local.up(rank)
            case Restored():
                return local.restored(fact)
            case WorkerExited():
                return local.left(fact)
            case RestoreFailed():
                return local.restore_failed(fact)
            case ReplicasDiffer():
                return local.differ(fact)
            case Busy():
                return [structs.replace(fact, node=self.node)]
            case FlushWanted():
                return [fact]
        return []

    def _of_node(self, fact: LocalFact) -> list[Output]:
        match fact:
            case WorkerFound():
                self._found(fact)
            case KeeperFound():
                self.memory[fact.job] = KeeperState(
                    steps=fact.kept, kept_generation=fact.kept_generation
                )
            case DeviceError() | NodeNotice() | CheckResult() | KeeperSilent() | ProgramEnded():
                return [structs.replace(fact, node=self.node)]
        return []

    def _found(self, fact: WorkerFound) -> None:
        """A worker outlived the agent before this one."""
        local = self.jobs.get(fact.job)
        if local is not None and local.generation > fact.generation:
            return  # of a generation that is over
        if local is None or local.generation < fact.generation:
            kept = self.memory.setdefault(fact.job, KeeperState())
            if fact.running and kept.kept_generation < fact.generation:
                kept = self.memory[fact.job] = KeeperState(kept_generation=fact.generation)
            local = self.jobs[fact.job] = LocalGang(
                node=self.node,
                job=fact.job,
                generation=fact.generation,
                kept=kept,
                phase="running",
                ranks={},
            )
        local.found(fact)

    # Time and connections.

    def _hello(self, now_ns: int) -> list[Output]:
        self.connected = True
        self._lease_ends_ns = None
        self._beat_ns = now_ns + self.heartbeat_ns
        self._report_ns = now_ns + self.report_ns
        outputs: list[Output] = [NodeSeen(node=self.node, inventory=self.inventory())]
        for local in self.jobs.values():
            outputs.extend(local.say_again())
        return outputs

    def _wake(self, now_ns: int) -> list[Output]:
        if not self.connected:
            return self._expire(now_ns)
        outputs: list[Output] = []
        if now_ns >= self._beat_ns:
            self._beat_ns = now_ns + self.heartbeat_ns
            outputs.append(Heartbeat(node=self.node, incarnation=self.incarnation))
        if now_ns >= self._report_ns:
            self._report_ns = now_ns + self.report_ns
            for local in self.jobs.values():
                outputs.extend(local.say_steps())
                if local.phase in ("drained", "done"):
                    # Until somebody stops it: an end that nobody heard would count as a hang.
                    outputs.extend(local.say_again())
        return outputs

    def _expire(self, now_ns: int) -> list[Output]:
        """Nobody has spoken for the whole lease: somebody else has the job by now."""
        if self._lease_ends_ns is None or now_ns < self._lease_ends_ns:
            return []
        self._lease_ends_ns = None
        for job, local in self.jobs.items():
            self.fences[job] = max(self.fences.get(job, 0), local.generation)
        dropped = dict.fromkeys((*self.jobs, *self.memory))  # nor do snapshots stay for ever
        why = reason("lease_over", seconds=self.lease_ns // 10**9)
        stops: list[Output] = [
            Stop(reason=why, job=job, generation=self.fences.get(job, 0)) for job in dropped
        ]
        self.jobs = {}
        self.memory = {}
        return stops


_PHASES: dict[Phase, Literal["joined", "ready", "running", "drained", "aborted"]] = {
    "spare": "joined",
    "forming": "joined",
    "joined": "joined",
    "restoring": "joined",
    "ready": "ready",
    "running": "running",
    "aborted": "aborted",
    "draining": "running",
    "drained": "drained",
    "done": "drained",
}
