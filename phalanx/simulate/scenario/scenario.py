"""Everything that can be set about a simulated world, as one tree (``phalanx simulate keys``).

Times are in the unit that the key names; the world turns them into integer nanoseconds once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from phalanx.cluster.policy import DAY_NS, QueuePolicy, RecoveryPolicy
from phalanx.cluster.units import HOUR_NS, SECOND_NS
from phalanx.config.section import Below1, Fraction, Section

# Bounds refuse slips of the hand, and what virtual time (64 bits of nanoseconds) cannot hold.
MOST_SECONDS = 1e8
MOST_NODES = 1_000_000
Count = Annotated[int, Meta(ge=1, le=10**6)]
Natural = Annotated[int, Meta(ge=0, le=10**9)]
Seconds = Annotated[float, Meta(ge=0, le=MOST_SECONDS)]
SomeSeconds = Annotated[float, Meta(ge=1e-3, le=MOST_SECONDS)]
Minutes = Annotated[float, Meta(gt=0, le=10_000)]
Spread = Annotated[float, Meta(ge=0, le=2)]
MOST_LOAD = 2.0  # of all GPU time
MOST_RATE = 1e6  # faults in 1000 node-days
Rate = Annotated[float, Meta(ge=0, le=MOST_RATE)]
Hours = Annotated[float, Meta(ge=0, le=1e5)]
Days = Annotated[float, Meta(gt=0, le=3660)]
Weight = Annotated[int, Meta(ge=0, le=10**9)]
_QUEUE = QueuePolicy()


class FleetPart(Section, frozen=True, kw_only=True):
    """The machines."""

    gpus: Annotated[int, Meta(ge=1, le=MOST_NODES)] = 1024
    """GPUs that jobs run on, those of small_nodes too; spares stand beside them (--gpus)."""
    spare_nodes: Annotated[int, Meta(ge=0, le=MOST_NODES)] = 0
    """Nodes kept free to replace others."""
    spares_warm: bool = True
    """Spares belong to the job and keep started workers; otherwise the fleet's pool has them."""
    node_gpus: Annotated[int, Meta(ge=1, le=63)] = 8
    """GPUs in a node."""
    small_nodes: Annotated[int, Meta(ge=0, le=MOST_NODES)] = 0
    """Nodes of these with fewer GPUs: a mixed fleet, for many jobs."""
    small_node_gpus: Annotated[int, Meta(ge=1, le=63)] = 4
    """GPUs in each of those."""
    kind: str = "h100"
    """Kind of GPU: what it costs and draws, and what jobs are given."""
    dollars_per_gpu_hour: Annotated[float, Meta(ge=0, le=10_000)] | None = None
    """Price of a GPU with its share of host and network; "none": the catalogue's for fleet.kind."""
    watts_per_gpu: Annotated[float, Meta(ge=0, le=100_000)] | None = None
    """Drawn in training, at the meter of the building; "none": in the usual server of the kind."""
    idle_watts_per_gpu: Annotated[float, Meta(ge=0, le=100_000)] | None = None
    """Drawn while no step is made; "none": a quarter of watts_per_gpu."""
    rails: Count = 8
    """Network planes of a node."""
    rack_nodes: Count = 2
    """Nodes in a rack: they share a top-of-rack switch and fail together when it does."""
    power_racks: Count = 8
    """Racks on one power feed."""
    leaf_nodes: Count = 16
    """Nodes under one leaf switch."""
    pod_nodes: Count = 384
    """Nodes under one spine."""


