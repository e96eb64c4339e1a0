"""Messages of the gang's protocol: agents to the controller, workers to their agent and back.

The controller's commands are in ``commands``. Each message carries the generation it speaks of; a
lower one loses everywhere.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Source = Literal["none", "peer", "disk", "remote"]
KeeperState = Literal["silent", "answers", "replaced"]


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


# Agent to controller.


class Heartbeat(Message, frozen=True, tag=True):
    node: int
    incarnation: int


class Hello(Message, frozen=True, tag=True):
    """First message of a connection."""

    node: int
    inventory: Inventory


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
    committed: int  # least committed step of the ranks here; -1: nothing is kept here
    previous: int = -1  # the one before it, still kept
    oldest: int = -1  # the one before that: a rank may lack its newest and the one before
    ward: int = -1  # newest committed step of the slot that this node is the buddy of
    ward_previous: int = -1
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


class FlushAsked(Message, frozen=True, tag=True):
    """The workers want to write a durable checkpoint."""

    node: int
    job: int
    generation: int


class Finished(Message, frozen=True, tag=True):
    node: int
    job: int
    generation: int
    step: int


class Exited(Message, frozen=True, tag=True):
    """A worker died."""

    node: int
    job: int
    generation: int
    rank: int
    cause: str
    step: int
    detail: str = ""


class Refused(Message, frozen=True, tag=True):
    """A restore source was not usable."""

    node: int
    job: int
    generation: int
    source: Source
    step: int
    detail: str = ""
    there: tuple[int, ...] | None = None  # durable checkpoints up to this step; None: not looked


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
    straggler_ns: int = 0
    busy_ns: int = 0


class Activity(Message, frozen=True, tag=True):
    """What the processes of a program have done on a node so far. Not logged, like heartbeats."""

    node: int
    job: int
    generation: int
    cpu_ns: int  # of the processes that live and of their children that are gone
    output_bytes: int
    gpu_ppm: int = -1  # of its busiest GPU, lately; -1: nobody can tell
    reports_steps: bool = False  # it has called ``phalanx.worker()``


class Busy(Message, frozen=True, tag=True):
    """The workers do something that is no step: a validation, a checkpoint. Not logged."""

    node: int
    job: int
    generation: int
    step: int  # after which it is done: reports of that one may still be under way
    what: str


class Differed(Message, frozen=True, tag=True):
    """Replicas of a block of weights disagree, or were asked about this step.

    ``copies``: (rank, fingerprint) of each.
    """

    node: int
    job: int
    generation: int
    step: int
    clean_step: int
    world: int
    copies: tuple[tuple[int, int], ...]
    changed: tuple[int, ...] = ()  # ranks whose weights changed between two updates


class Trouble(Message, frozen=True, tag=True):
    """A device error that the agent saw."""

    node: int
    cause: str
    gpu: int = -1
    rail: int = -1
    job: int = 0
    detail: str = ""


class Noticed(Message, frozen=True, tag=True):
    """The site will take the node away."""

    node: int
    deadline_ns: int
    cause: str = "host_maintenance"


class Checked(Message, frozen=True, tag=True):
    node: int
    check: str
    passed: bool
    command: int = 0
    cause: str = ""
    detail: str = ""


class KeeperChanged(Message, frozen=True, tag=True):
    """The keeper of a job on a node does not answer, or answers again, or was replaced."""

    node: int
    job: int
    state: KeeperState
    seconds: int


class Seen(Message, frozen=True, tag=True):
    """The answer to ``LookAt``. ``ranks``: how far each has come; -1: it does not answer."""

    node: int
    job: int
    generation: int
    ranks: dict[int, int]
    folder: str  # on the node: stacks and flight recorders


AgentMessage = (
    Heartbeat
    | Hello
    | Applied
    | Joined
    | LastSteps
    | Ready
    | Drained
    | FlushAsked
    | Finished
    | Exited
    | Refused
    | Steps
    | Activity
    | Busy
    | Differed
    | Trouble
    | Noticed
    | Checked
    | KeeperChanged
    | Seen
)


# Controller to agent, beside its commands.


class LookAt(Message, frozen=True, tag=True):
    """A gang makes no steps: save what its ranks are doing, and say how far each has come."""

    job: int
    generation: int


# Workers, keeper and devices to their agent.


class WorkerUp(Message, frozen=True, tag=True):
    """A worker process is there and has taken its rank."""

    job: int
    generation: int
    rank: int


class WorkerLeft(Message, frozen=True, tag=True):
    """A worker process is gone. ``cause`` "": it had done all steps, or was asked to leave."""

    job: int
    generation: int
    rank: int
    step: int
    cause: str = ""
    detail: str = ""
    ends: bool = False  # said by the process itself, which takes part in no later generation


class Restored(Message, frozen=True, tag=True):
    """A worker has loaded a step, sealed it and waits; or ``refused`` says why it could not."""

    job: int
    generation: int
    rank: int
    step: int
    source: Source = "none"
    refused: str = ""
    there: tuple[int, ...] | None = None  # with it: durable checkpoints up to this step
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
    straggler_ns: int = 0
    busy_ns: int = 0


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
    committed: int
    previous: int = -1
    oldest: int = -1
    ward: int = -1
    ward_previous: int = -1


class KeeperChange(Message, frozen=True, tag=True):
    """A keeper has not answered its agent for some time, or answers again, or was replaced."""

    job: int
    state: KeeperState
    seconds: int  # of silence


class FlushAsk(Message, frozen=True, tag=True):
    """The workers want to write a durable checkpoint."""

    job: int
    generation: int


class Differs(Message, frozen=True, tag=True):
    """Fingerprints of replicas, where they differ or were asked for; all of them say so."""

    job: int
    generation: int
    rank: int
    step: int
    clean_step: int
    world: int
    copies: tuple[tuple[int, int], ...]
    changed: tuple[int, ...] = ()  # ranks whose weights changed between two updates


class WorkerBusy(Message, frozen=True, tag=True):
    """A rank begins something that is no step and may take long; its next step ends it."""

    job: int
    generation: int
    rank: int
    step: int  # after which it is done
    what: str


class WardSealed(Message, frozen=True, tag=True):
    """The keeper holds a neighbour's snapshot."""

    job: int
    generation: int
    step: int


