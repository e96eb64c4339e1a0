"""Everything that the core orders. Delivered at least once; agents drop what they know already.

An order to a node or its workers is the same struct wherever it passes, down to the rank.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from phalanx.cluster.protocol.messages import Source
from phalanx.cluster.reasons import Reason

Level = Literal["info", "warning", "error"]


class Order(Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=True):
    """Base of all command bodies."""

    reason: Reason


# To agents.


class ArrayMember(Struct, frozen=True, omit_defaults=True):
    """Which member of an array a job is, as its program finds it."""

    job: int  # the first of them
    index: int
    count: int

    @property
    def environment(self) -> dict[str, str]:
        """The same as variables."""
        return {
            "PHALANX_ARRAY_JOB": str(self.job),
            "PHALANX_ARRAY_INDEX": str(self.index),
            "PHALANX_ARRAY_COUNT": str(self.count),
        }


class Form(Order, frozen=True, tag=True):
    """Join a new generation of a gang; whatever ran of an older one is aborted first.

    Survivors keep their processes and snapshots; the others start workers.
    """

    job: int
    generation: int
    nodes: tuple[int, ...]  # by slot: the whole gang, in rank order
    gpus: tuple[int, ...]  # mask by slot; (): whole nodes
    spares: tuple[int, ...] = ()  # keep warm workers
    replicas: int = 1
    slot_gpus: int = 0
    world: int = 0  # ranks; the last slot may have fewer than GPUs. 0: all slots are full
    store: int = 0  # node that hosts the rendezvous
    kept_generation: int = 0  # the last one that ran: older snapshots are of a branch given up
    kept_nodes: tuple[int, ...] = ()  # by slot of that one; (): the same as ``nodes``
    kept_shift: int = 0  # its ``buddy_shift``
    kept_backup: int = -1  # its ``backup``
    buddy_shift: int = 0  # slot i's snapshots are kept by slot (i + shift) % slots; 0: by nobody
    backup: int = -1  # the spare that keeps those of a gang on one node; -1: none does
    deadline_ns: int = 0  # until all have joined
    micro_batches: tuple[int, ...] = ()  # by replica, where they are unequal
    asks_leave: bool = False  # before it writes a durable checkpoint
    payload: str = ""
    user: str = ""  # whom it runs as, where the agent is root
    array: ArrayMember | None = None  # which member of an array it is

    @property
    def world_size(self) -> int:
        """Ranks of the whole gang."""
        return self.world or (self.slot_gpus or 1) * len(self.nodes)

    def ranks_on(self, node: int) -> tuple[int, ...]:
        """Ranks of a node of the gang; a spare has none."""
        if node in self.spares:
            return ()
        first = self.nodes.index(node) * (self.slot_gpus or 1)
        return tuple(range(first, min(first + (self.slot_gpus or 1), self.world_size)))

    def gpus_on(self, node: int) -> int:
        """Mask of the GPUs that a node of the gang gives; 0: all."""
        if node in self.spares or not self.gpus:
            return 0
        return self.gpus[self.nodes.index(node)]


class Restore(Order, frozen=True, tag=True):
    """Everybody has joined: load ``step``. Survivors use their own snapshot of it."""

    job: int
    generation: int
    step: int
    source: Source  # for those without their own
    skipped: tuple[tuple[int, int], ...] = ()  # samples [first, past) that were left out before
    skip_step: int = 0  # the batch of this step is left out too; 0: none
    told: tuple[int, int] = (0, 0)  # at this step, replicas of this block tell what they have
    saves: bool = False  # then write it and leave, without a step
    deadline_ns: int = 0


class Go(Order, frozen=True, tag=True):
    """Everybody is ready, and the log knows it: make steps.

    Until then no rank makes one, so no generation runs that the core does not know of, and the
    snapshots of the last one stay the truth.
    """

    job: int
    generation: int


class Abort(Order, frozen=True, tag=True):
    """Leave the collective of a generation, keep processes and snapshots."""

    job: int
    generation: int
    answer_ns: int = 0  # peers miss somebody: who has not confirmed by then is; 0: nobody is missed


class Drain(Order, frozen=True, tag=True):
    """Finish the step, make it durable, leave before the deadline."""

    job: int
    generation: int
    deadline_ns: int


class Stop(Order, frozen=True, tag=True):
    """End a job on a node at once; below or at this generation nothing of it may run."""

    job: int
    generation: int
    keep_snapshots: bool = False  # the others still need what the keeper holds
    confirm: bool = False  # its end is waited for: ``ProgramEnded``


class Check(Order, frozen=True, tag=True):
    """Run a check on a node and report its result."""

    check: Literal["quick", "full"]
    node: int


class Rebalance(Order, frozen=True, tag=True):
    """New numbers of micro-batches by replica, from the next step on."""

    job: int
    generation: int
    micro_batches: tuple[int, ...]


class FailureRate(Order, frozen=True, tag=True):
    """How often the fleet fails: the interval between checkpoints follows it from the next step on.

    Of nodes with eight GPUs, whatever the fleet's have.
    """

    job: int
    generation: int
    per_million_node_days: int
    failures: int  # that were seen
    node_days: int  # in which they were


class Flush(Order, frozen=True, tag=True):
    """A gang may write its durable checkpoint now, at most this fast."""

    job: int
    generation: int
    bytes_per_second: int
    until_ns: int


# To the shell, for people.


class Accept(Order, frozen=True, tag=True):
    """An order of somebody is taken."""

    request: str
    job: int = 0


class Refuse(Order, frozen=True, tag=True):
    """An order of somebody is not taken; the reason says why."""

    request: str
    job: int = 0


class Ask(Order, frozen=True, tag=True):
    """The core will not go on with something until a person answers."""

    question: int
    nodes: tuple[int, ...] = ()
    job: int = 0


class Notify(Order, frozen=True, tag=True):
    """Something that a person wants to know: a job ended, a budget is nearly used."""

    job: int = 0
    node: int = -1
    level: Level = "info"


class Proposal(Order, frozen=True, tag=True):
    """The answer to Defragment: (job, from node, to node)."""

    request: str
    moves: tuple[tuple[int, int, int], ...]


# Handed on to workers as they are.
WorkerOrder = Restore | Go | Abort | Drain | Rebalance | FailureRate | Flush
CommandBody = (
    Form
    | Restore
    | Go
    | Abort
    | Drain
    | Stop
    | Check
    | Rebalance
    | FailureRate
    | Flush
    | Accept
    | Refuse
    | Ask
    | Notify
    | Proposal
)


class Command(Struct, frozen=True):
    """(sequence, index) is its id; ``target``: nodes it goes to, () for the shell itself."""

    sequence: int
    index: int
    controller_epoch: int
    target: tuple[int, ...]
    body: CommandBody


# What an agent's machine has done on its node; a whole command: a check, whose result names it.
AgentAction = Form | Stop | WorkerOrder | Command


def job_of(body: object) -> int:
    """The job that an event, a message or a command is about; 0: none."""
    return int(getattr(body, "job", 0) or 0)


def gang_of(command: Command) -> tuple[int, int] | None:
    """The job and the generation that a command is for; None: it is for a node, or for neither."""
    body = command.body
    if isinstance(body, Form | Restore | Abort | Drain | Stop):
        return body.job, body.generation
    return None
