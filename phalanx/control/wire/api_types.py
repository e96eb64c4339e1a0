"""What goes in and out of the HTTP API. The OpenAPI document is made from these."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct, field

from phalanx.cluster.job_relations import After, Array, Dependency, SweepTrial
from phalanx.cluster.jobs.job import GangShape, JobState, JobTimeouts
from phalanx.cluster.ledger.report import Share
from phalanx.cluster.pipelines.events import TaskResult, TaskState
from phalanx.cluster.plan_record import Origin, PlanRecord
from phalanx.control.wire.log_cursor import PLACES
from phalanx.control.wire.payload import Payload
from phalanx.doctor.acceptance.certificate import SignedCertificate
from phalanx.doctor.acceptance.report import MOST_DCGM_LEVEL, MOST_SECONDS, LoadKind
from phalanx.doctor.drift import Difference, Undecided
from phalanx.hardware.probe.description import NodeDescription


class RefusalCode(StrEnum):
    """Codes of refusals that clients act on."""

    BAD_WORK = "bad_work"
    NEEDS_CONFIRMATION = "needs_confirmation"  # see Submission.confirmed
    NO_SUCH_SWEEP = "no_such_sweep"
    NO_SUCH_TRACE = "no_such_trace"
    NOT_RUNNING = "not_running"


Role = Literal["admin", "user", "read", "agent", "join", "login"]  # of a token
JobFilter = Literal[
    "all", "live", "pending", "forming", "running", "draining", "done", "failed", "cancelled"
]
MOST = 1 << 53  # beyond it, JSON numbers lose digits in other languages
RANKS = r"^([0-9]{1,7}(-[0-9]{1,7})?(,[0-9]{1,7}(-[0-9]{1,7})?)*)?$"
WORD = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,127}$"

Number = Annotated[int, Meta(ge=0, le=MOST)]
JobId = Annotated[int, Meta(ge=1, le=MOST)]
Word = Annotated[str, Meta(pattern=WORD)]
Limit = Annotated[int, Meta(ge=1, le=1000)]
Seconds = Annotated[float, Meta(ge=0, le=9e9)]  # since 1970; as nanoseconds they fit 64 bits
Nanoseconds = Annotated[int, Meta(ge=0, le=1 << 62)]  # since 1970


class In(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all bodies and parameters that come in."""


class Out(Struct, frozen=True, kw_only=True):
    """Base of all answers."""


# Parameters in paths and queries.


class JobPath(In, frozen=True):
    job: JobId


class NodePath(In, frozen=True):
    node: Word


class TeamPath(In, frozen=True):
    team: Word


class NamePath(In, frozen=True):
    name: Word


class QuestionPath(In, frozen=True):
    question: JobId


class TokenPath(In, frozen=True):
    token: Word


class JobsQuery(In, frozen=True):
    state: JobFilter = "live"
    after: Number = 0
    limit: Limit = 100
    newest: bool = False  # of too many, those with the highest numbers
    fold: bool = False  # an array is one entry: its first job that matches


class NodesQuery(In, frozen=True):
    state: Literal["all", "healthy", "suspect", "draining", "quarantined", "dead", "spare"] = "all"
    after: Annotated[int, Meta(ge=-1, le=MOST)] = -1
    limit: Annotated[int, Meta(ge=1, le=20_000)] = 1000


class DriftQuery(In, frozen=True):
    node: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@-]{0,128}$")] = ""  # only this one's


class EventsQuery(In, frozen=True):
    after: Annotated[int, Meta(ge=-1, le=MOST)] = -1  # -1: the newest ones
    limit: Limit = 100
    job: Number = 0  # only about this job
    until_ns: Nanoseconds = 0  # only those that had happened then; 0: until now
    decided: bool = False  # only those about which something was decided


