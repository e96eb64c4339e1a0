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
    Adopt,
    Check,
    Command,
    Drain,
    Flush,
    Form,
    Rebalance,
    Replay,
    Restore,
    Stop,
)
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
    "spare", "forming", "joined", "restoring", "running", "aborted", "draining", "drained", "done"
]


class Rank(Struct):
    """One worker on this node."""

    up: bool = False
    restored: bool = False
    left: bool = False
    step: int = 0
    committed: int = -1


class Local(Struct, kw_only=True):
    """One job on this node. The first fields outlive generations: the keeper does too."""

    committed: int = -1
    previous: int = -1
    ward: int = -1
    ward_previous: int = -1
    kept_generation: int = 0
    reached: int = 0
    reached_ns: int = 0
    durable: int = 0
    generation: int = 0
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
        self.fences: dict[int, int] = {}  # by job: generations up to this one are over here
        self._applied: dict[tuple[int, int, int], None] = {}
        self._lease_ends_ns: int | None = None
        self._beat_ns = 0

    def handle(self, happened: Command | LocalFact, now_ns: int) -> list[Output]:
        """Takes in a command or a fact; returns messages to send and actions to take."""
        if isinstance(happened, Command):
            return self._command(happened)
        match happened:
            case Sealed():
                return self._sealed(happened)
            case WorkerUp():
                return self._up(happened)
            case Restored():
                return self._restored(happened)
            case WorkerLeft():
                return self._left(happened)
            case WardSealed(job=job, generation=generation, step=step):
                local = self.jobs.get(job)
                if local is not None and generation == local.generation and step > local.ward:
                    local.ward_previous, local.ward = local.ward, step
                return []
            case WorkerFound():
                return self._found(happened)
            case Fault(cause=c, gpu=g, rail=r, job=j, detail=d):
                return [Trouble(node=self.node, cause=c, gpu=g, rail=r, job=j, detail=d)]
            case CheckDone(check=k, passed=p, command=m, cause=c, detail=d):
                return [Checked(node=self.node, check=k, passed=p, command=m, cause=c, detail=d)]
            case FlushAsk(job=j, generation=g):
                current = j in self.jobs and self.jobs[j].generation == g
                return [FlushAsked(node=self.node, job=j, generation=g)] if current else []
            case Connected():
                return self._hello(now_ns)
            case Disconnected():
                self.connected = False
                self._lease_ends_ns = now_ns + self.lease_ns
                return []
            case Wake():
                return self._wake(now_ns)

    def next_deadline_ns(self) -> int | None:
        """When the agent wants a ``Wake``: its next heartbeat, or the end of its lease."""
        return self._beat_ns if self.connected else self._lease_ends_ns

    def inventory(self) -> Inventory:
        """What runs here."""
        held = [
            Holding(job, local.generation, _PHASES[local.phase], local.reached, local.committed)
            for job, local in self.jobs.items()
            if local.phase != "spare"
        ]
        kept = [(job, local.committed) for job, local in self.jobs.items() if local.committed >= 0]
        return Inventory(self.incarnation, tuple(held), tuple(kept))

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
            case Restore() | Abort() | Drain() | Rebalance() | Flush() | Replay() as order:
                local = self.jobs.get(order.job)
                if local is None or local.generation != order.generation:
                    return []
                return self._tell(local, order)
            case Adopt():
                return []
        return []

    def _form(self, order: Form) -> list[Output]:
        local = self.jobs.get(order.job)
        fence = self.fences.get(order.job, 0)
        if order.generation <= fence or (local and order.generation < local.generation):
            return []
        if local is not None and order.generation == local.generation:
            return self._say_again(order.job, local)
        self.fences.pop(order.job, None)
        local = local or Local(ranks={})
        outputs: list[Output] = []
        if local.phase in ("restoring", "running", "draining"):
            outputs.append(WorkerAbort(job=order.job, generation=local.generation))
        self.jobs[order.job] = local
        local.generation = order.generation
        warm = self.node in order.spares
        per_slot = order.slot_gpus or 1
        ranks: tuple[int, ...] = ()
        mask = 0
        if not warm:
            slot = order.nodes.index(self.node)
            ranks = tuple(range(slot * per_slot, (slot + 1) * per_slot))
            mask = order.gpus[slot] if order.gpus else 0
        local.ranks = {rank: Rank() for rank in ranks}
        local.phase = "spare" if warm else "forming"
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
        if local is None or local.generation > order.generation:
            return []
        del self.jobs[order.job]
        stop = WorkerStop(
            job=order.job, generation=order.generation, keep_snapshots=order.keep_snapshots
        )
        return [stop]

    def _tell(
        self, local: Local, order: Restore | Abort | Drain | Rebalance | Flush | Replay
    ) -> list[Output]:
        """Passes an order on to the workers of the current generation."""
        job, generation = order.job, order.generation
        match order:
            case Restore(step=step, source=source):
                if local.phase not in ("joined", "restoring"):
                    return self._say_again(job, local)
                local.phase, local.restored = "restoring", step
                for rank in local.ranks.values():
                    rank.restored = False
                return [WorkerRestore(job=job, generation=generation, step=step, source=source)]
            case Abort():
                if local.phase not in ("restoring", "running"):
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

    def _say_again(self, job: int, local: Local) -> list[Output]:
        """The last answer of a job, for a controller that did not get it."""
        node, generation = self.node, local.generation
        if local.phase == "joined":
            return [self._joined(job, local)]
        if local.phase == "running":
            return [Ready(node=node, job=job, generation=generation, step=local.restored)]
        if local.phase == "drained":
            return [self._drained(job, local)]
        if local.phase == "done":
            return [Finished(node=node, job=job, generation=generation, step=local.reached)]
        return []

    def _joined(self, job: int, local: Local) -> Joined:
        return Joined(
            node=self.node,
            job=job,
            generation=local.generation,
            committed=local.committed,
            previous=local.previous,
            ward=local.ward,
            ward_previous=local.ward_previous,
            kept_generation=local.kept_generation,
            reached=local.reached,
            reached_ns=local.reached_ns,
        )

    def _drained(self, job: int, local: Local) -> Drained:
        return Drained(
            node=self.node,
            job=job,
            generation=local.generation,
            step=local.durable,
            durable=local.durable > 0,
        )

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
        # What was restored is sealed again, here and at the buddy, before anybody says "ready".
        local.phase = "running"
        local.committed, local.previous = fact.step, -1
        local.ward, local.ward_previous = fact.step, -1
        local.kept_generation = fact.generation
        local.reached, local.reached_ns = fact.step, 0
        local.unsaid = None
        ready = Ready(node=self.node, job=fact.job, generation=fact.generation, step=fact.step)
        return [ready]

    def _sealed(self, fact: Sealed) -> list[Output]:
        found = self._rank(fact.job, fact.generation, fact.rank)
        if found is None or found[0].phase not in ("running", "draining"):
            return []
        local, rank = found
        rank.step = max(rank.step, fact.step)
        if fact.acknowledged:
            rank.committed = max(rank.committed, fact.step)
        local.durable = max(local.durable, fact.durable)
        step = min(each.step for each in local.ranks.values())
        committed = min(each.committed for each in local.ranks.values())
        if committed > local.committed:
            local.previous, local.committed = local.committed, committed
        if step > local.reached:
            local.reached, local.reached_ns = step, fact.at_ns
            local.unsaid = self._steps(fact, local)
        return []

    def _steps(self, fact: Sealed, local: Local) -> Steps:
        before = local.unsaid
        return Steps(
            node=self.node,
            job=fact.job,
            generation=fact.generation,
            step=local.reached,
            committed=local.committed,
            durable=local.durable,
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
        if local.phase == "draining":
            local.phase = "drained"
            return [*self._unsaid(local), self._drained(fact.job, local)]
        if local.phase == "running":
            local.phase = "done"
            local.reached = max(local.reached, fact.step)
            done = Finished(
                node=self.node, job=fact.job, generation=fact.generation, step=local.reached
            )
            return [*self._unsaid(local), done]
        return []

    def _found(self, fact: WorkerFound) -> list[Output]:
        """A worker outlived the agent before this one."""
        local = self.jobs.setdefault(fact.job, Local(ranks={}))
        local.generation, local.phase = fact.generation, "running"
        local.kept_generation = fact.generation
        local.ranks[fact.rank] = Rank(
            up=True, restored=True, step=fact.step, committed=fact.committed
        )
        local.reached = min(each.step for each in local.ranks.values())
        local.committed = min(each.committed for each in local.ranks.values())
        local.durable = max(local.durable, fact.durable)
        return []

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
        return stops


_PHASES: dict[Phase, Literal["joined", "running", "drained", "aborted"]] = {
    "spare": "joined",
    "forming": "joined",
    "joined": "joined",
    "restoring": "joined",
    "running": "running",
    "aborted": "aborted",
    "draining": "running",
    "drained": "drained",
    "done": "drained",
}
