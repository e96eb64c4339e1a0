"""The whole state of the core, as the modules that change it see it."""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import ClusterJob, JobSpec
from phalanx.cluster.pipelines.events import AnyEvent, TaskResult
from phalanx.cluster.policy import Policy, Quota


class Reservation(Struct, frozen=True, kw_only=True):
    """Nodes kept for a time: for teams, or empty for maintenance when it names none."""

    name: str
    start_ns: int
    end_ns: int
    nodes: tuple[int, ...] = ()
    gpus: int = 0
    teams: tuple[str, ...] = ()


class TaskJob(Struct, frozen=True, omit_defaults=True):
    """The job of a task that is under way."""

    job: int
    ranks: bool = False  # of its two jobs the first
    release: bool = False  # it only says what the last release scored


class ClusterPipeline(Struct, kw_only=True, omit_defaults=True):
    """A run of a pipeline. Its events are its state: played again, they lead to the same."""

    id: int
    user: str
    team: str
    folder: str
    work: dict[str, JobSpec]  # by task
    ranks: dict[str, JobSpec] = {}  # those that work before, by task
    manifest: JobSpec | None = None  # writes down what the run did, once it has ended
    results: dict[str, TaskResult] = {}  # by key, of earlier runs and of this one
    approved: dict[str, None] = {}  # keys of what a person agreed to
    events: list[AnyEvent] = []
    under_way: dict[str, TaskJob] = {}  # by task
    newest_jobs: dict[str, int] = {}  # by task, for people
    began_ns: int = 0
    ended_ns: int = 0  # 0: it has not
    wake_ns: int = 0  # when time alone changes something; 0: never

    @property
    def run_folder(self) -> str:
        """Its name among the runs in the pipeline's folder."""
        return f"server-{self.id:04d}"


class FabricCheck(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A check of the fabric that is under way: a job on these nodes."""

    job: int
    nodes: tuple[int, ...]
    for_job: int = 0  # a gang that waits for it; 0: nodes came


class FabricCheckState(Struct, kw_only=True, omit_defaults=True):
    """What is remembered of the checks that the policy ``fabric_checks`` wants."""

    running: FabricCheck | None = None  # at most one: two would disturb each other
    due: dict[int, int] = {}  # nodes to be measured when they are idle: since when
    measured_ns: dict[int, int] = {}  # nodes that were found well since they came: when last
    slow: dict[int, int] = {}  # nodes by how many checks in a row found them slow
    waits: dict[int, int] = {}  # gangs that wait for a check: until when
    drained_ns: list[int] = []  # within the last hour
    failures: int = 0  # checks in a row that came to nothing
    not_before_ns: int = 0  # no check is made before
    wake_ns: int = 0  # when it is looked at again; 0: when something happens


class View:
    """What the queue and placement may read: fleet, jobs, policy and the time.

    ``pending`` holds the eligible jobs in the order in which they became eligible; ``active`` those
    that hold nodes; ``array_waiting`` members of arrays that were not let in yet, by the first job.
    All are kept by the core; dictionaries are used as ordered sets.
    """

    def __init__(self, fleet: Fleet, policy: Policy, now_ns: int = 0) -> None:
        self.fleet = fleet
        self.policy = policy
        self.now_ns = now_ns
        self.jobs: dict[int, ClusterJob] = {}
        self.pending: dict[int, None] = {}
        self.active: dict[int, None] = {}
        self.array_waiting: dict[int, dict[int, None]] = {}
        self.quotas: dict[str, Quota] = dict(policy.queue.quotas)
        self.reservations: dict[str, Reservation] = {}
        self.pipelines: dict[int, ClusterPipeline] = {}
        self.fabric_checks = FabricCheckState()