class LogsQuery(In, frozen=True):
    rank: Annotated[int, Meta(ge=-1, le=MOST)] = -1  # -1: all ranks of the first node
    ranks: Annotated[str, Meta(pattern=RANKS, max_length=200)] = ""  # several, like 0,4-7
    tail_bytes: Annotated[int, Meta(ge=0, le=16 << 20)] = 65_536
    follow: bool = False
    since_seconds: Annotated[float, Meta(ge=0, le=1e9)] = 0.0  # written in the last; 0: whenever
    grep: Annotated[str, Meta(max_length=200)] = ""  # only lines with this text, large or small
    cursors: bool = False  # lines of JSON, each with the place behind it
    after: Annotated[str, Meta(pattern=PLACES, max_length=20_000)] = ""  # what follows such a place


# Bodies.


Owner = Annotated[str, Meta(pattern=r"^([A-Za-z0-9_][A-Za-z0-9._@-]{0,127})?$")]


class JobRequest(In, frozen=True, omit_defaults=True):
    """What is asked for a job: ``JobSpec`` without what the server writes into it.

    Who may set what is decided in ``job_rights``; ``user`` and ``team`` are the token's, unless an
    administrator submits for somebody else.
    """

    name: str
    user: Owner = ""
    team: Owner = "default"
    project: Owner = ""
    partition: str = ""
    qos: str = "normal"
    priority: int = 0
    gang: GangShape = GangShape()
    constraint: str = ""
    time_limit_ns: int = 0
    time_min_ns: int = 0
    begin_ns: int = 0
    deadline_ns: int = 0
    held: bool = False
    preemptible: bool = False
    retries: int = 3
    after: tuple[Dependency, ...] = ()
    array: Array | None = None
    trial: SweepTrial | None = None
    budget_gpu_seconds: int = 0
    budget_micro_dollars: int = 0  # the server makes GPU time of it, at the policy's price
    forced: bool = False
    spares: int = 0
    requeue_at_limit: bool = False
    timeouts: JobTimeouts = JobTimeouts()
    webhook: Annotated[str, Meta(max_length=1000)] = ""
    mail: Annotated[str, Meta(max_length=200)] = ""


class Submission(In, frozen=True):
    """A job and a description of what it runs; the server makes the agents' order from it."""

    spec: JobRequest
    work: Payload
    confirmed: bool = False  # it may cost more than the policy lets pass without asking


class StepIn(In, frozen=True):
    """One job of a workflow; ``after``: what must become of another one, and its name."""

    name: str
    spec: JobRequest
    work: Payload
    after: tuple[tuple[After, str], ...] = ()


class Workflow(In, frozen=True):
    """Jobs that depend on each other by name; all are accepted, or none."""

    steps: Annotated[tuple[StepIn, ...], Meta(min_length=1, max_length=1000)]
    confirmed: bool = False  # as of a submission


MOST_WHY = 300  # characters of a person's reason


class PipelinePath(In, frozen=True):
    pipeline: JobId


class PipelineQuery(In, frozen=True):
    after: Number = 0  # of its events, those behind so many


class RawInput(In, frozen=True):
    """Files that no step makes, and what they held when the run was asked for."""

    pattern: str
    content: str


class KnownResult(In, frozen=True):
    """What an earlier run made, and is still there."""

    key: str
    result: TaskResult


class TaskJobs(In, frozen=True):
    """The jobs that do a task; ``ranks`` work before ``step`` takes over what they made."""

    task: str
    step: Submission
    ranks: Submission | None = None


class PipelineRequest(In, frozen=True):
    """A run of a pipeline, whose file ``phalanx pipeline run --server`` has read and hashed."""

    pipeline: dict[str, Any]  # the table of its file
    folder: str  # that holds all of it, shared by all nodes
    inputs: Annotated[tuple[RawInput, ...], Meta(max_length=5000)] = ()
    results: Annotated[tuple[KnownResult, ...], Meta(max_length=500)] = ()
    work: Annotated[tuple[TaskJobs, ...], Meta(max_length=500)] = ()
    manifest: Submission | None = None  # the job that writes it; None: whoever looks does
    version: str = ""
    parallel: Annotated[int, Meta(ge=1, le=10_000)] = 1
    confirmed: bool = False  # as of a submission


