"""What the queue decides, and what it remembers."""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.jobs.job import Placement
from phalanx.cluster.reasons import Reason, reason, span_of


class Start(Struct, frozen=True, tag=True):
    """Start a job here. The queue has already taken the nodes from the fleet."""

    job: int
    placement: Placement
    reason: Reason


class Preempt(Struct, frozen=True, tag=True):
    """Stop a job within ``grace_ns`` and put it back into the queue, for another one."""

    job: int
    for_job: int  # 0: for nobody, its nodes must be empty
    grace_ns: int
    reason: Reason
    window: str = ""  # of the reservation that its nodes must be empty for


class Resize(Struct, frozen=True, tag=True):
    """Give an elastic job more replicas, or take some (reclaim without preemption)."""

    job: int
    replicas: int
    reason: Reason


class CheckFirst(Struct, frozen=True, tag=True):
    """Measure the fabric between nodes before a job starts there; they are kept for it."""

    job: int
    nodes: tuple[int, ...]
    until_ns: int  # it starts then, measured or not


def why_starts(
    placement: Placement, wanted: int, granted_ns: int, priority: int, *, backfilled: bool
) -> Reason:
    """Why a job starts there; ``granted_ns``: its limit, where that is shorter than it asked."""
    where = str(placement.reason)
    if placement.replicas < wanted:
        return reason("elastic_start", replicas=placement.replicas, wanted=wanted, where=where)
    if granted_ns:
        return reason("backfilled_shorter", limit=span_of(granted_ns), where=where)
    if backfilled:
        return reason("backfilled", where=where)
    return reason("first_in_line", priority=priority, where=where)


Decision = Start | Preempt | Resize | CheckFirst


class Pending(Struct, frozen=True):
    """What a pending job waits for."""

    reason: Reason
    estimated_start_ns: int | None  # None: unknown
    priority: dict[str, int]  # its parts, which sum to the priority
    unknown: str = ""  # why nobody can say when it starts


class Reserved(Struct, frozen=True, kw_only=True):
    """A start that a blocked job is promised, and the nodes kept for it."""

    job: int
    start_ns: int
    nodes: tuple[int, ...]
    made_ns: int
    sure: bool = True  # all that runs there has a time limit; False: an estimate
    firm: bool = False  # not even jobs of higher priority may use the nodes
    asked: tuple[int, ...] = ()  # jobs that were told to leave or shrink for it
    waits: bool = False  # for the rest of its nodes: these have its memory, and stay empty

    @property
    def empty_ns(self) -> int:
        """When others must have left the nodes."""
        return self.made_ns if self.waits else self.start_ns


class QueueState(Struct):
    """What the queue remembers; encodes into a snapshot as it is."""

    usage: dict[str, int] = {}  # decayed GPU-milliseconds by team
    usage_at_ns: int = 0
    held: dict[str, int] = {}  # GPUs by team, as counted into usage
    reserved: dict[int, Reserved] = {}  # by job
    tried_ns: dict[int, int] = {}  # by job: when it last looked for somebody to stop, in vain
    windows: dict[str, tuple[int, ...]] = {}  # nodes of reservations that name only GPUs
    short: dict[str, None] = {}  # of these: which lack nodes, as was told
