"""What a site decides: every number that the core weighs, in one tree of frozen structs.

Times are integer nanoseconds, shares are parts per million: decisions are made on integers.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from phalanx.cluster.units import HOUR_NS, MILLION, SECOND_NS

DAY_NS = 24 * HOUR_NS


class PolicySection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all parts of the policy."""


class Quota(PolicySection, frozen=True):
    """GPUs that a team owns; unused ones of others may be borrowed up to ``ceiling``."""

    gpus: int  # that the team owns
    ceiling: int = 0  # GPUs that it may hold, borrowed ones too; 0: no limit on borrowing
    weight: int = 1  # of its fair share


class Qos(PolicySection, frozen=True):
    """A class of service."""

    priority: int = 0  # added to the job's own
    teams: tuple[str, ...] = ()  # that may use it; (): all
    preempts: bool = False  # may evict preemptible jobs of lower priority
    most_gpus_per_job: int = 0  # of one job; 0: no limit
    most_gpus: int = 0  # of all its running jobs together; 0: no limit
    most_time_ns: int = 0  # longest time limit of its jobs; 0: no limit


class Partition(PolicySection, frozen=True):
    """Rules of a partition; nodes name theirs. One that is not in the policy has none."""

    priority: int = 0  # added to the job's own
    teams: tuple[str, ...] = ()  # that may use it; (): all
    most_time_ns: int = 0  # longest time limit of its jobs; 0: no limit


class QueuePolicy(PolicySection, frozen=True):
    """Order of the queue."""

    quotas: dict[str, Quota] = {}  # a team that is not here owns nothing and may borrow
    # Classes of service by name.
    qos: dict[str, Qos] = field(default_factory=lambda: {"normal": Qos()})
    partitions: dict[str, Partition] = {}  # rules by name; nodes name their partition
    half_life_ns: int = 7 * DAY_NS  # of usage, in the fair share
    age_weight: int = 1000  # priority gained by waiting ``age_full_ns``
    age_full_ns: int = 7 * DAY_NS  # waiting longer gains nothing more
    fair_share_weight: int = 1000  # priority of a team that used nothing of its share
    size_weight: int = 0  # priority of a job of 100,000 GPUs; smaller ones by their logarithm
    # Priority of a job with a time limit of a minute or less; a longer one has less by its
    # logarithm, and one of three months, or without a limit, none.
    short_weight: int = 3000
    quota_weight: int = 10_000  # priority of a job that fits into what its team owns
    backfill_depth: int = 1000  # jobs looked at behind the first that does not fit; 0: none start
    reservations: int = 1  # blocked jobs that get a reserved start
    grace_ns: int = 60 * SECOND_NS  # of a preempted job, to make a checkpoint
    least_run_ns: int = 10 * 60 * SECOND_NS  # no job is preempted before it ran so long
    # ``least_run_ns`` doubles whenever a job is sent away, up to this; a starved job has all of it.
    most_stay_ns: int = 12 * HOUR_NS
    starving_ns: int = 2 * DAY_NS  # a job that waited this long gets a reservation of its own
    # The same among jobs of one priority after this, or, where that is longer, when a job has
    # waited as long as all that waits would take on the whole fleet. From ``starving_ns`` on: off.
    firm_after_ns: int = 2 * DAY_NS
    starving_reservations: int = 1  # jobs that have one for that reason on the same nodes
    replan_ns: int = 30 * SECOND_NS  # a reserved start is looked for anew this often
    unbounded_ns: int = 30 * DAY_NS  # assumed of a job without limit or number of steps
    delay_ns: int = 100_000_000  # changes are gathered this long before the queue is looked at
    most_jobs: int = 500_000  # jobs that have not ended, of all users and operators
    most_array: int = 10_000  # jobs of one array, and of all arrays of a workflow


class UserPolicy(PolicySection, frozen=True):
    """What users may ask for; operators (the role admin) may ask for anything."""

    most_priority: int = 100  # of their jobs; lower ones are always allowed
    most_retries: int = 100  # of one job
    most_jobs: int = 50_000  # jobs of one user that have not ended
    # Hosts whose webhooks users' jobs may be told to; the server posts there for them. (): none.
    webhook_hosts: tuple[str, ...] = ()
    mail_domains: tuple[str, ...] = ()  # of addresses that their jobs may mail to; (): none


class SparePolicy(PolicySection, frozen=True):
    """Nodes kept free to replace others."""

    nodes: int = 0  # in the fleet's pool; -1: from failure rate and repair time (binomial)
    quantile_ppm: int = 990_000  # chance that the pool suffices, where ``nodes`` is -1
    # Chance of a node to be away at a moment. 0: as nodes of each kind and age are seen to fail,
    # times how long they are seen to stay away.
    down_ppm: int = 0
    # Each such part of the fleet keeps its own; what they share, a failure can take at once.
    per: Literal["fleet", "pod", "leaf", "rack", "power", "switch"] = "fleet"