class JobPart(Section, frozen=True, kw_only=True):
    """The one big job (workload "one-job"), and how steps look in every other one."""

    tensor: Count = 8
    """Tensor-parallel ranks."""
    context: Count = 1
    """Context-parallel ranks."""
    pipeline: Count = 1
    """Pipeline stages; reduced where the number of GPUs does not divide."""
    least_replicas: Natural = 0
    """Data-parallel replicas it can shrink to; 0: it needs all of them."""
    fallbacks: bool = False
    """It has mappings for three quarters and for half of its nodes, with which it can go on while
    nodes are missing: steps take as much longer. Not with job.least_replicas."""
    step_seconds: SomeSeconds = 5.0
    """A healthy step, stalls of checkpoints left out."""
    micro_batches: Natural = 8
    """Micro-batches of a replica in a step: a replica that computes slowly can give some of them to
    others (policy.rebalance); 0 or 1: it has none to give."""
    exposed_share: Below1 = 0.0
    """Part of a step that waits for communication (estimated, for the ledger)."""
    bubble_share: Below1 = 0.0
    """Part of a step that is pipeline bubble (estimated, for the ledger)."""
    steps: Natural = 0
    """Steps of the job; 0: it outlasts the simulation."""


class CheckpointPart(Section, frozen=True, kw_only=True):
    """Snapshots in the memory of nodes and durable checkpoints on remote storage."""

    memory_steps: Natural = 1
    """Steps between snapshots in shared memory, copied to a buddy; 0: none are made."""
    memory_stall_seconds: Seconds = 0.0
    """A snapshot stops training this long."""
    replicate_seconds: Seconds = 2.0
    """Until the buddy has acknowledged a snapshot."""
    interval_seconds: Seconds = 1800.0
    """Between durable checkpoints, as whole steps; 0: none are made."""
    follows_failures: bool = False
    """The interval becomes the best one for the failures that the core has seen."""
    stall_seconds: Seconds = 2.0
    """A durable checkpoint stops training this long."""
    flush_seconds: Seconds = 30.0
    """Until it is durable; a failure meanwhile loses it."""


class RestartPart(Section, frozen=True, kw_only=True):
    """From the order to form a gang until its first step begins."""

    seconds: Seconds = 0.0
    """All of it, whatever is restored from where; 0: the parts below are summed."""
    start_seconds: Seconds = 30.0
    """A worker on a node that has none, until it can join."""
    standby_seconds: Seconds | None = None
    """The same where a started process of the job stands by on the node and only has to fork;
    "none": there are no such processes."""
    rejoin_seconds: Seconds = 5.0
    """A surviving or warm worker leaves the old collective and can join."""
    form_seconds: Seconds = 10.0
    """Process groups of the new gang."""
    restore_peer_seconds: Seconds = 5.0
    """Restoring from the memory of nodes."""
    restore_disk_seconds: Seconds = 60.0
    """Restoring from local disks."""
    restore_remote_seconds: Seconds = 120.0
    """Restoring from remote storage."""
    spread: Spread = 0.1
    """Sigma of the lognormal factor on each phase (its mean is one); 0: always the same. The core's
    deadlines allow for three of them."""
    fails_share: Below1 = 0.0
    """Starts of a gang that fail before its first step, and are tried again."""


class DetectionPart(Section, frozen=True, kw_only=True):
    """From a fault until the core is told."""

    seconds: Seconds | None = None
    """Every kind of fault; "none": by kind, below."""
    exit_seconds: Seconds = 5.0
    """A worker or a device reports an error."""
    heartbeat_seconds: SomeSeconds = 5.0
    """Between heartbeats; a node is silent after missed_heartbeats of them and a round trip."""
    missed_heartbeats: Annotated[int, Meta(ge=2, le=1000)] = 4
    """Heartbeats that must be missing."""
    peer_seconds: Seconds | None = None
    """Until a peer of a dead node says that its collective failed: the retry time of the network.
    The core then gives up whoever does not answer; "none": peers say nothing."""
    hang_seconds: Seconds | None = None
    """A gang without a step; "none": the deadline that the core derives."""
    hang_located_share: Fraction = 0.9
    """Hangs whose evidence names the node; after the others everybody restarts."""
    slow_steps: Count = 20
    """Steps until a slow rank is found."""
    corruption_steps: Count = 50
    """Steps between comparisons of replica fingerprints."""


