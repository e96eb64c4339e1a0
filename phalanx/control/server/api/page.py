"""Endpoints that the page alone needs: login links, and the fleet as columns, now and then."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.forecast.why import explainer
from phalanx.cluster.jobs.job import JobState
from phalanx.cluster.node import NodeState
from phalanx.control.server.agent_link.gang_watch import slowness
from phalanx.control.server.api.server import token_out
from phalanx.control.server.history.fleet_history import FleetFrame, frame_of
from phalanx.control.server.http.endpoints import EVERYBODY, ApiError, Call, Endpoints
from phalanx.control.server.http.views import job_out, team_of, waits
from phalanx.control.server.security.auth import (
    LINK_HOURS,
    SESSION_HOURS,
    AuthError,
    Token,
    Tokens,
)
from phalanx.control.wire import api_types as t
from phalanx.observe.tracker.runs import removed

if TYPE_CHECKING:
    from phalanx.control.server.process import Server

STATES = tuple(state.name.lower() for state in NodeState)
QUEUE_SHOWN = 60
HIDDEN = -1  # a job that the caller may not know of


class FleetQuery(t.In, frozen=True):
    at_ns: t.Nanoseconds = 0  # 0: now


class FleetJob(t.Out, frozen=True):
    id: int
    name: str
    team: str
    state: str
    generation: int
    gpus: int


class FleetOut(t.Out, frozen=True):
    """A fleet as columns, one entry a node: 12,500 nodes are a few hundred kilobytes."""

    time_ns: int
    sequence: int  # of the last event; 0: this is the past
    first_ns: int  # the past begins here
    states: tuple[str, ...]
    names: list[str]
    state: list[int]  # index of ``states``
    job: list[int]  # 0: none; -1: one that the caller may not know of
    gpus: list[int]
    free_gpus: list[int]
    leaf: list[int]
    pod: list[int]
    leaves: list[str]
    pods: list[str]
    connected: list[int]  # 1: its agent speaks to this server; empty in the past
    slowness: list[float | None]  # own time of a step over the median of its peers; empty as well
    temperature: list[float | None]  # of the hottest GPU, in Celsius; empty where none is known
    jobs: list[FleetJob]


class QueueRow(t.Out, frozen=True):
    job: t.JobOut
    waits: t.Waits


class QueueOut(t.Out, frozen=True):
    """Who waits, the next one first, as many as a person reads."""

    time_ns: int
    pending: int
    rows: list[QueueRow]


class SavedOut(t.Out, frozen=True):
    """A step that can be gone back to. ``proof``: how far it is known to be whole."""

    step: int
    where: Literal["memory", "durable"]
    proof: Literal["sealed", "committed", "restored", "refused"]
    detail: str


class SavedList(t.Out, frozen=True):
    saved: list[SavedOut]  # newest first


class LoginLink(t.Out, frozen=True):
    """Good once, and not for long: the page exchanges it for a token of its own."""

    url: str
    code: str
    expires_ns: int


class Session(t.Out, frozen=True):
    secret: str
    token: t.TokenOut


ENDPOINTS = Endpoints()


@ENDPOINTS.add("GET /v1/fleet", EVERYBODY, query=FleetQuery)
async def fleet(call: Call) -> FleetOut:
    """Show the fleet as columns, now or at an earlier time."""
    core, history = call.leading.core, call.server.history
    first, _ = await call.server.read(history.bounds)
    frame: FleetFrame | None = None
    if call.query.at_ns:
        frame = await call.server.read(history.at, call.query.at_ns)
    past = frame is not None
    if frame is None:
        frame = frame_of(core, call.leading.controller.clock.now_ns())
    known, count = core.view.fleet, len(frame.state)
    columns = known.columns
    connected = np.zeros(0 if past else count, np.int64)
    if not past and count:
        connected[np.fromiter(call.leading.hub.connections, np.int64)] = 1
    return FleetOut(
        time_ns=frame.time_ns,
        sequence=0 if past else core.sequence,
        first_ns=first,
        states=STATES,
        names=[node.name for node in known.nodes[:count]],
        state=frame.state.tolist(),
        job=_seen(call, frame.job),
        gpus=columns.gpus[:count].tolist(),
        free_gpus=frame.free_gpus.tolist(),
        leaf=columns.leaf[:count].tolist(),
        pod=columns.pod[:count].tolist(),
        leaves=known.places["leaf"],
        pods=known.places["pod"],
        connected=connected.tolist(),
        slowness=[] if past else slowness(call.leading.hub.gangs.watch, count),
        temperature=[] if past else _temperature(call, count),
        jobs=_jobs(call, frame),
    )


def _temperature(call: Call, count: int) -> list[float | None]:
    known = call.leading.hub.gangs.metrics.temperature
    return [known.get(node) for node in range(count)] if known else []


def _seen(call: Call, job: Column) -> list[int]:
    if not call.token.team:
        return list(job.tolist())
    core = call.leading.core
    hidden = [n for n in np.unique(job).tolist() if n and not call.sees(team_of(core, n))]
    return list(np.where(np.isin(job, hidden), HIDDEN, job).tolist())


def _jobs(call: Call, frame: FleetFrame) -> list[FleetJob]:
    jobs = []
    for number, state, generation in frame.jobs:
        job = call.leading.core.view.jobs.get(number)
        if not call.sees(team_of(call.leading.core, number)):
            continue
        jobs.append(
            FleetJob(
                id=number,
                name=job.spec.name if job else f"job {number}",
                team=job.spec.team if job else "",
                state=state,
                generation=generation,
                gpus=job.spec.gang.gpus(job.wanted_replicas) if job else 0,
            )
        )
    return jobs


@ENDPOINTS.add("GET /v1/jobs/{job}/checkpoints", EVERYBODY, params=t.JobPath)
async def job_checkpoints(call: Call) -> SavedList:
    """List the steps that a job can restart from, with the evidence for each."""
    job = call.job()
    gang = job.gang
    saved = []
    if job.committed and gang is not None:
        nodes = len(job.placement.nodes) if job.placement else 0
        detail = f"in the memory of {nodes} nodes, each kept by a neighbour too"
        saved.append(SavedOut(step=job.committed, where="memory", proof="sealed", detail=detail))
    if gang is not None and gang.source != "none" and gang.restored:
        detail = f"every byte checked when generation {job.generation} loaded it ({gang.source})"
        where: Literal["memory", "durable"] = (
            "durable" if gang.restored in job.durables else "memory"
        )
        saved.append(SavedOut(step=gang.restored, where=where, proof="restored", detail=detail))
    if gang is not None:
        saved += [
            SavedOut(step=0, where="memory", proof="refused", detail=source)
            for source in gang.refused
        ]
    proved = {each.step for each in saved if each.proof == "restored"}
    paths = {
        each["step"]: each["path"] for each in call.leading.run_history.run_of(job).checkpoints
    }
    gone = await call.server.read(_gone, paths)
    saved += [
        SavedOut(step=step, where="durable", proof="committed", detail="its manifest is written")
        for step in reversed(job.durables)
        if step not in proved and step not in gone
    ]
    return SavedList(saved=sorted(saved, key=lambda each: -each.step))


def _gone(paths: dict[int, str]) -> set[int]:
    """Steps whose folders retention, or somebody, has removed."""
    return {step for step, path in paths.items() if removed(path)}


@ENDPOINTS.add("GET /v1/queue", EVERYBODY)
async def queue(call: Call) -> QueueOut:
    """List waiting jobs: what each waits for, and until when."""
    core = call.leading.core
    seen = [
        job for number in core.view.pending if call.sees((job := core.view.jobs[number]).spec.team)
    ]
    held = [
        job
        for job in core.view.jobs.values()
        if job.state == JobState.PENDING
        and job.id not in core.view.pending
        and call.sees(job.spec.team)
    ]
    rows = []
    asked, answers = core.sequence, explainer(core.queue, core.view)
    for job in [*seen[:QUEUE_SHOWN], *held[:QUEUE_SHOWN]][:QUEUE_SHOWN]:
        if asked != core.sequence:
            asked, answers = core.sequence, explainer(core.queue, core.view)
        now = call.leading.controller.clock.now_ns()
        rows.append(QueueRow(job=job_out(core, job, now), waits=waits(core, job, [], now, answers)))
        await asyncio.sleep(0)  # a long queue must not hold up the sockets
    in_line = dict.fromkeys(job.id for job in seen)
    rows.sort(key=lambda row: (row.job.id not in in_line, -sum(row.waits.priority.values())))
    now = call.leading.controller.clock.now_ns()
    return QueueOut(time_ns=now, pending=len(seen) + len(held), rows=rows)


@ENDPOINTS.add("POST /v1/login-links", EVERYBODY, status=201, audited=True)
async def login_link(call: Call) -> LoginLink:
    """Make a link that opens the page once, with the caller's rights."""
    secret, made = await call.server.read(_made_link, call.leading.tokens, call.token)
    return LoginLink(url=_address(call.server.url, secret), code=secret, expires_ns=made.expires_ns)


