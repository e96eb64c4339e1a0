"""Messages of the gang's protocol: agents to the controller, workers to their agent.

A fact of one worker or one node is the same struct from its source to the log; orders are in
``commands``. Each message carries the generation it speaks of; a lower one loses everywhere.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, structs

from phalanx.cluster.protocol.keeper_state import KeptSteps

Source = Literal["none", "peer", "disk", "remote"]  # of what a gang restores
KeeperChange = Literal["silent", "answers", "replaced"]
THIS_NODE = -1  # of a fact that has yet to reach its agent's machine, which fills the number in


class Message(Struct, frozen=True, kw_only=True, tag_field="kind", gc=False, omit_defaults=True):
    """Base of all messages."""


class Holding(Struct, frozen=True, gc=False):
    """What an agent has of one job."""

    job: int
    generation: int
    phase: Literal["joined", "ready", "running", "drained", "aborted"]
    step: int
    committed: int


class Inventory(Struct, frozen=True):
    """What runs on a node, reported on every (re)connection."""

    incarnation: int = 0  # rises when the agent starts anew
    jobs: tuple[Holding, ...] = ()
    snapshots: tuple[tuple[int, int], ...] = ()  # (job, step) in the keeper's memory


# Facts that are logged as they are.


class NodeSeen(Message, frozen=True, tag=True):
    """A node speaks (again), with what still runs there: the first message of each connection."""

    node: int
    inventory: Inventory


class NodeNotice(Message, frozen=True, tag=True):
    """The site will take a node away (host maintenance, spot reclaim)."""

    node: int
    deadline_ns: int
    cause: str = "host_maintenance"


class DeviceError(Message, frozen=True, tag=True):
    """Something on a node reported an error. ``cause``: a key of the table of causes."""

    node: int
    cause: str
    gpu: int = -1  # -1: not one GPU's
    rail: int = -1
    job: int = 0
    detail: str = ""


class CheckResult(Message, frozen=True, tag=True):
    """A check that the core asked for, or one that the agent ran by itself."""

    node: int
    check: str
    passed: bool
    command: int = 0  # sequence of the command that asked for it
    cause: str = ""
    detail: str = ""


class KeeperSilent(Message, frozen=True, tag=True):
    """A job's keeper on a node does not answer (training goes on without snapshots of its ranks),
    answers again, or was replaced, which takes the gang back to its last snapshot.
    """

    job: int
    node: int
    state: KeeperChange
    seconds: int  # of silence


class WorkerExited(Message, frozen=True, tag=True):
    """A worker is gone. Of clean ends only its agent is told, which makes one answer of them."""

    job: int
    generation: int
    node: int
    rank: int
    cause: str  # a key of the table of causes; "": it had done all steps, or was asked to leave
    step: int = -1
    detail: str = ""
    result: str = ""  # of a program that ended well: what it left as that


class RestoreFailed(Message, frozen=True, tag=True):
    """A source was refused (corrupt, gone); the next one is used.

    ``there``: steps of durable checkpoints up to this one that exist; None: nobody looked.
    """

    job: int
    generation: int
    node: int
    source: Source
    step: int
    detail: str = ""
    there: tuple[int, ...] | None = None


class ProgramEnded(Message, frozen=True, tag=True):
    """No process of a program of this generation, or an earlier one, is left on a node."""

    node: int
    job: int
    generation: int


class FlushWanted(Message, frozen=True, tag=True):
    """A gang wants to write a durable checkpoint."""

    job: int
    generation: int


# Agent to controller.


class Heartbeat(Message, frozen=True, tag=True):
    node: int
    incarnation: int


class Applied(Message, frozen=True, tag=True):
    """A command has been carried out (or was known already): stop sending it."""

    node: int
    sequence: int
    index: int


class Joined(Message, frozen=True, tag=True):
    """The node's workers of a generation are up and can restore."""

    node: int
    job: int
    generation: int
    kept: KeptSteps = KeptSteps()
    reached: int = 0  # highest step completed here, in any generation
    reached_ns: int = 0
    durable: int = 0  # newest checkpoint on remote storage that the node has heard of


class LastSteps(Message, frozen=True, tag=True):
    """What a node kept of a generation that was aborted or stopped: its last word about it."""

    node: int
    job: int
    generation: int
    committed: int  # least committed step of the ranks here
    reached: int  # highest step completed here
    durable: int = 0  # newest checkpoint on remote storage that the node has heard of


class Ready(Message, frozen=True, tag=True):
    """The node's ranks have restored a step. ``skipped``: samples left out from here on."""

    node: int
    job: int
    generation: int
    step: int
    skipped: tuple[int, int] = (0, 0)


class Drained(Message, frozen=True, tag=True):
    node: int
    job: int
    generation: int
    step: int
    durable: bool = True


class Finished(Message, frozen=True, tag=True):
    node: int
    job: int
    generation: int
    step: int
    not_archived: str = ""  # checkpoints that the archive lacks, and why
    result: str = ""  # what a program left as that