class TaskDecision(In, frozen=True):
    """A person's answer to a step that asks."""

    task: str
    approve: bool
    why: Annotated[str, Meta(max_length=MOST_WHY)] = ""


class Replicas(In, frozen=True):
    """Another size: one of the numbers."""

    replicas: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    gpus: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    why: Annotated[str, Meta(max_length=MOST_WHY)] = ""


class Budget(In, frozen=True):
    """One of GPU-hours and dollars; 0 GPU-hours: no budget."""

    gpu_hours: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    dollars: Annotated[float, Meta(gt=0, le=1e12)] | None = None
    forced: bool = False


class OrderWhy(In, frozen=True):
    """A person's reason for an order about a job (a note of its run) or a pipeline's run."""

    why: Annotated[str, Meta(max_length=MOST_WHY)] = ""


class DrainIn(In, frozen=True):
    why: Annotated[str, Meta(max_length=MOST_WHY)] = ""
    deadline_seconds: Annotated[int, Meta(ge=0, le=10_000_000)] = 0


class Readmit(In, frozen=True):
    tested: bool = False
    why: Annotated[str, Meta(max_length=MOST_WHY)] = ""


class AcceptanceIn(In, frozen=True):
    """A burn-in; no loads: all of them."""

    seconds: Annotated[float, Meta(ge=1, le=MOST_SECONDS)]
    loads: Annotated[tuple[LoadKind, ...], Meta(max_length=4)] = ()
    dcgm_level: Annotated[int, Meta(ge=0, le=MOST_DCGM_LEVEL)] = 0


class QuotaIn(In, frozen=True):
    gpus: Number
    ceiling: Number = 0
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


class ReservationIn(In, frozen=True):
    """``end_ns`` 0: the reservation is removed."""

    start_ns: Annotated[int, Meta(ge=0, le=1 << 62)]
    end_ns: Annotated[int, Meta(ge=0, le=1 << 62)]
    nodes: Annotated[tuple[Word, ...], Meta(max_length=20_000)] = ()
    gpus: Number = 0
    teams: Annotated[tuple[Word, ...], Meta(max_length=1000)] = ()


class Decision(In, frozen=True):
    approve: bool
    why: Annotated[str, Meta(max_length=MOST_WHY)] = ""


class TokenIn(In, frozen=True):
    name: Word
    role: Role
    team: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@-]{0,128}$")] = ""
    hours: Annotated[float, Meta(ge=0, le=100_000)] = 0.0  # 0: never expires; join: 24
    uses: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # nodes that may join with it; 0: any number
    network: Annotated[str, Meta(max_length=64)] = ""  # that they join from; "": any
    approves: bool = True  # False: each of them waits for an administrator


class DecideNode(In, frozen=True):
    key: Annotated[str, Meta(max_length=128)] = ""  # of several that wait: the fingerprint's start


# Answers.


class Problem(Out, frozen=True):
    code: str
    message: str


class Failure(Out, frozen=True):
    """Every refusal looks like this."""

    error: Problem


class Done(Out, frozen=True):
    """An order that is stored and was accepted."""

    accepted: bool
    message: str
    sequence: int
    jobs: tuple[int, ...] = ()


class CostEstimate(Out, frozen=True):
    """What submitted jobs are expected to take together; 0: nobody can say."""

    gpu_hours: float
    dollars: float
    by_limit: bool = False  # at most: by the time limit, since nothing else is known


class PipelineTask(Out, frozen=True):
    """A task of a run."""

    name: str
    step: str
    kind: str
    state: TaskState
    reason: str
    question: str  # that a person is asked; "": none
    waits_for: tuple[str, ...]
    attempts: int
    seconds: float  # of its last attempt, also while it runs
    gpu_hours: float
    dollars: float
    job: int  # the newest; 0: none
    key: str
    result: TaskResult