class RepairPart(Section, frozen=True, kw_only=True):
    """From a fault until the node can be tested again."""

    hours: Hours | None = None
    """Every cause; "none": as the fault model says for each."""
    spread: Spread = 0.5
    """Sigma of the lognormal repair time (its mean is kept); 0: always the same."""
    check_seconds: Seconds = 300.0
    """A full check of a node."""
    missed_share: Fraction = 0.0
    """Broken nodes that pass the check all the same (a lying health check)."""
    fails_share: Below1 = 0.0
    """Repairs that do not help: the node is tested, found broken and repaired once more."""


class FaultPart(Section, frozen=True, kw_only=True):
    """What breaks and how often (``phalanx simulate faults`` lists the models)."""

    model: str = "llama3"
    """A published model by name, or a TOML file of the same form."""
    per_1000_node_days: Rate | None = None
    """Rate of all faults together, those of domains and of faults.causes included: what is not
    set by name shares the rest. 0: only what is set by name happens; "none": as the model says.
    Counted are nodes of this fleet (fleet.node_gpus); rates in a model are of nodes of eight."""
    causes: dict[str, Rate] = field(default_factory=dict)
    """Rates of single causes per 1000 node-days: faults.causes.power is all faults of that cause,
    wherever they come from; faults.causes.power@rack those of whole racks (@node, @power, @leaf,
    @scattered likewise), in models that have none of them too."""
    domain_per_1000_node_days: Rate | None = None
    """Rate of all faults of whole racks, feeds, leaf switches and roll-outs together, where the
    model's rate leaves them out; "none": as published for the number of GPUs."""
    domains: bool = True
    """Add faults of whole racks, feeds and fabrics where the model's rate leaves them out."""
    by_job_gpus: dict[str, Rate] = field(default_factory=dict)
    """Faults of programs, beside those of nodes: per 1000 node-days that jobs of at least so many
    GPUs run. by_job_gpus.1=40 with by_job_gpus.64=5: small jobs fail more often."""
    idle_share: Fraction = 1.0
    """How often nodes fail that no job holds, as a part of the rate of others: work wears them."""
    lemon_share: Below1 = 0.0
    """Nodes that fail more often than others."""
    lemon_factor: Annotated[float, Meta(ge=1, le=1e4)] = 10.0
    """How much more often; the rate of the whole fleet stays the same."""
    corrupting_nodes: Natural = 0
    """Nodes that all silent corruptions come from (7 hosts caused 37 of them in one fleet); 0: any
    node may."""
    slow_per_1000_node_days: Rate = 0.0
    """Nodes that become slow rather than fail."""
    slow_minutes: Annotated[float, Meta(gt=0, le=1e6)] = 24.0
    """Mean time that a node stays slow if nobody does anything."""
    slow_factor: Annotated[float, Meta(ge=1, le=1e4)] = 1.3
    """How much longer a step takes with one of them."""
    slow_share_network: Fraction = 0.95
    """Slow nodes that are slow on the network (the others compute slowly)."""
    rail_per_1000_node_days: Rate = 0.0
    """Network cards that die and leave the node running with one rail less."""
    planned_per_day: Rate = 0.0
    """Planned stops of a job by people (new code, firmware), while these are there: a drain and a
    restart."""
    storage_per_day: Rate = 0.0
    """Brown-outs of remote storage."""
    storage_minutes: Annotated[float, Meta(gt=0, le=1e6)] = 20.0
    """Length of a brown-out; checkpoints and remote restores wait for its end."""
    controller_per_day: Rate = 0.0
    """How often the controller dies: gangs train on, and nothing is decided until another has taken
    over its log."""
    controller_minutes: Minutes = 2.0
    """Mean time until it has."""