class Fault(Message, frozen=True, tag=True):
    """A device error on this node."""

    cause: str
    gpu: int = -1
    rail: int = -1
    job: int = 0
    detail: str = ""


class SiteNotice(Message, frozen=True, tag=True):
    """The site will take this node away (host maintenance, spot reclaim)."""

    deadline_ns: int
    cause: str = "host_maintenance"


class CheckDone(Message, frozen=True, tag=True):
    check: str
    passed: bool
    command: int = 0
    cause: str = ""
    detail: str = ""


class Connected(Message, frozen=True, tag=True):
    """There is a connection to a controller."""


class Disconnected(Message, frozen=True, tag=True):
    """The connection to the controller is gone."""


class Wake(Message, frozen=True, tag=True):
    """A deadline that the machine asked for has come."""


LocalFact = (
    WorkerUp
    | WorkerLeft
    | Restored
    | Sealed
    | WorkerFound
    | KeeperFound
    | KeeperChange
    | FlushAsk
    | Differs
    | WorkerBusy
    | WardSealed
    | Fault
    | SiteNotice
    | CheckDone
    | Connected
    | Disconnected
    | Wake
)


# Agent to its workers.


class WorkerForm(Message, frozen=True, tag=True):
    """Take these ranks in this generation; the agent starts processes for those it lacks."""

    job: int
    generation: int
    ranks: tuple[int, ...]
    world: int
    store: int  # node that hosts the rendezvous
    gpus: int = 0  # mask; 0: all
    warm: bool = False  # only keep processes ready: this node is a spare
    micro_batches: tuple[int, ...] = ()
    payload: str = ""


class WorkerRestore(Message, frozen=True, tag=True):
    job: int
    generation: int
    step: int
    source: Source
    skipped: tuple[tuple[int, int], ...] = ()  # samples [first, past) that were left out before
    skip_step: int = 0  # the batch of this step is left out too; 0: none
    told: tuple[int, int] = (0, 0)  # at this step, replicas of this block tell what they have
    saves: bool = False  # then write it and leave, without a step


class WorkerGo(Message, frozen=True, tag=True):
    """Everybody has restored: make steps."""

    job: int
    generation: int


class WorkerAbort(Message, frozen=True, tag=True):
    """Leave the collective; keep the process and the snapshot."""

    job: int
    generation: int


class WorkerDrain(Message, frozen=True, tag=True):
    """Finish the step, make a durable checkpoint, leave before the deadline."""

    job: int
    generation: int
    deadline_ns: int


class WorkerStop(Message, frozen=True, tag=True):
    """End now; nothing of the job stays on the node."""

    job: int
    generation: int
    keep_snapshots: bool = False


class RunCheck(Message, frozen=True, tag=True):
    """Run a check of this node; ``command`` comes back in ``CheckDone``."""

    check: str
    command: int


class WorkerRebalance(Message, frozen=True, tag=True):
    """New numbers of micro-batches by replica, from the next step on."""

    job: int
    generation: int
    micro_batches: tuple[int, ...]


class WorkerFlush(Message, frozen=True, tag=True):
    """The job may write its durable checkpoint until then, at most this fast."""

    job: int
    generation: int
    bytes_per_second: int
    until_ns: int


AgentAction = (
    WorkerForm
    | WorkerRestore
    | WorkerGo
    | WorkerAbort
    | WorkerDrain
    | WorkerStop
    | RunCheck
    | WorkerRebalance
    | WorkerFlush
)
