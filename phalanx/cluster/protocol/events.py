"""Everything that the core is told. An event is stored before its commands go out.

Facts come from agents and detectors, orders from people, ticks from the shell when the deadline
that the core asked for has come. Nodes and jobs are named by number. What an agent says of one node
or one worker is an event as it is: such facts stand in ``messages``.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from phalanx.cluster.detectors.straggler import SlowPart
from phalanx.cluster.job_relations import After
from phalanx.cluster.jobs.job import JobSpec, SpecChange
from phalanx.cluster.node import Node
from phalanx.cluster.pipelines.events import TaskResult
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.messages import (
    CheckResult,
    DeviceError,
    FlushWanted,
    Inventory,
    KeeperSilent,
    NodeNotice,
    NodeSeen,
    ProgramEnded,
    RestoreFailed,
    StepsPrinted,
    WorkerExited,
)


class Body(Struct, frozen=True, kw_only=True, tag_field="kind", gc=False, omit_defaults=True):
    """Base of all event bodies."""


# Orders of people and of other programs. ``request`` comes back in the answer.


class Submit(Body, frozen=True, tag=True):
    """A job for the queue."""

    spec: JobSpec
    request: str = ""


class Step(Struct, frozen=True, kw_only=True):
    """One job of a workflow; ``after``: what must become of another one, and its name."""

    name: str
    spec: JobSpec
    after: tuple[tuple[After, str], ...] = ()


class SubmitWorkflow(Body, frozen=True, tag=True):
    """Jobs that depend on each other by name; all are accepted, or none."""

    steps: tuple[Step, ...]
    request: str = ""


class SubmitPipeline(Body, frozen=True, tag=True):
    """A run of a pipeline; files that no step makes were hashed by whoever asks."""

    user: str
    team: str
    folder: str  # that holds all of it, shared by all nodes
    pipeline: dict[str, Any]  # the table of its file
    inputs: dict[str, str]  # hashes of raw files by pattern, and of job files
    version: str  # of Phalanx there
    parallel: int
    # Jobs by task; what they run has places for what is known when they start. Each tells the
    # result of its step, which it does itself or takes over from the ranks.
    work: dict[str, JobSpec]
    ranks: dict[str, JobSpec] = {}  # of a trainer or a program: they work before
    results: dict[str, TaskResult] = {}  # by key: what earlier runs made, and is still there
    manifest: JobSpec | None = None  # writes down what the run did, once it has ended
    request: str = ""


class AnswerPipeline(Body, frozen=True, tag=True):
    """A person decides what a step asks."""

    pipeline: int
    task: str
    approved: bool
    by: str = ""
    request: str = ""
    why: str = ""  # in that person's words


class CancelPipeline(Body, frozen=True, tag=True):
    """A person ends a run."""

    pipeline: int
    by: str = ""
    request: str = ""
    why: str = ""  # in that person's words


class Cancel(Body, frozen=True, tag=True):
    """End a job."""

    job: int
    request: str = ""
    array: bool = False  # all of its array that have not ended


class Requeue(Body, frozen=True, tag=True):
    """Stop a running job with a snapshot and put it back into the queue; ``hold``: beside it."""

    job: int
    hold: bool = False
    request: str = ""
    operator: bool = True  # who asks is one: then only one lets it in again


class Hold(Body, frozen=True, tag=True):
    """Keep a pending job out of the queue (or let it in again)."""

    job: int
    held: bool = True
    request: str = ""
    operator: bool = True  # who asks is one: then only one lets it in again
    array: bool = False  # all of its array that wait


class Scale(Body, frozen=True, tag=True):
    """A new number of replicas for an elastic job."""

    job: int
    replicas: int
    request: str = ""


class Replan(Body, frozen=True, tag=True):
    """Another mapping for a job: it saves its state at a step boundary and goes on from there."""

    job: int
    change: SpecChange
    request: str = ""


class RaiseBudget(Body, frozen=True, tag=True):
    """More budget for a job, or leave to go on above it."""

    job: int
    budget_gpu_seconds: int
    forced: bool = False
    request: str = ""


class DrainNode(Body, frozen=True, tag=True):
    """Empty a node by a time (0: as soon as its jobs are safe) and give it no new work."""

    node: int
    deadline_ns: int = 0
    why: str = ""  # in the words of whoever wants it
    request: str = ""


class ReadmitNode(Body, frozen=True, tag=True):
    """Give a drained, quarantined or dead node back to the fleet; it is tested first."""

    node: int
    tested: bool = False  # a person vouches for it
    request: str = ""
    why: str = ""  # in the words of whoever wants it


class QuarantineNode(Body, frozen=True, tag=True):
    """Keep a node away from work until it passes a test."""

    node: int
    request: str = ""


class SetQuota(Body, frozen=True, tag=True):
    """GPUs that a team owns; it may borrow up to ``ceiling`` (0: no limit)."""

    team: str
    gpus: int
    ceiling: int = 0
    weight: int = 1  # of its fair share
    request: str = ""


class SetReservation(Body, frozen=True, tag=True):
    """Nodes kept for some teams, or (without teams) empty for maintenance, for a time."""

    name: str
    start_ns: int
    end_ns: int  # 0: the reservation is removed
    nodes: tuple[int, ...] = ()
    gpus: int = 0  # or any nodes with this many GPUs in all
    teams: tuple[str, ...] = ()
    request: str = ""


class Answer(Body, frozen=True, tag=True):
    """A person's answer to an ``Ask``."""

    question: int
    approve: bool
    by: str = ""
    why: str = ""  # in that person's words


