"""Endpoints of what jobs and nodes measured."""

from __future__ import annotations

import time
from typing import Annotated

from msgspec import Meta, field, structs

from phalanx.control.server.http.endpoints import EVERYBODY, Call, Endpoints
from phalanx.control.wire import api_types as t
from phalanx.observe.store import query
from phalanx.observe.store.recorder import JOB_TABLES, owner_of
from phalanx.observe.tracker.runs import MOST_SCORE_LETTERS, NAME_LETTERS

NAME = rf"[{NAME_LETTERS}]{{1,{MOST_SCORE_LETTERS}}}"
NAMES = rf"^{NAME}(,{NAME}){{0,63}}$"
DEFAULT_NAMES = "loss,grad_norm,learning_rate,tokens_per_second,mfu,step_seconds"


class MetricsQuery(t.In, frozen=True):
    """Times are seconds since 1970; 0: from the beginning, or until now."""

    names: Annotated[str, Meta(pattern=NAMES)] = DEFAULT_NAMES
    from_: t.Seconds = field(default=0.0, name="from")
    to: t.Seconds = 0.0
    points: Annotated[int, Meta(ge=1, le=5000)] = 800


class RanksQuery(t.In, frozen=True):
    from_: t.Seconds = field(default=0.0, name="from")
    to: t.Seconds = 0.0
    columns: Annotated[int, Meta(ge=1, le=2000)] = 300
    parts: bool = False


class DevicesQuery(t.In, frozen=True):
    from_: t.Seconds = field(default=0.0, name="from")
    to: t.Seconds = 0.0
    points: Annotated[int, Meta(ge=1, le=2000)] = 300


class MetricsOut(t.Out, frozen=True):
    job: int
    tier: str
    series: dict[str, query.Series]


class RanksOut(t.Out, frozen=True):
    """A row a rank (or a node, of large gangs), a column a step. Of large gangs whole steps are
    left out where each tells its own work."""

    job: int
    tier: str
    rows: str
    steps: list[int]
    time: list[float]
    ranks: list[int]
    nodes: list[str]
    step_seconds: list[query.Numbers]
    own_seconds: list[query.Numbers]
    parts: dict[str, query.Numbers]


class DevicesOut(t.Out, frozen=True):
    """Of a node: numbers of the host, and of each GPU."""

    node: str
    tier: str
    host: dict[str, query.Series]
    gpus: dict[str, list[query.Numbers]]
    time: list[float]


def span_of(asked: MetricsQuery | RanksQuery | DevicesQuery) -> tuple[int, int]:
    """Nanoseconds that a question is about."""
    return int(asked.from_ * 1e9), int((asked.to or time.time() + 1) * 1e9)


ENDPOINTS = Endpoints()


@ENDPOINTS.add("GET /v1/jobs/{job}/metrics", EVERYBODY, params=t.JobPath, query=MetricsQuery)
async def job_metrics(call: Call) -> MetricsOut:
    """Give a job's metrics over time."""
    owner, asked = owner_of(call.job().id), call.query
    names = list(dict.fromkeys(asked.names.split(",")))
    answer = await call.server.read(
        query.series,
        call.server.metrics,
        owner,
        JOB_TABLES,
        names,
        span_of(asked),
        asked.points,
    )
    return MetricsOut(job=call.path.job, tier=answer.tier, series=answer.series)


@ENDPOINTS.add("GET /v1/nodes/{node}/metrics", EVERYBODY, params=t.NodePath, query=DevicesQuery)
async def node_metrics(call: Call) -> DevicesOut:
    """Give the metrics of a node's devices over time."""
    name = call.leading.core.view.fleet.nodes[call.node()].name
    found = await call.server.read(
        query.devices, call.server.metrics, f"node:{name}", span_of(call.query), call.query.points
    )
    return DevicesOut(node=name, **structs.asdict(found))


@ENDPOINTS.add("GET /v1/jobs/{job}/ranks", EVERYBODY, params=t.JobPath, query=RanksQuery)
async def job_ranks(call: Call) -> RanksOut:
    """Give the step times of a job's ranks over time."""
    owner, asked = owner_of(call.job().id), call.query
    answer = await call.server.read(
        query.ranks,
        call.server.metrics,
        owner,
        span_of(asked),
        asked.columns,
        parts=asked.parts,
    )
    return RanksOut(job=call.path.job, **structs.asdict(answer or query.RankAnswer()))
