"""The agent's side of the protocol: commands and local facts in, messages and actions out.

Fences: a command of an older controller, or of an older generation of a job, is ignored. Nothing
that a worker of an older generation says counts. Everything is answered again when it is asked
again, so lost and doubled messages do no harm.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from phalanx.cluster.commands import (
    Abort,
    Check,
    Command,
    Drain,
    Flush,
    Form,
    Go,
    Rebalance,
    Replay,
    Restore,
    Stop,
)
from phalanx.cluster.keeper import Memory
from phalanx.cluster.messages import (
    AgentAction,
    AgentMessage,
    Applied,
    CheckDone,
    Checked,
    Connected,
    Disconnected,
    Drained,
    Exited,
    Fault,
    Finished,
    FlushAsk,
    FlushAsked,
    Heartbeat,
    Hello,
    Holding,
    Inventory,
    Joined,
    KeeperFound,
    LocalFact,
    Ready,
    Refused,
    Restored,
    RunCheck,
    Sealed,
    Steps,
    Trouble,
    Wake,
    WardSealed,
    WorkerAbort,
    WorkerDrain,
    WorkerFlush,
    WorkerForm,
    WorkerFound,
    WorkerGo,
    WorkerLeft,
    WorkerRebalance,
    WorkerReplay,
    WorkerRestore,
    WorkerStop,
    WorkerUp,
)

Output = AgentMessage | AgentAction
APPLIED_KEPT = 1024

Phase = Literal[
    "spare",
    "forming",
    "joined",
    "restoring",
    "ready",
    "running",
    "aborted",
    "draining",
    "drained",
    "done",
]
Passed = Restore | Go | Abort | Drain | Rebalance | Flush | Replay


class Rank(Struct):
    """One worker on this node."""

    up: bool = False
    restored: bool = False
    left: bool = False
    step: int = 0
    committed: int = -1


class Local(Struct, kw_only=True):
    """One generation of a job on this node."""

    generation: int
    phase: Phase = "forming"
    ranks: dict[int, Rank] = {}
    restored: int = 0
    unsaid: Steps | None = None


class Agent:
    """One node's machine. ``handle`` is all there is; time comes with what happens."""

    def __init__(self, node: int, lease_ns: int, heartbeat_ns: int, incarnation: int = 0) -> None:
        self.node = node
        self.lease_ns = lease_ns
        self.heartbeat_ns = heartbeat_ns
        self.incarnation = incarnation
        self.epoch = 0
        self.connected = False
        self.jobs: dict[int, Local] = {}
        self.memory: dict[int, Memory] = {}  # by job, also of jobs that left and may return
        self.fences: dict[int, int] = {}  # by job: generations up to this one are over here
        self._applied: dict[tuple[int, int, int], None] = {}
        self._lease_ends_ns: int | None = None
        self._beat_ns = 0

    def handle(self, happened: Command | LocalFact, now_ns: int) -> list[Output]:
        """Takes in a command or a fact; returns messages to send and actions to take."""
        match happened:
            case Command():
                return self._command(happened)
            case Sealed():
                return self._sealed(happened)
            case WorkerUp():
                return self._up(happened)
            case Restored():
                return self._restored(happened)
            case WorkerLeft():
                return self._left(happened)
            case Connected():
                return self._hello(now_ns)
            case Disconnected():
                self.connected = False
                self._lease_ends_ns = now_ns + self.lease_ns
                return []
            case Wake():
                return self._wake(now_ns)
            case _:
                return self._fact(happened)

    def next_deadline_ns(self) -> int | None:
        """When the agent wants a ``Wake``: its next heartbeat, or the end of its lease."""
        return self._beat_ns if self.connected else self._lease_ends_ns

    def inventory(self) -> Inventory:
        """What runs here, and what is kept."""
        held = [
            Holding(
                job,
                local.generation,
                _PHASES[local.phase],
                self._memory(job).reached,
                self._memory(job).committed,
            )
            for job, local in self.jobs.items()
            if local.phase != "spare"
        ]
        kept = [(job, kept.committed) for job, kept in self.memory.items() if kept.committed >= 0]
        return Inventory(self.incarnation, tuple(held), tuple(kept))

    def committed(self, job: int) -> int:
        """The newest step of a job that every rank here has committed; -1: none."""
        return self.memory[job].committed if job in self.memory else -1

    def _memory(self, job: int) -> Memory:
        return self.memory.setdefault(job, Memory())

    # Commands.

    def _command(self, command: Command) -> list[Output]:
        if command.controller_epoch < self.epoch:
            return []  # a deposed controller
        self.epoch = command.controller_epoch
        key = (command.controller_epoch, command.sequence, command.index)
        told = Applied(node=self.node, sequence=command.sequence, index=command.index)
        if key in self._applied:
            return [told]
        self._applied[key] = None
        if len(self._applied) > APPLIED_KEPT:
            del self._applied[next(iter(self._applied))]
        return [told, *self._order(command)]

    def _order(self, command: Command) -> list[Output]:
        match command.body:
            case Form() as order:
                return self._form(order)
            case Stop() as order:
                return self._stop(order)
            case Check(check=check):
                return [RunCheck(check=check, command=command.sequence)]
            case Restore() | Go() | Abort() | Drain() | Rebalance() | Flush() | Replay() as order:
                local = self.jobs.get(order.job)
                if local is None or local.generation != order.generation:
                    return []
                return self._tell(local, order)
        return []

    def _form(self, order: Form) -> list[Output]:
        local = self.jobs.get(order.job)
        fence = self.fences.get(order.job, 0)
        if order.generation <= fence or (local and order.generation < local.generation):
            return []
        if local is not None and order.generation == local.generation:
            return self._say_again(order.job, local)
        self.fences.pop(order.job, None)
        self._memory(order.job).fence(order.kept_generation)
        outputs: list[Output] = []
        if local is not None and local.phase in ("restoring", "ready", "running", "draining"):
            outputs.append(WorkerAbort(job=order.job, generation=local.generation))
        warm = self.node in order.spares
        per_slot = order.slot_gpus or 1
        ranks: tuple[int, ...] = ()
        mask = 0
        if not warm:
            slot = order.nodes.index(self.node)
            ranks = tuple(range(slot * per_slot, (slot + 1) * per_slot))
            mask = order.gpus[slot] if order.gpus else 0
        self.jobs[order.job] = Local(
            generation=order.generation,
            phase="spare" if warm else "forming",
            ranks={rank: Rank() for rank in ranks},
        )
        form = WorkerForm(
            job=order.job,
            generation=order.generation,
            ranks=ranks,
            world=per_slot * len(order.nodes),
            store=order.store,
            gpus=mask,
            warm=warm,
            micro_batches=order.micro_batches,
            payload=order.payload,
        )
        return [*outputs, form]

    def _stop(self, order: Stop) -> list[Output]:
        local = self.jobs.get(order.job)
        self.fences[order.job] = max(self.fences.get(order.job, 0), order.generation)
        if local is not None and local.generation > order.generation:
            return []
        self.jobs.pop(order.job, None)
        kept = order.job in self.memory
        if not order.keep_snapshots:
            self.memory.pop(order.job, None)
        if local is None and not kept:
            return []
        stop = WorkerStop(
            job=order.job, generation=order.generation, keep_snapshots=order.keep_snapshots
        )
        return [stop]

    def _tell(self, local: Local, order: Passed) -> list[Output]:
        """Passes an order on to the workers of the current generation."""
        job, generation = order.job, order.generation
        match order:
            case Restore(step=step, source=source):
                if local.phase not in ("joined", "restoring", "ready"):
                    return self._say_again(job, local)
                if local.phase == "ready" and step == local.restored:
                    return self._say_again(job, local)
                local.phase, local.restored = "restoring", step
                for rank in local.ranks.values():
                    rank.restored = False
                return [WorkerRestore(job=job, generation=generation, step=step, source=source)]
            case Go():
                if local.phase != "ready":
                    return []
                local.phase = "running"
                self._memory(job).go(generation)
                return [WorkerGo(job=job, generation=generation)]
            case Abort():
                if local.phase not in ("restoring", "ready", "running"):
                    return []
                local.phase = "aborted"
                return [WorkerAbort(job=job, generation=generation)]
            case Drain(deadline_ns=deadline):
                if local.phase != "running":
                    return self._say_again(job, local)
                local.phase = "draining"
                return [WorkerDrain(job=job, generation=generation, deadline_ns=deadline)]
            case Rebalance(micro_batches=shares):
                return [WorkerRebalance(job=job, generation=generation, micro_batches=shares)]
            case Flush(bytes_per_second=rate, until_ns=until):
                flush = WorkerFlush(
                    job=job, generation=generation, bytes_per_second=rate, until_ns=until
                )
                return [flush]
            case Replay(step=step):
                return [WorkerReplay(job=job, generation=generation, step=step)]

    # Answers.

    def _say_again(self, job: int, local: Local) -> list[Output]:
        """The last answer of a job, for a controller that did not get it."""
        node, generation = self.node, local.generation
        match local.phase:
            case "joined":
                return [self._joined(job, local)]
            case "ready":
                return [Ready(node=node, job=job, generation=generation, step=local.restored)]
            case "drained":
                return [self._drained(job, local)]
            case "done":
                step = self._memory(job).reached
                return [Finished(node=node, job=job, generation=generation, step=step)]
        return []

    def _joined(self, job: int, local: Local) -> Joined:
        kept = self._memory(job)
        return Joined(
            node=self.node,
            job=job,
            generation=local.generation,
            committed=kept.committed,
            previous=kept.previous,
            ward=kept.ward,
            ward_previous=kept.ward_previous,
            reached=kept.reached,
            reached_ns=kept.reached_ns,
        )

    def _drained(self, job: int, local: Local) -> Drained:
        durable = self._memory(job).durable
        return Drained(
            node=self.node,
            job=job,
            generation=local.generation,
            step=durable,
            durable=durable > 0,
        )

    # Facts.

    def _fact(self, fact: LocalFact) -> list[Output]:
        """What needs no more than to be passed on, or to be remembered."""
        match fact:
            case WardSealed(job=job, generation=generation, step=step):
                local = self.jobs.get(job)
                current = local is not None and local.generation == generation
                if current and local and local.phase in ("running", "draining"):
                    self._memory(job).seal_ward(step)
            case WorkerFound():
                self._found(fact)
            case KeeperFound():
                self.memory[fact.job] = Memory(
                    committed=fact.committed,
                    previous=fact.previous,
                    ward=fact.ward,
                    ward_previous=fact.ward_previous,
                    kept_generation=fact.kept_generation,
                )
            case Fault(cause=c, gpu=g, rail=r, job=j, detail=d):
                return [Trouble(node=self.node, cause=c, gpu=g, rail=r, job=j, detail=d)]
            case CheckDone(check=k, passed=p, command=m, cause=c, detail=d):
                return [Checked(node=self.node, check=k, passed=p, command=m, cause=c, detail=d)]
            case FlushAsk(job=j, generation=g):
                current = j in self.jobs and self.jobs[j].generation == g
                return [FlushAsked(node=self.node, job=j, generation=g)] if current else []
        return []

    def _rank(self, job: int, generation: int, rank: int) -> tuple[Local, Rank] | None:
        local = self.jobs.get(job)
        if local is None or local.generation != generation or rank not in local.ranks:
            return None
        return local, local.ranks[rank]

    def _up(self, fact: WorkerUp) -> list[Output]:
        found = self._rank(fact.job, fact.generation, fact.rank)
        if found is None:
            return []
        local, rank = found
        rank.up = True
        if local.phase != "forming" or not all(each.up for each in local.ranks.values()):
            return []
        local.phase = "joined"
        return [self._joined(fact.job, local)]

    def _restored(self, fact: Restored) -> list[Output]:
        found = self._rank(fact.job, fact.generation, fact.rank)
        if found is None or found[0].phase != "restoring" or fact.step != found[0].restored:
            return []
        local, rank = found
        if fact.refused:
            refused = Refused(
                node=self.node,
                job=fact.job,
                generation=fact.generation,
                source=fact.source,
                step=fact.step,
                detail=fact.refused,
            )
            return [refused]
        rank.restored, rank.step, rank.committed = True, fact.step, fact.step
        if not all(each.restored for each in local.ranks.values()):
            return []
        local.phase, local.unsaid = "ready", None
        self._memory(fact.job).restored(fact.generation, fact.step)
        return self._say_again(fact.job, local)

    def _sealed(self, fact: Sealed) -> list[Output]:
        found = self._rank(fact.job, fact.generation, fact.rank)
        if found is None or found[0].phase not in ("running", "draining"):
            return []
        local, rank = found
        kept = self._memory(fact.job)
        rank.step = max(rank.step, fact.step)
        if fact.acknowledged:
            rank.committed = max(rank.committed, fact.step)
        kept.durable = max(kept.durable, fact.durable)
        kept.seal(min(each.committed for each in local.ranks.values()))
        if kept.reach(min(each.step for each in local.ranks.values()), fact.at_ns):
            local.unsaid = self._steps(fact, local, kept)
        return []

    def _steps(self, fact: Sealed, local: Local, kept: Memory) -> Steps:
        before = local.unsaid
        return Steps(
            node=self.node,
            job=fact.job,
            generation=fact.generation,
            step=kept.reached,
            committed=kept.committed,
            durable=kept.durable,
            at_ns=fact.at_ns,
            data_wait_ns=fact.data_wait_ns + (before.data_wait_ns if before else 0),
            checkpoint_ns=fact.checkpoint_ns + (before.checkpoint_ns if before else 0),
            straggler_ns=fact.straggler_ns + (before.straggler_ns if before else 0),
            busy_ns=fact.busy_ns + (before.busy_ns if before else 0),
        )

    def _left(self, fact: WorkerLeft) -> list[Output]:
        found = self._rank(fact.job, fact.generation, fact.rank)
        if found is None or found[1].left:
            return []
        local, rank = found
        rank.left = True
        if fact.cause:
            local.phase = "aborted"
            exited = Exited(
                node=self.node,
                job=fact.job,
                generation=fact.generation,
                rank=fact.rank,
                cause=fact.cause,
                step=fact.step,
                detail=fact.detail,
            )
            return [*self._unsaid(local), exited]
        if not all(each.left for each in local.ranks.values()):
            return []
        if local.phase not in ("draining", "running"):
            return []
        local.phase = "drained" if local.phase == "draining" else "done"
        if local.phase == "done":
            kept = self._memory(fact.job)
            kept.reached = max(kept.reached, fact.step)
        return [*self._unsaid(local), *self._say_again(fact.job, local)]

    def _found(self, fact: WorkerFound) -> None:
        """A worker outlived the agent before this one."""
        known = self.jobs.get(fact.job)
        kept = self._memory(fact.job)
        if known is None or known.generation < fact.generation:
            known = Local(generation=fact.generation, phase="running", ranks={})
            self.jobs[fact.job] = known
            if fact.running and kept.kept_generation < fact.generation:
                kept = self.memory[fact.job] = Memory(kept_generation=fact.generation)
        found = Rank(up=True, restored=True, step=fact.step, committed=fact.committed)
        known.ranks[fact.rank] = found
        if not fact.running:
            known.phase, known.restored = "ready", fact.step
            kept.restored(fact.generation, fact.step)
            return
        kept.reached = min(each.step for each in known.ranks.values())
        kept.committed = min(each.committed for each in known.ranks.values())
        kept.ward = kept.ward if kept.ward >= 0 else fact.ward
        kept.durable = max(kept.durable, fact.durable)

    # Time and connections.

    def _unsaid(self, local: Local) -> list[Output]:
        said, local.unsaid = local.unsaid, None
        return [] if said is None else [said]

    def _hello(self, now_ns: int) -> list[Output]:
        self.connected = True
        self._lease_ends_ns = None
        self._beat_ns = now_ns + self.heartbeat_ns
        outputs: list[Output] = [Hello(node=self.node, inventory=self.inventory())]
        for job, local in self.jobs.items():
            outputs.extend(self._say_again(job, local))
        return outputs

    def _wake(self, now_ns: int) -> list[Output]:
        if not self.connected:
            return self._expire(now_ns)
        if now_ns < self._beat_ns:
            return []
        self._beat_ns = now_ns + self.heartbeat_ns
        outputs: list[Output] = [Heartbeat(node=self.node, incarnation=self.incarnation)]
        for local in self.jobs.values():
            outputs.extend(self._unsaid(local))
        return outputs

    def _expire(self, now_ns: int) -> list[Output]:
        """Nobody has spoken for the whole lease: somebody else has the job by now."""
        if self._lease_ends_ns is None or now_ns < self._lease_ends_ns:
            return []
        self._lease_ends_ns = None
        stops: list[Output] = []
        for job, local in self.jobs.items():
            self.fences[job] = max(self.fences.get(job, 0), local.generation)
            stops.append(WorkerStop(job=job, generation=local.generation))
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