class Defragment(Body, frozen=True, tag=True):
    """Ask which moves would make room for large gangs."""

    request: str = ""


# Facts about nodes.


class NodeJoined(Body, frozen=True, tag=True):
    """An agent registered: a new node, or a known one again."""

    node: Node
    inventory: Inventory
    healthy: bool = True  # it passed its check at start


class NodeDescribed(Body, frozen=True, tag=True):
    """A node that is connected is not, or not where, it was known to be."""

    node: int
    described: Node


class NodeSilent(Body, frozen=True, tag=True):
    """Liveness lost a node; ``connection_lost``: its connection broke rather than went quiet."""

    node: int
    connection_lost: bool = False
    broke_ns: int = -1  # when it did; -1: nobody saw it
    heard_ns: int = -1  # when the node was last heard; -1: it is not known


class NodeRepaired(Body, frozen=True, tag=True):
    """Somebody repaired a node; it is tested and comes back."""

    node: int


# Facts about gangs.


class GangJoined(Body, frozen=True, tag=True):
    """Every slot has joined a generation.

    ``step``: the newest of which every slot of the last generation has a copy here, its own or its
    buddy's; -1: there is none. ``empty``: nodes that hold nothing of it.
    """

    job: int
    generation: int
    step: int
    empty: tuple[int, ...] = ()
    durable: int = 0  # newest checkpoint that they have heard of, perhaps before it was reported
    newest: int = -1  # that each of those holds who hold anything; perhaps not all the same


class GangStopped(Body, frozen=True, tag=True):
    """How far a generation came that was aborted or stopped, by those of its nodes that answer.

    ``committed``: of no node that answered less than this is safe.
    """

    job: int
    generation: int
    step: int
    committed: int
    durable: int = 0


class GangReady(Body, frozen=True, tag=True):
    """Every rank has restored ``step`` and can go on; ``skipped``: without these samples."""

    job: int
    generation: int
    step: int
    skipped: tuple[int, int] = (0, 0)


class GangStuck(Body, frozen=True, tag=True):
    """Some slots have not answered within the derived deadline."""

    job: int
    generation: int
    phase: Literal["join", "restore", "drain", "abort"]
    nodes: tuple[int, ...]


class GangDrained(Body, frozen=True, tag=True):
    """The gang has stopped, with ``step`` safe."""

    job: int
    generation: int
    step: int
    durable: bool = True


class Progress(Body, frozen=True, tag=True):
    """How far a gang is. Times are of the whole gang since its last report, as measured."""

    job: int
    generation: int
    step: int
    committed: int
    durable: int
    at_ns: int  # when ``step`` was completed
    data_wait_ns: int = 0
    checkpoint_ns: int = 0
    flush_ns: int = 0  # until the newest durable checkpoint was written; 0: none was since
    straggler_ns: int = 0  # lost to ranks that were slower than the median
    busy_ns: int = 0  # inside steps; 0: not measured, all of it


