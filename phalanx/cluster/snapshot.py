"""The whole state of a core as bytes, and back."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from phalanx.cluster.context import Context, FlushState, HealthState, Question, Timer
from phalanx.cluster.fleet.fleet import Fleet, FleetState
from phalanx.cluster.jobs.dependencies import remember, remember_trial
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.ledger.ledger import Ledger, LedgerState
from phalanx.cluster.pipeline_runs import rebuild
from phalanx.cluster.policy import Policy, Quota
from phalanx.cluster.queue.decisions import QueueState
from phalanx.cluster.queue.queue import Queue
from phalanx.cluster.state import ClusterPipeline, Reservation, View
from phalanx.cluster.units import SECOND_NS

# Of all that a log holds: events, commands, snapshots of the core and what the shell remembers.
# tests/control/test_log_format.py fails when one of them changes and this number does not.
FORMAT_VERSION = 23
OLDEST_FORMAT = 1  # that is still read: what came later has defaults
WHOLE_NANOSECONDS = 19  # from this one on events of pipelines have no fractions of seconds


class SnapshotError(Exception):
    """A snapshot that cannot be used."""


class VersionError(SnapshotError):
    """A snapshot of a format that this version does not read."""


class CoreState(Struct, kw_only=True):
    """A core as a snapshot keeps it."""

    version: int
    sequence: int
    epoch: int
    now_ns: int
    policy: Policy
    fleet: FleetState
    jobs: list[ClusterJob]
    pending: list[int]
    active: list[int]
    quotas: dict[str, Quota]
    reservations: dict[str, Reservation]
    queue: QueueState
    ledger: LedgerState
    health: HealthState
    flush: FlushState
    questions: dict[int, Question]
    array_waiting: dict[int, list[int]]
    ended: list[int]
    timers: list[Timer]
    timer_order: int
    schedule_ns: int | None
    queue_wake_ns: int | None = None
    capacity_changed: bool
    next_job: int
    next_question: int
    pipelines: list[ClusterPipeline] = []
    next_pipeline: int = 1


def dump(ctx: Context) -> bytes:
    """Everything that the next events will need."""
    view = ctx.view
    state = CoreState(
        version=FORMAT_VERSION,
        sequence=ctx.sequence,
        epoch=ctx.epoch,
        now_ns=view.now_ns,
        policy=view.policy,
        fleet=view.fleet.dump(),
        jobs=list(view.jobs.values()),
        pending=list(view.pending),
        active=list(view.active),
        quotas=view.quotas,
        reservations=view.reservations,
        queue=ctx.queue.state,
        ledger=ctx.ledger.dump(),
        health=ctx.health,
        flush=ctx.flush,
        questions=ctx.questions,
        array_waiting={key: list(value) for key, value in view.array_waiting.items()},
        ended=list(ctx.ended),
        timers=sorted(ctx.timers),
        timer_order=ctx.timer_order,
        schedule_ns=ctx.schedule_ns,
        queue_wake_ns=ctx.queue_wake_ns,
        capacity_changed=ctx.capacity_changed,
        next_job=ctx.next_job,
        next_question=ctx.next_question,
        pipelines=list(view.pipelines.values()),
        next_pipeline=ctx.next_pipeline,
    )
    return msgspec.json.encode(state)  # and not msgpack, whose integers end at 2**64


def load(data: bytes) -> Context:
    """The context that ``dump`` wrote."""
    try:
        version = msgspec.json.decode(data, type=_StateVersion).version
        if not OLDEST_FORMAT <= version <= FORMAT_VERSION:
            raise VersionError(
                f"the snapshot is of format {version}, and this version reads formats "
                f"{OLDEST_FORMAT} to {FORMAT_VERSION}: start the version that wrote it"
            )
        if version < WHOLE_NANOSECONDS:
            data = _in_nanoseconds(data)
        state = msgspec.json.decode(data, type=CoreState)
    except msgspec.MsgspecError as error:
        raise SnapshotError(f"the snapshot is damaged: {error}; use the one before it") from None
    view = View(Fleet.load(state.fleet), state.policy, state.now_ns)
    view.jobs = {job.id: job for job in state.jobs}
    view.pending = dict.fromkeys(state.pending)
    view.active = dict.fromkeys(state.active)
    view.quotas, view.reservations = state.quotas, state.reservations
    ctx = Context(view, Queue(state.queue), Ledger.load(state.ledger), state.epoch)
    ctx.sequence = state.sequence
    ctx.health, ctx.flush, ctx.questions = state.health, state.flush, state.questions
    view.array_waiting = {key: dict.fromkeys(v) for key, v in state.array_waiting.items()}
    ctx.ended = dict.fromkeys(state.ended)
    ctx.timers, ctx.timer_order = state.timers, state.timer_order
    ctx.schedule_ns, ctx.capacity_changed = state.schedule_ns, state.capacity_changed
    ctx.queue_wake_ns = state.queue_wake_ns
    ctx.next_job, ctx.next_question = state.next_job, state.next_question
    view.pipelines, ctx.next_pipeline = (
        {run.id: run for run in state.pipelines},
        state.next_pipeline,
    )
    rebuild(ctx)
    for job in view.jobs.values():
        remember_trial(ctx, job)
        if not job.ended:
            remember(ctx, job)
        if job.kept is not None:
            ctx.kept[job.id] = None
        if job.allocated:
            ctx.note_wants(job)
    return ctx


class _StateVersion(Struct):
    version: int


def _in_nanoseconds(data: bytes) -> bytes:
    """A snapshot whose pipelines' events had their times in seconds."""
    state = msgspec.json.decode(data)
    for run in state.get("pipelines", ()):
        for event in run.get("events", ()):
            event["time_ns"] = round(event.pop("time") * SECOND_NS)
    return msgspec.json.encode(state)