class PolicyPart(Section, frozen=True, kw_only=True):
    """What the site allows the core to do."""

    order: Literal["predicted", "fixed"] = "predicted"
    """How a way out of a failure is chosen: the one that is predicted to lose least, or the first
    that there is of in place (unless the node failed lately), swap, shrink and requeue."""
    swap: bool = True
    """Replace a node by a spare."""
    in_place: bool = True
    """Restart a worker on its node."""
    shrink: bool = True
    """Go on with fewer replicas (jobs with least_replicas)."""
    start_wait_seconds: Seconds = RecoveryPolicy().start_wait_ns / SECOND_NS
    """Wait up to this for the workers of a replacement to start; where they need longer, jobs with
    least_replicas go on without them and take them in when they have."""
    degraded: bool = True
    """Go on after the loss of a network card."""
    rebalance: bool = True
    """Give micro-batches of a replica that computes slowly to others (job.micro_batches)."""
    peer_memory: bool = True
    """Restore from the memory of nodes."""
    fabric_checks: bool = False
    """Measure nodes that come back against each other when they are idle."""
    quarantine_breaker_share: Fraction = 0.02
    """Part of the fleet that may be evicted within an hour before a person is asked."""
    answer_minutes: Annotated[float, Meta(ge=0, le=1e6)] = 30.0
    """Until a person who is there answers the core (with yes), or sees that a loss diverges."""


class PeoplePart(Section, frozen=True, kw_only=True):
    """Those who answer, repair and undo: when they are there. Time begins on a Monday."""

    first_hour: Annotated[int, Meta(ge=0, le=23)] = 0
    """Hour of the day from which on they are there."""
    last_hour: Annotated[int, Meta(ge=1, le=24)] = 24
    """Hour at which they leave."""
    weekends: bool = True
    """They are there on Saturdays and Sundays too."""
    on_call_minutes: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    """Until somebody answers at other times; "none": policy.answer_minutes after they are back."""
    repairs: bool = False
    """Repairs go on while they are there alone; otherwise at any hour."""
    divergences_per_day: Rate = 0.0
    """How often the loss of a running job diverges: when a person has seen it, it goes back."""
    rollback_minutes: Minutes = 60.0
    """How much of its training before the divergence is made again."""


class QueuePart(Section, frozen=True, kw_only=True):
    """The order of the queue: settings of the core ([queue] of a site's policy file)."""

    age_weight: Weight = _QUEUE.age_weight
    """Priority gained by waiting age_full_days."""
    age_full_days: Days = _QUEUE.age_full_ns / DAY_NS
    """Waiting longer gains nothing more."""
    fair_share_weight: Weight = _QUEUE.fair_share_weight
    """Priority of a team that used nothing of its share."""
    half_life_days: Days = _QUEUE.half_life_ns / DAY_NS
    """Of what teams used, in the fair share."""
    size_weight: Weight = _QUEUE.size_weight
    """Priority of a job of 100,000 GPUs; smaller ones by their logarithm."""
    short_weight: Weight = _QUEUE.short_weight
    """Priority of a job with the shortest time limit; longer ones by their logarithm."""
    backfill_depth: Natural = _QUEUE.backfill_depth
    """Jobs looked at behind the first that does not fit; 0: none start."""
    reservations: Count = _QUEUE.reservations
    """Blocked jobs that get a reserved start: one is EASY backfill, all are conservative."""
    starving_hours: Hours = _QUEUE.starving_ns / HOUR_NS
    """A job that waited this long gets a reservation of its own."""
    firm_after_hours: Hours = _QUEUE.firm_after_ns / HOUR_NS
    """The same after this, or when it has waited as long as all that waits would take on the whole
    fleet, if that is longer."""
    starving_reservations: Natural = _QUEUE.starving_reservations
    """Jobs that have one for that reason on the same nodes at a time."""
    least_run_minutes: Minutes = _QUEUE.least_run_ns / (HOUR_NS / 60)
    """No job is preempted before it ran so long."""