class PipelineOut(Out, frozen=True):
    """A run of a pipeline in short."""

    id: int
    name: str
    user: str
    team: str
    folder: str
    state: Literal["running", "asking", "done", "failed", "cancelled"]
    began_ns: int
    ended_ns: int  # 0: it has not
    states: dict[str, int]  # how many tasks are in which
    gpu_hours: float
    dollars: float


class PipelineList(Out, frozen=True):
    pipelines: list[PipelineOut]


class PipelineDetail(Out, frozen=True):
    """A run of a pipeline and all its tasks, in an order in which they can run."""

    run: PipelineOut
    tasks: list[PipelineTask]
    events: list[Raw]  # of the run, as the log has them


class PipelineStarted(Done, frozen=True):
    pipeline: int = 0


class JobsSubmitted(Done, frozen=True):
    """Jobs that were accepted, what was planned of each, and what all may take."""

    plans: tuple[PlanRecord, ...] = ()
    estimate: CostEstimate | None = None
    start: str = ""  # of the first: a rounded range, or why it is unknown


class Why(Out, frozen=True):
    """A reason: a code with its facts for machines, a sentence for people."""

    code: str
    text: str
    facts: dict[str, int | str]


class ArrayOut(Out, frozen=True):
    """A member of an array. ``states``: of all members that were asked for, where it is folded."""

    job: int  # the first of them
    index: int  # its own, as its program finds it
    count: int
    first_index: int  # of all members
    last_index: int
    states: dict[str, int] = {}


class JobOut(Out, frozen=True):
    id: int
    name: str
    user: str
    team: str
    state: JobState
    why: Why
    gpus: int
    replicas: int
    priority: int
    qos: str
    preemptible: bool
    step: int
    steps: int
    committed: int
    durable: int
    generation: int
    phase: str
    step_seconds: float
    submitted_ns: int
    started_ns: int
    ended_ns: int
    ran_seconds: float
    retries_used: int
    preemptions: int
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    micro_batches: tuple[int, ...] = ()  # by replica, where a slow one has fewer
    loss: float | None = None  # of the newest step, while it runs
    tokens_per_second: float | None = None
    mfu: float | None = None
    printed: bool = False  # its steps are those that it prints: it reports none
    project: str = ""
    array: ArrayOut | None = None
    held: bool = False  # a person keeps it out of the queue


class TrialOut(Out, frozen=True):
    """A job that is a trial of a sweep, up to one rung."""

    job: int
    trial: int
    rung: int
    steps: int
    settings: dict[str, str]
    state: JobState
    why: str
    step: int
    value: float | None  # of the sweep's metric after these steps
    value_unknown: bool  # it has ended, and its value is still looked for
    ran_seconds: float
    gpus: int
    ranks: int
    dollars_per_gpu_hour: float


class SweepOut(Out, frozen=True):
    sweep: str
    metric: str
    better: Literal["lower", "higher"]
    trials: list[TrialOut]
    next_after: int


class SweepLine(Out, frozen=True):
    """A sweep in a list; the best value is of the furthest rung."""

    sweep: str
    user: str
    team: str
    metric: str
    better: Literal["lower", "higher"]
    trials: int
    live: int
    failed: int
    best: float | None
    began_ns: int


class SweepList(Out, frozen=True):
    sweeps: list[SweepLine]


class JobEstimate(Out, frozen=True):
    """What a job is planned to take; None: nobody can say."""

    plan: PlanRecord | None
    estimate: CostEstimate | None
    dollars_per_gpu_hour: float


class LossOut(Out, frozen=True):
    """Committed steps that a job lost, and when and why that was found out."""

    first: int
    last: int
    at_ns: int
    why: Why


