"""Endpoints about jobs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import structs

from phalanx.cluster.jobs.job import ClusterJob, JobSpec
from phalanx.cluster.protocol.commands import Command, job_of
from phalanx.cluster.protocol.events import Event, Step, Submit, SubmitWorkflow
from phalanx.control.server.http.endpoints import EVERYBODY, WRITERS, Call, Endpoints
from phalanx.control.server.http.job_rights import refuse_unconfirmed, rightful
from phalanx.control.server.http.planned_job import cost_estimate
from phalanx.control.server.http.views import (
    event_out,
    job_detail,
    job_out,
    visible,
    waits,
    why_of,
)
from phalanx.control.server.store.interface import (
    EventStore,
    Row,
    UnreadableError,
    commands_of,
    event_of,
)
from phalanx.control.wire import api_types as t

logger = logging.getLogger("phalanx.server")

SCAN_EVENTS = 20_000  # looked through at most for one answer
PAGE = 1000
DECISIONS_TOLD = 20
ENDPOINTS = Endpoints()


@ENDPOINTS.add("POST /v1/jobs", WRITERS, body=t.Submission, status=201, audited=True)
async def submit_job(call: Call) -> t.JobsSubmitted:
    """Put a job into the queue."""
    spec, told = await rightful(call, call.body.spec, call.body.work)
    refuse_unconfirmed(call, [spec], confirmed=call.body.confirmed)
    return _submitted(call, await call.order(Submit(spec=spec)), told, [spec])


@ENDPOINTS.add("POST /v1/workflows", WRITERS, body=t.Workflow, status=201, audited=True)
async def submit_workflow(call: Call) -> t.JobsSubmitted:
    """Queue jobs that depend on each other: all or none."""
    steps: list[Step] = []
    notes: list[str] = []
    for asked in call.body.steps:
        spec, words = await rightful(call, asked.spec, asked.work)
        steps.append(Step(name=asked.name, spec=spec, after=asked.after))
        notes += words
    specs = [step.spec for step in steps]
    refuse_unconfirmed(call, specs, confirmed=call.body.confirmed)
    done = await call.order(SubmitWorkflow(steps=tuple(steps)))
    return _submitted(call, done, list(dict.fromkeys(notes)), specs)


def _submitted(
    call: Call, done: t.Done, remarks: list[str], specs: Sequence[JobSpec]
) -> t.JobsSubmitted:
    """Nobody is to look in vain for what was asked and is not so, nor for what it will take."""
    core, now_ns = call.leading.core, call.leading.controller.clock.now_ns()
    plans = tuple(spec.plan for spec in specs if spec.plan is not None)
    answer = structs.asdict(done) | {"message": "; ".join([done.message, *remarks])}
    first = core.view.jobs.get(done.jobs[0]) if done.jobs else None
    return t.JobsSubmitted(
        **answer,
        plans=plans,
        estimate=cost_estimate(core.view.policy.price, specs),
        start=waits(core, first, [], now_ns).start if first is not None else "",
    )


@ENDPOINTS.add("GET /v1/jobs", EVERYBODY, query=t.JobsQuery)
async def list_jobs(call: Call) -> t.JobList:
    """List the jobs that the caller may see.

    In the order of their numbers.
    """
    core, query = call.leading.core, call.query
    if query.fold:
        return _folded(call)
    listed: list[t.JobOut] = []
    known, now_ns = core.view.jobs.values(), call.leading.controller.clock.now_ns()
    for job in reversed(known) if query.newest else known:
        if job.id <= query.after or not call.sees(job.spec.team):
            continue
        if not _asked_for(query, job):
            continue
        if len(listed) == query.limit:
            if query.newest:
                break
            return t.JobList(jobs=listed, next_after=listed[-1].id)
        listed.append(_with_pace(call, job_out(core, job, now_ns)))
    return t.JobList(jobs=listed[::-1] if query.newest else listed, next_after=0)


def _asked_for(query: t.JobsQuery, job: ClusterJob) -> bool:
    return query.state in ("all", job.state) or (query.state == "live" and not job.ended)


def _folded(call: Call) -> t.JobList:
    """The same with one entry an array, which says how many of its jobs are in which state."""
    core, query = call.leading.core, call.query
    states: dict[int, Counter[str]] = {}
    entries: list[ClusterJob] = []
    for job in core.view.jobs.values():
        if not call.sees(job.spec.team) or not _asked_for(query, job):
            continue
        first = job.array_parent not in states
        if job.array_parent:
            states.setdefault(job.array_parent, Counter())[job.state] += 1
        if (first or not job.array_parent) and job.id > query.after:
            entries.append(job)
    shown = entries[-query.limit :] if query.newest else entries[: query.limit]
    more = len(entries) > len(shown) and not query.newest
    now_ns, listed = call.leading.controller.clock.now_ns(), []
    for job in shown:
        made = _with_pace(call, job_out(core, job, now_ns))
        if made.array is not None:
            counts = dict(states[job.array_parent])
            made = structs.replace(made, array=structs.replace(made.array, states=counts))
        listed.append(made)
    return t.JobList(jobs=listed, next_after=listed[-1].id if more else 0)


def _with_pace(call: Call, job: t.JobOut) -> t.JobOut:
    """A job with what its newest step was like."""
    recorder = call.leading.hub.gangs.metrics.recorder
    row = recorder.latest.get(job.id) if recorder is not None else None
    if not row:
        return job
    names = ("loss", "tokens_per_second", "mfu")
    return structs.replace(job, **{name: row.get(name) for name in names})


@ENDPOINTS.add("GET /v1/jobs/{job}", EVERYBODY, params=t.JobPath)
async def show_job(call: Call) -> t.JobDetail:
    """Show a job and its submission."""
    found = job_detail(call.leading.core, call.job(), call.leading.controller.clock.now_ns())
    return structs.replace(found, job=_with_pace(call, found.job))


@ENDPOINTS.add("GET /v1/jobs/{job}/why", EVERYBODY, params=t.JobPath)
async def why_job(call: Call) -> t.Waits:
    """Say why a job is in its state and what it waits for.

    With the last decisions about it.
    """
    job = call.job()
    now_ns = call.leading.controller.clock.now_ns()
    decided = last_decisions(call.leading.recent, job.id)
    return waits(call.leading.core, job, decided, now_ns)


def last_decisions(recent: Iterable[tuple[Event, Sequence[Command]]], job: int) -> list[t.Why]:
    """Why the last commands about a job were given, the newest first.

    Several commands of one decision have one reason, which is told once.
    """
    decided: list[t.Why] = []
    for _, commands in reversed(list(recent)):
        for command in commands:
            why = why_of(command.body.reason)
            if job_of(command.body) == job and decided[-1:] != [why]:
                decided.append(why)
    return decided[:DECISIONS_TOLD]


@ENDPOINTS.add("GET /v1/events", EVERYBODY, query=t.EventsQuery)
async def list_events(call: Call) -> t.EventList:
    """List logged events, and what was decided about each."""
    query, last = call.query, call.leading.core.sequence
    if query.until_ns:
        last = await call.server.read(_last_until, call.server.store, last, query.until_ns)
    if query.after < 0:
        return await _newest(call, last)
    after, until = query.after, min(last, query.after + SCAN_EVENTS)
    listed: list[t.EventOut] = []
    while after < until and len(listed) < query.limit:
        page = await call.server.read(_page, call.server.store, after, until)
        shown = _told(call, page)
        after = page[-1][0].sequence if page else until
        if len(listed) + len(shown) > query.limit:
            shown = shown[: query.limit - len(listed)]
            after = shown[-1].sequence
        listed += shown
    return t.EventList(events=listed, next_after=after)


async def _newest(call: Call, last: int) -> t.EventList:
    """The newest events that fit, found from the end."""
    query, until, first = call.query, last, max(0, last - SCAN_EVENTS)
    listed: list[t.EventOut] = []
    while until > first and len(listed) < query.limit:
        after = max(first, until - PAGE)
        page = await call.server.read(_page, call.server.store, after, until)
        listed, until = [*_told(call, page), *listed], after
    return t.EventList(events=listed[-query.limit :], next_after=last)


def _told(call: Call, page: Sequence[tuple[Event, list[Command]]]) -> list[t.EventOut]:
    """Those of a page that are asked for, and that the caller may see."""
    # The commands of the newest events are stored with the events after them.
    fresh = {event.sequence: commands for event, commands in call.leading.recent}
    listed = []
    for event, stored in page:
        commands = stored or fresh.get(event.sequence, ())
        about = not call.query.job or call.query.job in _jobs(event, commands)
        about = about and (bool(commands) or not call.query.decided)
        if about and visible(call.leading.core, event, commands, call.sees):
            listed.append(event_out(event, commands))
    return listed


def _last_until(store: EventStore, last: int, until_ns: int) -> int:
    """The last event that had happened at a time; events are stored in the order of their times."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        rows = store.events(middle, 1)
        if rows and rows[0][1] <= until_ns:
            low = rows[0][0]
        else:
            high = middle
    return low


def _jobs(event: Event, commands: Sequence[Command]) -> list[int]:
    return [job_of(event.body), *(job_of(command.body) for command in commands)]


def _page(store: EventStore, after: int, until: int) -> list[tuple[Event, list[Command]]]:
    found = [event for row in store.events(after, PAGE) if row[0] <= until for event in _read(row)]
    rows = store.commands([event.sequence for event in found])
    commands = {row[0]: commands_of(row) for row in rows}
    return [(event, commands.get(event.sequence, [])) for event in found]


def _read(row: Row) -> list[Event]:
    """The event in a row; old ones that make no sense any more are left out, and said."""
    try:
        return [event_of(row)]
    except UnreadableError as error:
        logger.error("%s", error)
        return []
