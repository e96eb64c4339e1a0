"""One generation of a job on one node: its ranks from start to end, as the agent sees them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

from phalanx.cluster.protocol.commands import (
    Abort,
    AgentAction,
    Drain,
    Go,
    Restore,
    WorkerOrder,
)
from phalanx.cluster.protocol.keeper_state import KeeperState
from phalanx.cluster.protocol.messages import (
    AgentMessage,
    Drained,
    Finished,
    Joined,
    LastSteps,
    Ready,
    ReplicasDiffer,
    Restored,
    RestoreFailed,
    Sealed,
    Steps,
    WorkerExited,
    WorkerFound,
)

Output = AgentMessage | AgentAction
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


class LocalRank(Struct):
    """One worker on this node."""

    up: bool = False
    restored: bool = False
    left: bool = False
    step: int = 0
    committed: int = -1


class LocalGang(Struct, kw_only=True):
    """The ranks of one generation here. ``kept`` outlives it: it is the keeper's."""

    node: int
    job: int
    generation: int
    kept: KeeperState
    phase: Phase = "forming"
    ranks: dict[int, LocalRank] = {}
    restored_step: int = 0
    skipped: tuple[int, int] = (0, 0)  # samples of the batch that was left out with it
    unsaid: Steps | None = None
    complaints: list[WorkerExited | ReplicasDiffer] = []  # said again to the next controller
    not_archived: str = ""  # what a rank that did all its steps says is missing
    result: str = ""  # what the first rank of a program left as that
    early: Restore | None = None  # came before the workers: the gang was further than this agent

    # Orders.

    def tell(self, order: WorkerOrder) -> list[Output]:
        """Passes an order on to the workers."""
        match order:
            case Restore() if self.phase == "spare":
                self.kept.still_backs_up(self.generation, order.step)
                return []
            case Restore():
                return self._restore(order)
            case Go():
                if self.phase != "ready":
                    return []
                self.phase = "running"
                self.kept.go(self.generation)
            case Abort():
                last = self.say_last()
                if self.phase not in ("restoring", "ready", "running"):
                    return last
                self.phase = "aborted"
                return [*last, order]
            case Drain():
                if self.phase != "running":
                    return self.say_again()
                self.phase = "draining"
        return [order]

    def _restore(self, order: Restore) -> list[Output]:
        if self.phase == "forming":
            self.early = order
            return []
        known = self.phase == "ready" and order.step == self.restored_step
        if known or self.phase not in ("joined", "restoring", "ready"):
            return self.say_again()
        self.phase, self.restored_step = "restoring", order.step
        for rank in self.ranks.values():
            rank.restored = False
        return [order]

    # Answers.

    def say_again(self) -> list[Output]:
        """The last answer, for a controller that did not get it."""
        node, job, generation, kept = self.node, self.job, self.generation, self.kept
        match self.phase:
            case "joined":
                joined = Joined(
                    node=node,
                    job=job,
                    generation=generation,
                    kept=kept.steps,
                    reached=kept.reached,
                    reached_ns=kept.reached_ns,
                    durable=kept.durable if kept.committed >= 0 else 0,
                )
                return [joined]
            case "ready":
                ready = Ready(
                    node=node,
                    job=job,
                    generation=generation,
                    step=self.restored_step,
                    skipped=self.skipped,
                )
                return [ready]
            case "drained":
                drained = Drained(
                    node=node,
                    job=job,
                    generation=generation,
                    step=kept.durable,
                    durable=kept.durable > 0,
                )
                return [drained]
            case "done":
                finished = Finished(
                    node=node,
                    job=job,
                    generation=generation,
                    step=kept.reached,
                    not_archived=self.not_archived,
                    result=self.result,
                )
                return [finished]
            case "aborted":
                return list(self.complaints)
        return []

    def say_last(self) -> list[Output]:
        """How far a generation came here that is over now; nothing of one that never ran."""
        kept = self.kept
        if kept.kept_generation != self.generation:
            return []
        last = LastSteps(
            node=self.node,
            job=self.job,
            generation=self.generation,
            committed=kept.committed,
            reached=kept.reached,
            durable=kept.durable,
        )
        return [last]

    def say_steps(self) -> list[Output]:
        """Progress that has not been reported yet."""
        said, self.unsaid = self.unsaid, None
        return [] if said is None else [said]

    # Facts.

    def up(self, number: int) -> list[Output]:
        """A worker is there."""
        rank = self.ranks.get(number)
        if rank is None:
            return []
        rank.up = True
        if self.phase != "forming" or not all(each.up for each in self.ranks.values()):
            return []
        self.phase = "joined"
        joined, early, self.early = self.say_again(), self.early, None
        return joined if early is None else [*joined, *self._restore(early)]

    def restored(self, fact: Restored) -> list[Output]:
        """A worker has loaded a step."""
        rank = self.ranks.get(fact.rank)
        if rank is None or self.phase != "restoring" or fact.step != self.restored_step:
            return []
        rank.restored, rank.step, rank.committed = True, fact.step, fact.step
        if not all(each.restored for each in self.ranks.values()):
            return []
        self.phase, self.unsaid, self.skipped = "ready", None, fact.skipped
        self.kept.restored(self.generation, fact.step)
        return self.say_again()

    def restore_failed(self, fact: RestoreFailed) -> list[Output]:
        """A worker could not use the source."""
        if self.phase != "restoring" or fact.step != self.restored_step:
            return []
        return [structs.replace(fact, node=self.node)]

    def sealed(self, fact: Sealed) -> list[Output]:
        """A worker has made a step. A new durable checkpoint is said at once: it must be known."""
        rank = self.ranks.get(fact.rank)
        if rank is None or self.phase not in ("running", "draining"):
            self._sealed_late(rank, fact)
            return []
        kept, durable = self.kept, self.kept.durable
        rank.step = max(rank.step, fact.step)
        if fact.acknowledged:
            rank.committed = max(rank.committed, fact.step)
        kept.durable = max(kept.durable, fact.durable)
        kept.seal(min(each.committed for each in self.ranks.values()))
        reached = kept.reach(min(each.step for each in self.ranks.values()), fact.at_ns)
        if reached or kept.durable > durable:
            self._note(fact)
        return self.say_steps() if kept.durable > durable else []

    def _sealed_late(self, rank: LocalRank | None, fact: Sealed) -> None:
        """A keeper says that a step is safe of a generation that has just been aborted."""
        ran = self.phase == "aborted" and self.kept.kept_generation == self.generation
        if rank is not None and ran and fact.acknowledged:
            rank.committed = max(rank.committed, fact.step)
            self.kept.seal(min(each.committed for each in self.ranks.values()))

    def _note(self, fact: Sealed) -> None:
        kept = self.kept
        steps = Steps(
            node=self.node,
            job=self.job,
            generation=self.generation,
            step=kept.reached,
            committed=kept.committed,
            durable=kept.durable,
            at_ns=fact.at_ns,
            data_wait_ns=fact.data_wait_ns,
            checkpoint_ns=fact.checkpoint_ns,
            flush_ns=fact.flush_ns,
        )
        self.unsaid = steps.added_to(self.unsaid)

    def ward_sealed(self, step: int) -> None:
        """The keeper holds a step of the slot that this one is the buddy of."""
        if self.phase == "spare":
            self.kept.back_up(self.generation, step)
        ran = self.phase == "aborted" and self.kept.kept_generation == self.generation
        if ran or self.phase in ("running", "draining"):
            self.kept.seal_ward(step)

    def differ(self, fact: ReplicasDiffer) -> list[Output]:
        """A worker disagrees with its replicas: one of them on each node is enough to say so."""
        if self.phase not in ("running", "draining"):
            return []
        self.phase = "aborted"
        differed = structs.replace(fact, node=self.node)
        self.complaints.append(differed)
        return [*self.say_steps(), differed]

    def left(self, fact: WorkerExited) -> list[Output]:
        """A worker is gone."""
        rank = self.ranks.get(fact.rank)
        if rank is None or rank.left:
            return []
        rank.left = True
        if fact.cause:
            self.phase = "aborted"
            exited = structs.replace(fact, node=self.node)
            self.complaints.append(exited)
            return [*self.say_steps(), exited]
        self.not_archived = self.not_archived or fact.detail
        self.result = self.result or fact.result
        if not all(each.left for each in self.ranks.values()):
            return []
        if self.phase not in ("draining", "running"):
            return []
        self.phase = "drained" if self.phase == "draining" else "done"
        if self.phase == "done":
            self.kept.reached = max(self.kept.reached, fact.step)
        return [*self.say_steps(), *self.say_again()]

    def found(self, fact: WorkerFound) -> None:
        """A worker outlived the agent before this one, or speaks to this one for the first time.

        A program that has just begun knows less than it is to restore, which is safe all the same.
        """
        rank = self.ranks.get(fact.rank, LocalRank())
        self.ranks[fact.rank] = LocalRank(
            up=True,
            restored=True,
            step=max(rank.step, fact.step),
            committed=max(rank.committed, fact.committed),
        )
        kept = self.kept
        if not fact.running:
            self.phase, self.restored_step = "ready", fact.step
            kept.restored(self.generation, fact.step)
            return
        kept.reached = min(each.step for each in self.ranks.values())
        kept.adopt(min(each.committed for each in self.ranks.values()), fact.ward)
        kept.durable = max(kept.durable, fact.durable)