class JobFinished(Body, frozen=True, tag=True):
    """The workers have done all steps and left."""

    job: int
    generation: int
    step: int
    not_archived: str = ""  # checkpoints that the archive lacks, and why
    result: str = ""  # what a program left as that


# What detectors found in the records of a gang.


class NoProgress(Body, frozen=True, tag=True):
    """No step, or no activity, within a limit. ``nodes``: who is behind, if the evidence says."""

    job: int
    generation: int
    step: int
    nodes: tuple[int, ...] = ()
    detail: str = ""
    limit: Literal["first_step", "step", "phase", "idle"] = "step"  # that was passed
    phase: str = ""  # what it does between two steps, where it said so
    limit_ns: int = 0
    setting: str = ""  # the key of the policy or of the job that it follows from
    quiet_ns: int = 0  # how long there was no step, or no activity
    # What its processes did in that time, where agents measured it; -1: nobody did.
    cpu_ns: int = -1
    output_bytes: int = -1
    gpu_ppm: int = -1  # of its busiest GPU


class SlowRank(Body, frozen=True, tag=True):
    """A rank holds the others up."""

    job: int
    generation: int
    node: int
    rank: int
    part: SlowPart
    slowdown_ppm: int  # above the median of its peers
    step_ns: int = 0  # that the gang takes with it; 0: nobody said


class ThroughputRegression(Body, frozen=True, tag=True):
    """Steps take longer than they did."""

    job: int
    generation: int
    step: int
    slowdown_ppm: int


class DataStarved(Body, frozen=True, tag=True):
    """A gang waits for data."""

    job: int
    generation: int
    share_ppm: int  # of the time waits for data


class LossSpike(Body, frozen=True, tag=True):
    """The loss jumped, or is no number."""

    job: int
    generation: int
    step: int
    not_finite: bool = False


class Corruption(Body, frozen=True, tag=True):
    """Replicas, or ranks that computed the same gradients, disagree, or tell of a step made again.

    ``nodes``: the culprits, where a vote named them. ``claims``: where it could not, what each
    holder of the block came to. The job goes back and makes the step again, then with somebody
    else in the place of one of them, until all claims together name the culprit.
    """

    job: int
    generation: int
    step: int  # first step at which fingerprints differed
    clean_step: int  # last step at which all agreed
    nodes: tuple[int, ...] = ()
    claims: tuple[tuple[int, int], ...] = ()  # (node, fingerprint)
    block: int = 0  # lowest rank that holds it: claims about other weights are another matter


class StorageSlow(Body, frozen=True, tag=True):
    """Remote storage gives this many bytes a second now (0: nothing; -1: what the policy says)."""

    bytes_per_second: int


# The controller's own.


class ControllerStarted(Body, frozen=True, tag=True):
    """A controller took over; commands carry its epoch from here on."""

    epoch: int
    policy: Policy | None = None  # the one that holds from here on; None: as before


class Tick(Body, frozen=True, tag=True):
    """A deadline has come."""


JobOrder = Submit | SubmitWorkflow | Cancel | Requeue | Hold | Scale | Replan | RaiseBudget
PipelineOrder = SubmitPipeline | AnswerPipeline | CancelPipeline
NodeOrder = DrainNode | ReadmitNode | QuarantineNode
SiteOrder = SetQuota | SetReservation | Answer | Defragment
EventBody = (
    JobOrder
    | PipelineOrder
    | NodeOrder
    | SiteOrder
    | NodeJoined
    | NodeDescribed
    | NodeSilent
    | NodeSeen
    | NodeNotice
    | DeviceError
    | CheckResult
    | NodeRepaired
    | WorkerExited
    | StepsPrinted
    | ProgramEnded
    | GangJoined
    | GangStopped
    | GangReady
    | GangStuck
    | GangDrained
    | RestoreFailed
    | Progress
    | JobFinished
    | NoProgress
    | SlowRank
    | ThroughputRegression
    | DataStarved
    | LossSpike
    | Corruption
    | KeeperSilent
    | FlushWanted
    | StorageSlow
    | ControllerStarted
    | Tick
)


class Event(Struct, frozen=True):
    """One entry of the log. Sequences have no gap; time never runs backwards in the core."""

    sequence: int
    time_ns: int
    body: EventBody
