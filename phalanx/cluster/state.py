"""The whole state of the core, as the modules that change it see it."""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import Job
from phalanx.cluster.policy import Policy, Quota


class Reservation(Struct, frozen=True, kw_only=True):
    """Nodes kept for a time: for teams, or empty for maintenance when it names none."""

    name: str
    start_ns: int
    end_ns: int
    nodes: tuple[int, ...] = ()
    gpus: int = 0
    teams: tuple[str, ...] = ()


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
        self.jobs: dict[int, Job] = {}
        self.pending: dict[int, None] = {}
        self.active: dict[int, None] = {}
        self.array_waiting: dict[int, dict[int, None]] = {}
        self.quotas: dict[str, Quota] = dict(policy.queue.quotas)
        self.reservations: dict[str, Reservation] = {}