class FabricPolicy(PolicySection, frozen=True):
    """What the network gives one GPU; placement predicts communication by it."""

    domain_bytes_per_second: int = 450_000_000_000  # NVLink 4, one way
    nic_bytes_per_second: int = 50_000_000_000  # 400 Gbit/s
    leaf_oversubscription_ppm: int = MILLION  # rate of the NICs below over that of a leaf's uplinks
    # The same of a pod's uplinks, as in Llama 3's fabric ("The Llama 3 Herd of Models", 3.3.1).
    pod_oversubscription_ppm: int = 7 * MILLION
    hop_ns: int = 800  # latency of a switch


class FabricCheckPolicy(PolicySection, frozen=True):
    """Checks of the network between nodes that the server has made by itself, on idle nodes.

    Off by default: a check is a job that nobody submitted, and its nodes are taken while it lasts.
    """

    at_join: bool = False  # of nodes that join, come back, or passed their test after suspicion
    # Of the nodes of a gang, before it starts on so many or more; 0: never.
    before_nodes: int = 0
    limit_ns: int = 120 * SECOND_NS  # a check lasts, and a gang waits for it, no longer than this
    settle_ns: int = 10 * SECOND_NS  # a wave of nodes is measured once, so long after its last one
    pause_ns: int = 60 * SECOND_NS  # after a check that came to nothing; doubled each time in a row
    fresh_ns: int = HOUR_NS  # what was measured within this is not measured again for a gang
    most_nodes: int = 64  # measured at a time for nodes that join
    slower_ppm: int = 100_000  # of the usual rate that a slow part lacks
    confirmations: int = 2  # checks in a row that must find a node slow before anything follows
    drain: bool = True  # it is drained then; False: only people are told
    most_drained_ppm: int = 50_000  # of the fleet within an hour, but always one node
    user: str = "nobody"  # whom checks run as, where agents switch users


class TimeoutPolicy(PolicySection, frozen=True):
    """What timeouts are derived from; see ``timeouts.derive``."""

    heartbeat_ns: int = 5 * SECOND_NS  # an agent is heard of this often
    missed_heartbeats: int = 4  # so many in a row mean that a node is silent
    round_trip_ns: int = SECOND_NS  # of a message, at the 99.9th percentile
    reconnect_ns: int = 5 * SECOND_NS  # an agent may be restarted, unless peers miss its workers
    hang_steps: int = 5  # a step may take this many times its usual time
    least_hang_ns: int = 60 * SECOND_NS  # no missing step is a hang before
    # The same of programs that report steps: they evaluate and save, nobody knows for how long.
    least_program_hang_ns: int = 600 * SECOND_NS
    first_step_ns: int = 1800 * SECOND_NS  # for compilation, start of NCCL, first read of data
    # A program that reports no steps and has no CPU, GPU or output activity for so long is
    # reported (0: never), and restarted where the site or its job wants that.
    idle_ns: int = 1800 * SECOND_NS
    idle_restart: bool = False  # restart such a program
    lease_margin_ns: int = 30 * SECOND_NS  # added to leases of keepers and workers
    slack_ppm: int = 2 * MILLION  # a phase may take this many times what is expected


class HealthPolicy(PolicySection, frozen=True):
    """Suspicion, tests, quarantine, and what stops them."""

    test_ns: int = 5 * 60 * SECOND_NS  # a check may take this long
    strikes: int = 2  # suspicions within ``strike_window_ns`` that mean quarantine
    strike_window_ns: int = DAY_NS  # for counting strikes
    breaker_nodes_ppm: int = 20_000  # of the fleet that may be evicted before a person is asked
    breaker_least_nodes: int = 4  # so many may always be evicted
    breaker_window_ns: int = HOUR_NS  # within which evictions count
    false_alarms_per_week: int = 1  # of a detector; beyond that it only warns
    # A node with one of these is quarantined until somebody repairs it, whatever a test says.
    harmful: tuple[str, ...] = ("silent_corruption",)
    # A node with one of these is quarantined until it passes a test.
    doubtful: tuple[str, ...] = ("slow_compute", "slow_host", "slow_network")
    lemon_score: int = 3_000  # thousandths of an incident, decayed, that make a node a lemon
    lemon_half_life_ns: int = 14 * DAY_NS  # of that score
    # Interruptions of a node with eight GPUs, as long as nobody knows better (Llama 3's: 419 in 54
    # days of 2,048 nodes). It counts as one that was seen; the fleet's own outweigh it in time.
    failures_per_million_node_days: int = 3_789
    failure_window_ns: int = 90 * DAY_NS  # of the fleet's own that are counted