class JobDetail(Out, frozen=True):
    job: JobOut
    spec: Raw
    evidence: tuple[str, ...]
    used_gpu_hours: float
    budget_gpu_hours: float = 0.0  # 0: none
    forced: bool = False  # it goes on above its budget
    lost_steps: int = 0  # committed ones, in all
    losses: tuple[LossOut, ...] = ()  # the newest of them, oldest first
    plan: PlanRecord | None = None  # as it was submitted
    expected: dict[str, int] = {}  # times and sizes as they are reckoned with now
    origins: dict[str, Origin] = {}  # where each of these is from


class JobList(Out, frozen=True):
    jobs: list[JobOut]
    next_after: int  # 0: there are no more


class Waits(Out, frozen=True):
    """Why a job is in its state and, while it is pending, what it waits for."""

    job: int
    state: JobState
    why: Why
    waits_for: Why | None
    estimated_start_ns: int | None
    start: str  # the same for people: a rounded range, or why it is unknown
    priority: dict[str, int]
    history: list[Why]


class NodeOut(Out, frozen=True):
    number: int
    name: str
    state: str
    why: Why
    connected: bool
    gpus: int
    free_gpus: int
    cpus: int
    kind: str
    partition: str
    leaf: str
    pod: str
    rack: str
    jobs: tuple[int, ...]
    clock_skew_seconds: float
    memory_bytes: int = 0
    features: tuple[str, ...] = ()
    domain: str = ""  # of NVLink; "": the node itself
    rails: int = 1
    power: str = ""  # feed; "": its rack's
    switch: str = ""  # "": its leaf's
    since_ns: int = 0  # that it has had its state


class NodeList(Out, frozen=True):
    nodes: list[NodeOut]
    next_after: int  # -1: there are no more


class ChangeOut(Out, frozen=True):
    time_ns: int
    state: str
    why: Why


class NodeDetail(Out, frozen=True):
    node: NodeOut
    history: list[ChangeOut]
    description: NodeDescription | None = None  # null: its agent has not connected to this server


class AcceptanceOut(Out, frozen=True):
    """The last burn-in of a node that this server ordered, and the node's newest certificate."""

    node: str
    ordered: bool  # false: by this server, none
    ended: bool
    problem: str  # why no certificate came of it
    lines: tuple[str, ...]  # the last ones of how it goes
    certificate: SignedCertificate | None  # null: there is none


class DriftOut(Out, frozen=True):
    """Who differs from most nodes of its kind."""

    differences: list[Difference]
    undecided: list[Undecided]
    compared: dict[str, int]  # nodes by kind
    silent: tuple[str, ...]  # nodes that have not told their settings


class CommandOut(Out, frozen=True):
    kind: str
    nodes: int
    why: Why


class EventOut(Out, frozen=True):
    sequence: int
    time_ns: int
    kind: str
    body: dict[str, Any]
    commands: list[CommandOut]


class EventList(Out, frozen=True):
    events: list[EventOut]
    next_after: int


class LogPieceOut(Out, frozen=True):
    """Some of a log, and the place behind it (``after`` of another request)."""

    data: bytes
    cursor: str


class NoticeOut(Out, frozen=True):
    sequence: int
    time_ns: int
    level: str
    text: str
    job: int
    node: str


class QuestionOut(Out, frozen=True):
    question: int
    about: str
    nodes: tuple[str, ...]
    causes: tuple[str, ...]
    asked_ns: int


class Status(Out, frozen=True):
    version: str
    leader: bool
    epoch: int
    sequence: int
    time_ns: int
    nodes: dict[str, int]  # by state
    connected: int
    gpus: int
    free_gpus: int
    node_gpus: int  # of the largest group of like nodes
    jobs: dict[str, int]  # by state
    problem: str  # why nothing can be stored at the moment
    starting: bool  # nodes that the server starts itself have not all joined yet
    notices: list[NoticeOut]
    questions: list[QuestionOut]