class Steps(Message, frozen=True, tag=True):
    """Progress of the ranks on a node since the last such message."""

    node: int
    job: int
    generation: int
    step: int
    committed: int
    durable: int
    at_ns: int
    data_wait_ns: int = 0
    checkpoint_ns: int = 0
    flush_ns: int = 0  # until the newest durable checkpoint was written; 0: none was since

    def added_to(self, before: Steps | None) -> Steps:
        """This report with what was measured before it, which nobody has been told."""
        if before is None:
            return self
        return structs.replace(
            self,
            durable=max(before.durable, self.durable),
            data_wait_ns=before.data_wait_ns + self.data_wait_ns,
            checkpoint_ns=before.checkpoint_ns + self.checkpoint_ns,
            flush_ns=max(before.flush_ns, self.flush_ns),
        )


class Activity(Message, frozen=True, tag=True):
    """What the processes of a program have done on a node so far. Not logged, like heartbeats."""

    node: int
    job: int
    generation: int
    cpu_ns: int  # of the processes that live and of their children that are gone
    output_bytes: int
    gpu_ppm: int = -1  # of its busiest GPU, lately; -1: nobody can tell
    reports_steps: bool = False  # it has called ``phalanx.worker()``


class StepsPrinted(Message, frozen=True, tag=True):
    """A program that reports nothing prints that a step is complete. Nobody is judged by it."""

    node: int
    job: int
    generation: int
    step: int
    at_ns: int
    steps: int = 0  # that the run has in all; 0: it does not say


class Busy(Message, frozen=True, tag=True):
    """A rank begins something that is no step: a validation, a checkpoint. Not logged."""

    node: int
    job: int
    generation: int
    step: int  # after which it is done: reports of that one may still be under way
    what: str


class ReplicasDiffer(Message, frozen=True, tag=True):
    """Ranks disagree on weights or gradients that must be the same, or were asked; all say so."""

    node: int
    job: int
    generation: int
    step: int
    clean_step: int
    world: int
    copies: tuple[tuple[int, int], ...]  # (rank, fingerprint) of each
    changed: tuple[int, ...] = ()  # ranks whose weights changed between updates, or are outvoted


class Seen(Message, frozen=True, tag=True):
    """The answer to ``InspectGang``. ``ranks``: how far each has come; -1: it does not answer."""

    node: int
    job: int
    generation: int
    ranks: dict[int, int]
    folder: str  # on the node: stacks and flight recorders


AgentMessage = (
    Heartbeat
    | NodeSeen
    | Applied
    | Joined
    | LastSteps
    | Ready
    | Drained
    | FlushWanted
    | Finished
    | WorkerExited
    | RestoreFailed
    | Steps
    | StepsPrinted
    | ProgramEnded
    | Activity
    | Busy
    | ReplicasDiffer
    | DeviceError
    | NodeNotice
    | CheckResult
    | KeeperSilent
    | Seen
)


# Controller to agent, beside its commands.


class InspectGang(Message, frozen=True, tag=True):
    """A gang makes no steps: save what its ranks are doing, and say how far each has come.

    ``folder``: where ranks write their stacks and flight recorders; their agent fills it in.
    """

    job: int
    generation: int
    folder: str = ""


# Workers, keeper and devices to their agent.


class WorkerUp(Message, frozen=True, tag=True):
    """A worker process is there and has taken its rank."""

    job: int
    generation: int
    rank: int


class Restored(Message, frozen=True, tag=True):
    """A worker has loaded a step, sealed it and waits."""

    job: int
    generation: int
    rank: int
    step: int
    source: Source = "none"
    skipped: tuple[int, int] = (0, 0)  # samples [first, past) of the batch that was to be left out


class Sealed(Message, frozen=True, tag=True):
    """A rank completed a step; ``acknowledged``: its snapshot is sealed and its buddy has it."""

    job: int
    generation: int
    rank: int
    step: int
    at_ns: int
    acknowledged: bool = True
    durable: int = 0  # newest durable checkpoint that the rank knows of
    data_wait_ns: int = 0
    checkpoint_ns: int = 0
    flush_ns: int = 0  # until the rank's part of that checkpoint was written; 0: no new one


class WorkerFound(Message, frozen=True, tag=True):
    """A new agent found a worker that outlived the one before it."""

    job: int
    generation: int
    rank: int
    step: int
    committed: int
    durable: int = 0
    ward: int = -1
    running: bool = True  # False: it has restored ``step`` and waits


class KeeperFound(Message, frozen=True, tag=True):
    """A new agent found a keeper with snapshots that the one before it had known of."""

    job: int
    kept_generation: int
    kept: KeptSteps


class WardSealed(Message, frozen=True, tag=True):
    """The keeper holds a neighbour's snapshot."""

    job: int
    generation: int
    step: int


class Connected(Message, frozen=True, tag=True):
    """There is a connection to a controller."""


class Disconnected(Message, frozen=True, tag=True):
    """The connection to the controller is gone."""


class Wake(Message, frozen=True, tag=True):
    """A deadline that the machine asked for has come."""


LocalFact = (
    WorkerUp
    | WorkerExited
    | ProgramEnded
    | Restored
    | Sealed
    | WorkerFound
    | KeeperFound
    | KeeperSilent
    | RestoreFailed
    | FlushWanted
    | ReplicasDiffer
    | Busy
    | WardSealed
    | DeviceError
    | NodeNotice
    | CheckResult
    | Connected
    | Disconnected
    | Wake
)
