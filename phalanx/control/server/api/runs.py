"""Endpoints of the tracker: runs, and what was found about them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

from msgspec import Meta, structs

from phalanx.control.server.api.plan import job_plan
from phalanx.control.server.http.endpoints import EVERYBODY, WRITERS, ApiError, Call, Endpoints
from phalanx.control.wire import api_types as t
from phalanx.observe.store.journal import Journal
from phalanx.observe.tracker.findings import RunFinding
from phalanx.observe.tracker.run_table import RunTable, described, run_table
from phalanx.observe.tracker.runs import (
    MOST_NOTE_LETTERS,
    MOST_NOTES,
    MOST_TAGS,
    Note,
    Run,
    RunDifference,
    differences,
)


class FindingsQuery(t.In, frozen=True):
    job: t.Number = 0  # 0: of all
    limit: t.Limit = 200


class RunsQuery(t.In, frozen=True):
    after: t.Number = 0
    limit: t.Limit = 100


class RunTableQuery(t.In, frozen=True):
    limit: t.Limit = 1000  # the newest


class DiffQuery(t.In, frozen=True):
    a: t.JobId
    b: t.JobId


class NoteIn(t.In, frozen=True):
    text: Annotated[str, Meta(min_length=1, max_length=MOST_NOTE_LETTERS)]


class TagsIn(t.In, frozen=True):
    tags: Annotated[tuple[t.Word, ...], Meta(max_length=MOST_TAGS)]


class FindingsOut(t.Out, frozen=True):
    findings: list[RunFinding]


class RunsOut(t.Out, frozen=True):
    runs: list[Run]
    next_after: int


class DiffOut(t.Out, frozen=True):
    a: int
    b: int
    differences: list[RunDifference]


def _team(call: Call, job: int) -> str:
    known = call.leading.core.view.jobs.get(job)
    if known is not None:
        return known.spec.team
    run = call.server.journal.run(job)
    return run.team if run is not None else "?"


ENDPOINTS = Endpoints()


@ENDPOINTS.add("GET /v1/findings", EVERYBODY, query=FindingsQuery)
async def findings(call: Call) -> FindingsOut:
    """List what the detectors found, newest last."""
    asked = call.query
    found = await call.server.read(call.server.journal.findings, asked.job, asked.limit)
    seen = {job: call.sees(_team(call, job)) for job in {each.job for each in found if each.job}}
    return FindingsOut(findings=[each for each in found if seen.get(each.job, True)])


@ENDPOINTS.add("GET /v1/jobs/{job}/incidents", EVERYBODY, params=t.JobPath)
async def job_incidents(call: Call) -> FindingsOut:
    """List a job's incidents, with evidence.

    Findings, and gangs that had to form again.
    """
    found = await call.server.read(call.server.journal.findings, call.job().id, 1000)
    return FindingsOut(findings=found)


def the_run(call: Call, number: int) -> Run:
    """A run that the caller may see."""
    job = call.leading.core.view.jobs.get(number)
    run_history = call.leading.run_history
    run = run_history.run_of(job) if job is not None else call.server.journal.run(number)
    if run is None or not call.sees(run.team):
        raise ApiError(404, "no_such_run", f"there is no run {number}")
    return run


@ENDPOINTS.add("GET /v1/runs", EVERYBODY, query=RunsQuery)
async def list_runs(call: Call) -> RunsOut:
    """List runs.

    In the order of their jobs.
    """
    rows = await call.server.read(call.server.journal.runs, call.query.after, call.query.limit)
    seen = [run for _, run in rows if call.sees(run.team)]
    more = rows[-1][0] if len(rows) == call.query.limit else 0
    return RunsOut(runs=seen, next_after=more)


@ENDPOINTS.add("GET /v1/runs/table", EVERYBODY, query=RunTableQuery)
async def table_of_runs(call: Call) -> RunTable:
    """List the newest runs as short rows, with the settings in which they differ."""
    table = await call.server.read(_run_table, call.server.journal, call.query.limit, call.sees)
    recorder = call.leading.hub.gangs.metrics.recorder
    latest = recorder.latest if recorder is not None else {}
    rows_now = [
        structs.replace(
            row, last=row.last | {n: latest[row.job][n] for n in row.last if n in latest[row.job]}
        )
        if row.job in latest
        else row
        for row in table.rows
    ]
    return structs.replace(table, rows=rows_now)


def _run_table(journal: Journal, limit: int, sees: Callable[[str], bool]) -> RunTable:
    """Read by a thread."""
    rows = [(job, described(body)) for job, body in journal.newest_runs(limit)]
    return run_table([(job, found) for job, found in rows if sees(found.run.team)])


@ENDPOINTS.add("GET /v1/runs/diff", EVERYBODY, query=DiffQuery)
async def diff_runs(call: Call) -> DiffOut:
    """Compare two runs."""
    a, b = call.query.a, call.query.b
    return DiffOut(a=a, b=b, differences=differences(the_run(call, a), the_run(call, b)))


@ENDPOINTS.add("GET /v1/runs/{job}", EVERYBODY, params=t.JobPath)
async def show_run(call: Call) -> Run:
    """Show a run: configuration, code, packages, placements, checkpoints, end.

    With what the planner expects of it.
    """
    run = the_run(call, call.path.job)
    if "prediction" not in run.plan and call.path.job in call.leading.core.view.jobs:
        with suppress(ApiError):  # then it is told without
            await job_plan(call)
    return the_run(call, call.path.job)


@ENDPOINTS.add(
    "POST /v1/runs/{job}/notes", WRITERS, params=t.JobPath, body=NoteIn, status=201, audited=True
)
async def add_note(call: Call) -> Run:
    """Add a note to a run."""
    run = the_run(call, call.path.job)
    note = Note(time=time.time(), text=call.body.text, by=call.token.name)
    run.notes = [*run.notes[1 - MOST_NOTES :], note]
    call.leading.run_history.change(call.path.job, run)
    return run


@ENDPOINTS.add("PUT /v1/runs/{job}/tags", WRITERS, params=t.JobPath, body=TagsIn, audited=True)
async def set_tags(call: Call) -> Run:
    """Set a run's tags."""
    run = the_run(call, call.path.job)
    run.tags = list(dict.fromkeys(call.body.tags))
    call.leading.run_history.change(call.path.job, run)
    return run