def _made_link(tokens: Tokens, token: Token) -> tuple[str, Token]:
    tokens.bound_sessions(token.id)
    return tokens.create(
        "login",
        token.name,
        team=token.team,
        hours=LINK_HOURS,
        until_ns=token.expires_ns,
        grants=token.role,
        parent=token.id,
    )


def login_url(server: Server) -> str:
    """A link for the administrator who has just started a server."""
    if server.leading is None:
        return server.url + "/"
    tokens, parent = server.leading.tokens, ""
    with suppress(OSError, AuthError):
        admin = server.options.admin_token or server.options.state / "admin.token"
        parent = tokens.check(admin.read_text().strip()).id
    made = tokens.create("login", "admin", hours=LINK_HOURS, grants="admin", parent=parent)
    return _address(server.url, made[0])


def _address(url: str, secret: str) -> str:
    # Behind the hash: a browser does not send it, so that no proxy or log keeps it.
    return f"{url}/#/login/{secret}"


@ENDPOINTS.add("POST /v1/login", ("login",), status=201, audited=True)
async def login(call: Call) -> Session:
    """Exchange the code of a login link for a token.

    The code is worthless from now on.
    """
    tokens, link = call.leading.tokens, call.token
    if not tokens.spend(link.id):
        raise ApiError(409, "link_used", "this link was used already: ask for another")
    session = partial(tokens.create, link.grants, link.name, team=link.team, parent=link.parent)
    parent = tokens.get(link.parent)
    secret, made = await call.server.read(
        session, hours=SESSION_HOURS, until_ns=parent.expires_ns if parent is not None else 0
    )
    await call.server.read(tokens.drop, link.id)
    return Session(secret=secret, token=token_out(made))
