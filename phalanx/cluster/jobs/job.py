"""What is asked of the cluster (JobSpec), and what becomes of it (ClusterJob)."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from msgspec import Struct, structs

from phalanx.cluster.gang.remembered import Dispute, Kept, Loss
from phalanx.cluster.job_relations import Array, Dependency, SweepTrial
from phalanx.cluster.plan_record import PlanInterval, PlanRecord
from phalanx.cluster.protocol.messages import Source, StepsPrinted, WorkerExited
from phalanx.cluster.reasons import Reason
from phalanx.cluster.units import HOUR_NS, SECOND_NS
from phalanx.plan.cost.traffic import AxisTraffic

LONGEST_NS = 10 * 365 * 24 * HOUR_NS  # of any time: sums of them stay far from 64 bits
MOST_PRIORITY = 10**9  # and of all that is weighed with it
DURABLES_KEPT = 2048  # checkpoints of a job that the core remembers, to roll back to


class GangShape(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A gang: ``replicas`` copies of tensor * context * pipeline ranks, one rank a GPU.

    Ranks are laid out pipeline, data, context, tensor (tensor innermost), as in the mesh. A slot
    is the job's share of one node; rank r runs in slot r // slot_gpus. A CPU-only gang has
    ``slot_gpus = 0`` and one slot a replica.
    """

    replicas: int = 1  # wanted length of the data axis
    least_replicas: int = 0  # elastic down to this many; 0: not elastic
    most_replicas: int = 0  # elastic up to this many; 0: as wanted
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    slot_gpus: int = 1
    slot_cpus: int = 1
    slot_memory_bytes: int = 0
    whole_nodes: bool = False  # nothing else runs on its nodes, whatever a slot needs
    traffic: tuple[AxisTraffic, ...] = ()  # what a GPU sends in a step, by axis

    @property
    def replica_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tensor * self.context * self.pipeline

    @property
    def floor(self) -> int:
        """Fewest replicas that the job accepts."""
        return self.least_replicas or self.replicas

    @property
    def ceiling(self) -> int:
        """Most replicas that the job can use."""
        return max(self.most_replicas, self.replicas)

    def slots(self, replicas: int) -> int:
        """Slots (so: nodes) that this many replicas need."""
        return -(-self.replica_ranks * replicas // self.slot_gpus) if self.slot_gpus else replicas

    def gpus(self, replicas: int) -> int:
        """GPUs that this many replicas occupy."""
        return self.replica_ranks * replicas if self.slot_gpus else 0

    def ranks(self, replicas: int) -> int:
        """Ranks of this many replicas; the last slot may hold fewer than its GPUs."""
        return self.replica_ranks * replicas if self.slot_gpus else replicas

    def slot_replicas(self, slot: int, replicas: int) -> tuple[int, ...]:
        """Replicas with ranks in one slot."""
        if not self.slot_gpus:
            return (slot,)
        inner = self.tensor * self.context
        first = slot * self.slot_gpus
        last = min(first + self.slot_gpus, self.gpus(replicas)) - 1
        blocks = range(first // inner, last // inner + 1)
        return tuple(dict.fromkeys(block % replicas for block in blocks))


class Expected(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Times that the plan predicts, until they are measured: for timeouts and for recovery."""

    steps: int = 0  # of the whole job; 0: unknown
    step_ns: int = SECOND_NS
    exposed_ns: int = 0  # of a step: communication that nothing hides (estimated)
    bubble_ns: int = 0  # of a step: pipeline bubble (estimated)
    snapshot_steps: int = 1  # steps between snapshots in shared memory; 0: none are made
    snapshot_ns: int = 0  # a snapshot stops training this long
    checkpoint_steps: int = 0  # steps between durable checkpoints; 0: none are made
    checkpoint_ns: int = 0  # a durable checkpoint stops training this long
    flush_ns: int = 0  # until it is on remote storage; training goes on meanwhile
    checkpoint_bytes: int = 0  # of the whole gang
    start_ns: int = 30 * SECOND_NS  # a worker process until it can join
    standby_ns: int = 0  # the same where the node keeps one started; 0: none does
    rejoin_ns: int = 0  # a worker that lives leaves its old collective and can join
    form_ns: int = 5 * SECOND_NS  # process groups of the gang
    restore_peer_ns: int = 5 * SECOND_NS
    restore_disk_ns: int = 60 * SECOND_NS
    restore_remote_ns: int = 300 * SECOND_NS
    micro_batches: int = 0  # of one replica in a step; 0: unknown, so a slow one keeps its share

    def join_ns(self, *, cold: bool) -> int:
        """Until the last worker can join; ``cold``: some node has not even one standing by."""
        started = self.start_ns if cold else self.standby_ns or self.start_ns
        return max(self.rejoin_ns, started)


class JobTimeouts(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a job says itself of how long it may be quiet; 0: as the policy's ``timeouts`` say."""

    first_step_ns: int = 0  # of every generation, until its first step is reported
    hang_ns: int = 0  # between two steps
    idle_ns: int = 0  # without steps, CPU, GPU and output: then it is restarted


class FallbackMapping(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A job on fewer nodes, as the planner would map it there: the same model and global batch."""

    gang: GangShape  # with slots like the job's own
    expected: Expected
    plan: PlanRecord | None = None
    payload: str = ""  # what it runs then; "": the same

    @property
    def slots(self) -> int:
        """Nodes that it needs."""
        return self.gang.slots(self.gang.replicas)


class JobSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A submission. What it runs (``payload``) is the shell's business."""

    name: str
    user: str = ""
    team: str = "default"
    project: str = ""  # that its GPU time counts for; "": none
    partition: str = ""  # "": any
    qos: str = "normal"
    priority: int = 0
    gang: GangShape = GangShape()
    expected: Expected = Expected()
    constraint: str = ""  # e.g. "a100|h100 & nvlink"
    time_limit_ns: int = 0  # of running; 0: none
    time_min_ns: int = 0  # a shorter limit that it accepts to start earlier; 0: none
    begin_ns: int = 0  # it does not start before; 0: at once
    deadline_ns: int = 0  # it must have ended then; 0: none
    held: bool = False  # it waits until somebody releases it
    preemptible: bool = False
    retries: int = 3  # failures of its own without progress that it is started again after
    after: tuple[Dependency, ...] = ()
    array: Array | None = None
    trial: SweepTrial | None = None
    budget_gpu_seconds: int = 0  # 0: none
    forced: bool = False  # goes on above its budget
    spares: int = 0  # nodes held with the gang, idle, to replace one of its own
    requeue_at_limit: bool = False  # at its time limit it goes back into the queue
    reports_steps: bool = True  # False: a program, which may report steps or not
    timeouts: JobTimeouts = JobTimeouts()
    plan: PlanRecord | None = None  # of the server that took it; None: nobody planned it
    payload: str = ""
    webhook: str = ""  # address that is told when it ends; "": none
    mail: str = ""  # of a person who is told; "": nobody
    # What it can go on as where nodes are missing, the most nodes first.
    fallbacks: tuple[FallbackMapping, ...] = ()

    def on_fewer_nodes(self, fallback: FallbackMapping) -> JobSpec:
        """The submission with another mapping of the same work."""
        spec = structs.replace(self, gang=fallback.gang, expected=fallback.expected)
        return structs.replace(spec, plan=fallback.plan, payload=fallback.payload or self.payload)

    @property
    def mapping(self) -> str:
        """Its mapping in words; where nobody planned it, its replicas and their ranks."""
        if self.plan is not None and self.plan.mapping:
            return self.plan.mapping
        return f"{self.gang.replicas} replicas of {self.gang.replica_ranks} ranks"

    @property
    def array_width(self) -> int:
        """Members of its array that may be in the queue or run at a time; 1 without an array."""
        if self.array is None or any(one.kind == "singleton" for one in self.after):
            return 1
        return self.array.width or self.array.count


class SpecChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Another submission in the place of one whose job lives, and who wants it."""

    spec: JobSpec
    by: str = ""
    settings: tuple[str, ...] = ()  # that differ, as a job file says them
    before: str = ""  # the mapping that it had, in words
    step_ns: PlanInterval | None = None  # that is predicted from its own steps
    taken_back: bool = False  # it is what the job was before: nothing that could fail to run
    made_before: int = -1  # steps before the first that other stages alter; -1: they alter none
    stages_before: str = ""  # the stages that the job has had so far, for whoever wants them back
    own: JobSpec | None = None  # of a job that runs as a fallback: what it is to return to


class JobState(StrEnum):
    """Where a job is in its life."""

    PENDING = "pending"  # in the queue, or waiting for a dependency: see Job.why
    FORMING = "forming"  # placed; workers start, join, restore
    RUNNING = "running"
    DRAINING = "draining"  # asked to stop: snapshot, then gone
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = (JobState.DONE, JobState.FAILED, JobState.CANCELLED)


class Placement(Struct, frozen=True):
    """Where a gang stands. The order of nodes is the order of ranks."""

    nodes: tuple[int, ...]  # by slot
    gpus: tuple[int, ...]  # mask by slot; () where a slot is a whole node
    spares: tuple[int, ...] = ()
    replicas: int = 1
    cost_ns: int = 0  # predicted exposed communication of a step on these nodes
    reason: Reason = Reason("placed")


Phase = Literal["settling", "joining", "restoring", "running", "draining"]


class Gang(Struct, kw_only=True, omit_defaults=True):
    """The workers of a job that holds nodes."""

    phase: Phase = "joining"
    since_ns: int = 0  # of the phase
    attempts: int = 0  # deadlines missed in this phase
    unanswered: tuple[int, ...] = ()  # nodes that missed the last one
    keepers: tuple[int, ...] = ()  # nodes by slot of the last generation that made snapshots
    kept_generation: int = 0  # that one
    kept_from: int = 0  # checkpoints after this step were written by these very nodes
    buddy_shift: int = 0  # of that generation: slot i is kept by slot (i + shift) % slots
    backup: int = -1  # the spare that keeps what its only node does; -1: it has others, or no spare
    next_backup: int = -1  # the same of the generation that forms
    lost: dict[int, str] = {}  # nodes whose memory is gone since then, with the cause
    broken: dict[int, str] = {}  # nodes whose workers died, with the cause: to be dealt with
    cause: str = "start"  # of the current formation: a Cause or FormationCause
    culprit: int = -1
    micro_batches: tuple[int, ...] = ()  # by replica, where they are unequal
    refused: tuple[str, ...] = ()  # restore sources that failed in this incident
    refusal: str = ""  # what was wrong with the last of them
    rollback: int = -1  # restore no later step than this one; -1: the latest
    skip_step: int = 0  # whose batch is to be left out; 0: none
    leftover: tuple[int, ...] = ()  # nodes that left, but keep snapshots until the next one runs
    memory_step: int = -1  # newest step that the keepers hold in common; -1: none
    restored: int = 0  # step this generation began with
    ready_step: int = -1  # that it is ready at while it waits for an earlier one to end; -1: no
    source: Source = "none"  # it came from
    deadline_ns: int = 0  # of the phase
    retry_ns: int = 0  # it does not form again before
    reshaped_ns: int = 0
    stood_by: dict[int, int] = {}  # spares that had workers as they became that: when
    ready_ns: int = 0  # when nodes that it waits for, to grow, have started their workers
    declined_ns: int = 0  # when it was said that growing would not pay; 0: never
    ending: JobState | None = None  # what a gang becomes that drains, or is to once it has formed
    leave_by_ns: int = 0  # it must be gone then, saved or not; 0: it takes the time that it needs
    ending_why: Reason = Reason("")
    runs_on: tuple[str, int] | None = None  # kind of nodes and GPUs, while it runs
    node_groups: dict[str, dict[str, int]] = {}  # nodes by kind and group, as it began or at a look
    told_rate: int = 0  # how often nodes fail that its workers were told of; 0: the policy's
    aged_ns: int = 0  # its time is counted by its nodes' groups up to then
    unconfirmed: WorkerExited | None = None  # may follow from a lost node: waits for all to answer
    interrupted: str | None = None  # the kind that it ran on, until it is known what broke
    saves: int = 0  # times that it formed again while it was to leave
    only_saves: bool = False  # this generation writes what it restored, and makes no step


class ClusterJob(Struct, kw_only=True, omit_defaults=True):
    """A job in the core. Plain data; the modules beside this one change it."""

    id: int
    spec: JobSpec
    submitted_ns: int
    state: JobState = JobState.PENDING
    why: Reason = Reason("submitted")  # of its state; while pending: what it waits for
    eligible: bool = True  # no dependency, hold or array cap keeps it out of the queue
    queued_ns: int = 0  # since when it is eligible
    waited_ns: int = 0  # in the queue, up to its last start; its own limit makes it 0
    started_ns: int = 0  # of the current allocation
    granted_ns: int = 0  # its limit, where the queue gave a shorter one; 0: the submission's
    ran_ns: int = 0  # in earlier allocations
    ended_ns: int = 0
    placement: Placement | None = None
    generation: int = 0  # of the gang; rises with every formation and never falls
    step: int = 0  # highest step ever completed
    committed: int = 0  # least step that every rank has sealed and every buddy acknowledged
    kept_step: int = 0  # that nodes of its last generation still said to keep; 0: none did
    lost_up_to: int = 0  # committed steps up to this one were said to be lost; 0: it went on since
    lost_steps: int = 0  # committed ones, in all
    losses: tuple[Loss, ...] = ()  # of them, newest last
    durables: list[int] = []  # steps of checkpoints on remote storage, newest last
    skipped: tuple[tuple[int, int], ...] = ()  # samples that were left out, newest last
    skipped_before: int = 0  # samples in older ranges than these
    retries_used: int = 0  # failures of its own without progress since
    preemptions: int = 0
    array_parent: int = 0  # id of the array's first job; 0: no array
    array_index: int = 0
    held: bool = False  # a person keeps it out of the queue
    operator_hold: Reason | None = None  # why only an operator lets it in again; None: anybody may
    wanted: int = 0  # replicas; 0: as the submission says
    gang: Gang | None = None
    step_ns: int = 0  # as measured; 0: not yet
    first_step_ns: int = 0  # the longest first step of a generation so far
    budget_gpu_seconds: int = 0
    forced: bool = False
    budget_warned: bool = False
    usual_flush_ns: int = 0  # until a checkpoint is written, as a rule; 0: none was yet
    unsaved_since: int = -1  # the durable step after which missing checkpoints were said
    kills: int = 0  # ends from outside in a row, without progress between them
    killed_from: int = 0  # the step that was safe at the last of them
    failed_step: int = -1  # step of the last failure that was the job's own
    failed_rank: int = -1  # and its rank
    failed_error: str = ""  # and what it said
    failures_there: int = 0  # so many in a row there, at the same rank or with the same error
    failed_from: int = 0  # the step that was safe then: a later one is progress
    retries_since_ns: int = 0  # when the first of ``retries_used`` was used
    storage_failures: int = 0  # in a row: no room for a checkpoint, or its storage is away
    rollback: int = -1  # while it waits: what its gang had not gone back to yet
    skip_step: int = 0  # and not left out
    kept: Kept | None = None  # while it waits: what nodes hold for it in memory
    dispute: Dispute | None = None  # a step that replicas disagreed on, and nobody knew who erred
    failed_formations: int = 0  # in a row, before a step was tried
    agent_ends: tuple[tuple[int, int], ...] = ()  # at its start: (generation, node)
    agent_ends_step: int = 0  # that was known at the first of these
    waiting_for: dict[int, None] = {}  # jobs it depends on that have not ended
    never: bool = False  # a dependency can never be satisfied
    parted_step: int = -1  # at which ranks last lost each other while all their nodes lived
    partings: int = 0  # how often in a row there
    printed: StepsPrinted | None = None  # how far it is by what it prints; it reports nothing
    printed_step_ns: int = 0  # as these lines follow each other
    fenced: dict[int, tuple[int, int]] = {}  # by node it left: generation, may run there until
    follows: int = 0  # a job that it is the same program as, and whose nodes it waits for
    evidence: tuple[str, ...] = ()  # last failures, newest last
    revised: Expected | None = None  # what is expected since some of it was measured
    measured: tuple[str, ...] = ()  # fields of it that were
    change: SpecChange | None = None  # carried out when it has left its nodes with its state safe
    former: JobSpec | None = None  # what it was, until it has made a step as changed
    own: JobSpec | None = None  # its submission, while it runs as one of its fallbacks
    own_step_ns: int = 0  # of that, as measured; 0: not yet
    stages_before: str = ""  # the stages that it had until they were changed; "": they never were
    former_stages: str = ""  # what that was of ``former``
    result: str = ""  # what its program left as that when it ended well

    @property
    def expected(self) -> Expected:
        """What is expected of it now, for choices and forecasts; deadlines are the submission's."""
        return self.revised or self.spec.expected

    @property
    def time_limit_ns(self) -> int:
        """Of its current allocation, and of what it ran before; 0: none."""
        return self.granted_ns or self.spec.time_limit_ns

    @property
    def wanted_replicas(self) -> int:
        """Replicas that it should have; a fallback has its own number."""
        return (0 if self.own is not None else self.wanted) or self.spec.gang.replicas

    @property
    def durable(self) -> int:
        """Newest step on remote storage; 0: none."""
        return self.durables[-1] if self.durables else 0

    def add_durable(self, step: int) -> None:
        """A checkpoint of this step is complete. Of too many, the older half is thinned out."""
        if step > self.durable:
            self.durables = [*self.durables, step]
            if len(self.durables) > DURABLES_KEPT:
                del self.durables[1 : DURABLES_KEPT // 2 : 2]

    @property
    def saving_ns(self) -> int:
        """How long it takes, usually, until all its steps are on remote storage."""
        expected = self.expected
        saved = (self.step_ns or expected.step_ns) + expected.checkpoint_ns + expected.flush_ns
        if self.gang is None or self.gang.phase in ("running", "draining"):
            return saved
        return saved + expected.join_ns(cold=False) + expected.form_ns + expected.restore_peer_ns

    @property
    def ended(self) -> bool:
        """It will never run again."""
        return self.state in ENDED

    @property
    def allocated(self) -> bool:
        """It holds nodes."""
        return self.placement is not None