class WorkloadPart(Section, frozen=True, kw_only=True):
    """Which jobs come."""

    kind: Literal["one-job", "multi-tenant", "csv"] = "one-job"
    """One job on all GPUs, a generated mix of teams, or a recorded trace."""
    file: str = ""
    """Recorded trace: CSV with submit_time, duration, gpu_num and, if there, user and team."""
    jobs_per_day: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """Submissions a day, fewer at night and on weekends: the load follows from it; "none": as many
    as give workload.utilisation."""
    least_gpus: Natural = 1
    """Smaller jobs are left out."""
    teams: Count = 6
    """Teams that submit; they own equal parts of the fleet."""
    utilisation: Annotated[float, Meta(gt=0, le=MOST_LOAD)] = 0.8
    """Wanted load, reached by the number of jobs: 0.8 asks for 80 % of all GPU time, from the first
    hour on (jobs that would be under way then are submitted at the beginning)."""
    largest_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """Largest job as a part of the fleet."""
    limit_factor: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    """Time limits that users give, as a multiple of what a job takes; at its limit a job goes back
    into the queue. 0: nobody gives any, so backfill never knows when a job will be gone."""
    preemptible_share: Fraction = 0.3
    """Jobs that may be preempted."""
    user_error_share: Fraction = 0.1
    """Jobs that end early by a mistake of their user."""
    starved_days: Annotated[float, Meta(ge=0, le=1e4)] = 7.0
    """A job that waits longer is a violation, where the load is below 1; 0: not looked at."""


class ChaosPart(Section, frozen=True, kw_only=True):
    """A small fleet with every message played, and everything that can go wrong at once."""

    nodes: Annotated[int, Meta(ge=2, le=64)] = 8
    """Nodes; drawn between half of it and it."""
    jobs: Annotated[int, Meta(ge=1, le=32)] = 3
    """Jobs; drawn between one and it."""
    fault_minutes: Minutes = 20.0
    """Faults are injected this long; then they stop and everything must recover."""
    quiet_minutes: Minutes = 60.0
    """Time for every job to go on and end after the faults stopped."""
    faults: Annotated[float, Meta(ge=0, le=1000)] = 12.0
    """Mean number of injected faults, drawn from all kinds."""
    loss: Below1 = 0.02
    """Messages lost."""
    duplicates: Below1 = 0.05
    """Messages that arrive twice."""
    reordered: Below1 = 0.1
    """Messages that overtake others."""
    skew_seconds: Seconds = 30.0
    """Largest error of a node's clock."""
    busy: Fraction = 0.5
    """Seeds with a busy site: teams with quotas, classes of service that preempt, time limits,
    budgets, arrays, dependencies, and people who reserve nodes and change all of it."""
    partitioned: Fraction = 0.5
    """Busy sites on which some nodes are a partition for some teams, or for short jobs only."""
    programs: Fraction = 0.3
    """Jobs that are programs, which nothing but the lease of their node keeps from writing."""
    kinds: tuple[str, ...] = ()
    """Kinds of faults to inject; empty: all (``phalanx simulate faults`` lists them)."""


class Scenario(Section, frozen=True, kw_only=True):
    """A world and what happens in it."""

    name: str = "unnamed"
    """Name, for reports."""
    about: str = ""
    """What it shows, in a sentence."""
    days: Annotated[float, Meta(ge=1e-6, le=3660)] = 1.0
    """Length (--days)."""
    fleet: FleetPart = FleetPart()
    job: JobPart = JobPart()
    checkpoint: CheckpointPart = CheckpointPart()
    restart: RestartPart = RestartPart()
    detection: DetectionPart = DetectionPart()
    repair: RepairPart = RepairPart()
    faults: FaultPart = FaultPart()
    policy: PolicyPart = PolicyPart()
    people: PeoplePart = PeoplePart()
    queue: QueuePart = QueuePart()
    workload: WorkloadPart = WorkloadPart()
    variants: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Worlds that ``phalanx simulate compare`` puts beside this one: lists of key=value."""
    chaos: ChaosPart | None = None
    """Present: every message is played on a small fleet under gray faults."""
