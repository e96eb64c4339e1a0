"""Which job runs next.

The core calls ``schedule`` when something changed; the functions named ``on_…`` tell the queue what
happened to a job meanwhile. Everything the queue remembers is in ``QueueState``, which is part of a
snapshot; what can be computed from it and the view is not.
"""

from __future__ import annotations

from msgspec import Struct

from phalanx.cluster.fleet import NodeState
from phalanx.cluster.job import Job, JobSpec, Placement
from phalanx.cluster.placement import Refusal, held_by, place, request_of
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.state import View


class Start(Struct, frozen=True, tag=True):
    """Start a job here. The queue has already taken the nodes from the fleet."""

    job: int
    placement: Placement
    reason: Reason


class Preempt(Struct, frozen=True, tag=True):
    """Stop a job within ``grace_ns`` and put it back into the queue, for another one."""

    job: int
    for_job: int
    grace_ns: int
    reason: Reason


class Resize(Struct, frozen=True, tag=True):
    """Give an elastic job more replicas, or take some (reclaim without preemption)."""

    job: int
    replicas: int
    reason: Reason


Decision = Start | Preempt | Resize


class Pending(Struct, frozen=True):
    """What a pending job waits for."""

    reason: Reason
    estimated_start_ns: int | None  # None: nobody can say
    priority: dict[str, int]  # its parts, which sum to the priority


class QueueState(Struct):
    """What the queue remembers; encodes into a snapshot as it is."""

    usage: dict[str, int] = {}  # decayed GPU-nanoseconds by team
    usage_at_ns: int = 0


class Queue:
    """First come, first served."""

    def __init__(self, state: QueueState) -> None:
        self.state = state

    def on_pending(self, view: View, job: Job) -> None:
        """A job became eligible, or came back after a preemption or failure."""

    def on_stopped(self, view: View, job: Job, gpu_ns: int) -> None:
        """A job gave its nodes back, having used this many GPU-nanoseconds since its start."""

    def on_withdrawn(self, view: View, job: Job) -> None:
        """A pending job was cancelled or held."""

    def schedule(self, view: View) -> list[Decision]:
        """What to start, stop or resize now. Takes the nodes of what it starts."""
        decisions: list[Decision] = []
        for number in list(view.pending):
            job = view.jobs[number]
            found = place(view.fleet, request_of(job))
            if isinstance(found, Refusal):
                break
            take(view, job, found)
            decisions.append(Start(number, found, reason("first_in_line")))
        return decisions

    def next_wake_ns(self, view: View) -> int | None:
        """When to look again although nothing happened (a reservation begins, a job ages)."""
        return None

    def explain(self, view: View, job: int) -> Pending:
        """What a pending job waits for, and until when."""
        ahead = list(view.pending).index(job)
        return Pending(reason("behind", jobs=ahead), None, {"order": 0})


def take(view: View, job: Job, placement: Placement) -> None:
    """Gives a job the nodes of its placement."""
    fleet, shape = view.fleet, job.spec.gang
    masks = placement.gpus or tuple((1 << shape.slot_gpus) - 1 for _ in placement.nodes)
    for node, mask in zip(placement.nodes, masks, strict=True):
        fleet.take(job.id, node, held_by(fleet, shape, node, mask))
    for node in placement.spares:
        why = reason("spare_of_job", job=job.id)
        fleet.set_state(node, NodeState.SPARE, view.now_ns, why, spare_for=job.id)


def admit(view: View, spec: JobSpec) -> Reason | None:
    """Why a submission can never run here; None: it can."""
    job = Job(id=0, spec=spec, submitted_ns=view.now_ns)
    found = place(view.fleet, request_of(job, spec.gang.floor))
    return found.reason if isinstance(found, Refusal) and not found.ever else None