class LedgerOut(Out, frozen=True):
    """GPU time by bucket, in nanoseconds; the buckets of a share sum to it exactly."""

    fleet: Share | None  # None: the caller sees one team alone
    teams: dict[str, Share]
    jobs: dict[int, Share]


class AgeRateOut(Out, frozen=True):
    """The same of nodes of one age: since they joined, or were repaired."""

    age: str  # and, of those that failed before, how often
    failures: int
    node_days: float
    per_1000_node_days: float
    low: float
    high: float


class FailureRateOut(Out, frozen=True):
    """How often nodes of one kind fail, as nodes of eight GPUs, in a thousand days."""

    kind: str
    failures: int  # that interrupted gangs
    node_days: float  # in which gangs ran
    per_1000_node_days: float
    low: float  # with four chances in five it is between these
    high: float
    prior: float  # the policy's
    causes: dict[str, int]
    ages: list[AgeRateOut] = []  # youngest first, then those of nodes that failed before
    nodes_per_1000: float = 0.0  # mean of the nodes that are in the fleet, by age and past


class FailureRates(Out, frozen=True):
    rates: list[FailureRateOut]


class QuotaOut(Out, frozen=True):
    team: str
    gpus: int
    ceiling: int
    weight: int
    used_gpus: int


class QuotaList(Out, frozen=True):
    quotas: list[QuotaOut]


class PartitionOut(Out, frozen=True):
    """A partition: its nodes, what its rules say, and jobs that name it and may be seen."""

    name: str
    nodes: int
    free_nodes: int  # that take work and have none
    gpus: int
    free_gpus: int
    priority: int = 0
    teams: tuple[str, ...] = ()  # that may use it; (): all
    most_seconds: float = 0.0  # longest time limit of its jobs; 0: no limit
    pending: int = 0
    running: int = 0


class PartitionList(Out, frozen=True):
    partitions: list[PartitionOut]


class UsageQuery(In, frozen=True):
    """Days of UTC; ``to`` 0: until now."""

    by: Literal["team", "user", "project"] = "team"
    every: Literal["day", "week", "month", "all"] = "day"
    from_: Seconds = field(default=0.0, name="from")
    to: Seconds = 0.0


class UsageOut(Out, frozen=True):
    """GPU time of one owner in one stretch of time, exact, and what it costs."""

    start: str  # its first day; "": of all time that was asked for
    owner: str  # "": without a user or project
    gpu_ns: str  # JSON's numbers are not exact
    gpu_hours: float
    dollars: float


class UsageList(Out, frozen=True):
    usage: list[UsageOut]


class ReservationOut(Out, frozen=True):
    name: str
    start_ns: int
    end_ns: int
    nodes: tuple[str, ...]
    gpus: int
    teams: tuple[str, ...]


class ReservationList(Out, frozen=True):
    reservations: list[ReservationOut]


class Move(Out, frozen=True):
    job: int
    source: str
    target: str


class Moves(Out, frozen=True):
    moves: list[Move]


class TokenOut(Out, frozen=True):
    id: str
    name: str
    role: Role
    team: str
    node: str
    created_ns: int
    expires_ns: int
    revoked: bool
    uses: int = 0
    used: int = 0
    network: str = ""


class PendingNode(Out, frozen=True):
    """A machine that wants to be a node, and that an administrator decides about."""

    name: str
    key: str  # its fingerprint
    known: bool  # there is a node of this name, with another key
    since_ns: int


class PendingList(Out, frozen=True):
    nodes: list[PendingNode]


class TokenList(Out, frozen=True):
    tokens: list[TokenOut]


class NewToken(Out, frozen=True):
    """The only time that a token is told."""

    secret: str
    token: TokenOut


class AuthorityOut(Out, frozen=True):
    """Whom to trust, once the fingerprint was seen to be the one that its people know."""

    pem: str
    fingerprint: str


class Health(Out, frozen=True):
    ok: bool


class Whoami(Out, frozen=True):
    token: TokenOut