class RecoveryPolicy(PolicySection, frozen=True):
    """Which ways out of a failure a site allows."""

    # predicted: the way that is expected to lose least GPU time. fixed: the first that there is of
    # in place (unless the node failed lately), swap, shrink and requeue, for comparison.
    order: Literal["predicted", "fixed"] = "predicted"
    in_place: bool = True  # workers restart where they are
    swap: bool = True  # another node takes the slot
    shrink: bool = True  # an elastic job goes on with fewer replicas
    remap: bool = True  # a job goes on with another mapping on the nodes that are left
    rebalance: bool = True  # a slow replica gets fewer micro-batches
    degraded: bool = True  # a slow node is kept
    peer_memory: bool = True  # state is restored from the memory of nodes
    # Snapshots in memory of a job that waits for nodes are kept this long; 0: dropped at once.
    keep_memory_ns: int = 600 * SECOND_NS
    # A gang that lacks nodes may keep its others, idle, for up to this long where the missing ones
    # are expected sooner; 0: it never waits.
    wait_ns: int = 1800 * SECOND_NS
    # A gang waits up to this for the workers of a node that comes into it to start. Where they need
    # longer, an elastic one goes on without them and takes them in when they have.
    start_wait_ns: int = 60 * SECOND_NS
    settle_ns: int = 50_000_000  # failures that belong together are gathered this long
    room_retry_ns: int = 30 * SECOND_NS  # pause after a full disk, longer each time
    room_tries: int = 8  # attempts to write a last checkpoint that there is no room for
    # Storage that fails (an I/O error, a mount that is away or read-only) is tried again after
    # this, twice as long each time up to ``most_back_off_ns``.
    storage_retry_ns: int = SECOND_NS
    storage_tries: int = 12  # so many failures of storage in a row end the job
    repair_ns: int = DAY_NS  # until a node that left is back, usually
    # The same step failing so often in a row, at the same rank or with the same error, and without
    # a step that became safe in between, stops the job.
    same_step_failures: int = 3
    # A program that is cancelled has so long between SIGTERM and its end; 0: none.
    cancel_grace_ns: int = 30 * SECOND_NS
    failed_formations: int = 10  # formations in a row that fail for no part's fault stop it too
    # A job's retries (``submit --retries``) are for this long; progress gives them back at once.
    retry_interval_ns: int = 24 * HOUR_NS
    healthy_ns: int = 10 * 60 * SECOND_NS  # a gang that ran so long has all retries again
    # The first failure is recovered from at once, the second after this, each further one after
    # twice as long. What comes from outside (a signal, a lost node or peer) waits only where it
    # came many times without any progress, and then for seconds.
    back_off_ns: int = 10 * SECOND_NS
    most_back_off_ns: int = 5 * 60 * SECOND_NS  # longest pause
    # An agent that ends within this after it was told to start a job, before a step, may have ended
    # through it: at the second, the job is kept out of the queue until an operator lets it in.
    agent_end_ns: int = 60 * SECOND_NS
    spike_rollback_steps: int = 0  # steps to go back after a loss spike; 0: only report it
    skip_batch: bool = False  # leave out the batch of the spike after going back
    grow_after_ns: int = 10 * 60 * SECOND_NS  # least time between reshapes that are not forced


class StoragePolicy(PolicySection, frozen=True):
    """The remote storage that all jobs share."""

    bytes_per_second: int = 0  # of all jobs together; 0: not limited
    flushes: int = 0  # jobs that may write at a time; 0: any number


class PricePolicy(PolicySection, frozen=True):
    """What a GPU costs, for reports."""

    micro_dollars_per_gpu_hour: int = 2_500_000  # price of a GPU
    watts_per_gpu: int = 1_200  # of a GPU that works, with its share of the server
    idle_watts_per_gpu: int = 300  # of one that does not
    grams_co2_per_kwh: int = 400  # of the grid
    budget_warning_ppm: int = 800_000  # share of a job's budget at which it warns
    # A submission that is planned above one of these is taken only when it is confirmed; 0: any.
    ask_above_hours: int = 0  # of running
    ask_above_dollars: int = 0  # of all its GPUs
    ask_above_kwh: int = 0  # of energy


class JoinPolicy(PolicySection, frozen=True):
    """Who becomes a node."""

    # Of new nodes. auto: whoever has a join token that carries approval; manual: a person decides.
    approval: Literal["auto", "manual"] = "auto"
    # Of a known node that comes with another key, as after it was installed anew. own: by itself
    # where the server is heard on this machine alone, or started the agents; else a person decides.
    rekey: Literal["own", "auto", "manual"] = "own"


class Policy(PolicySection, frozen=True):
    """Everything a site decides."""

    queue: QueuePolicy = QueuePolicy()
    users: UserPolicy = UserPolicy()
    spares: SparePolicy = SparePolicy()
    fabric: FabricPolicy = FabricPolicy()
    timeouts: TimeoutPolicy = TimeoutPolicy()
    health: HealthPolicy = HealthPolicy()
    recovery: RecoveryPolicy = RecoveryPolicy()
    storage: StoragePolicy = StoragePolicy()
    price: PricePolicy = PricePolicy()
    join: JoinPolicy = JoinPolicy()
    fabric_checks: FabricCheckPolicy = FabricCheckPolicy()
    ended_jobs: int = 50_000  # jobs remembered one by one; older ones only in their team's sums
