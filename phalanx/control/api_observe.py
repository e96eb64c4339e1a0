"""Endpoints about what was measured."""

from __future__ import annotations

import time
from typing import Annotated, Literal

from msgspec import Meta, field, structs

from phalanx.cluster.job import HOUR_NS
from phalanx.cluster.ledger import BUCKETS
from phalanx.cluster.report import Share, report
from phalanx.control import api_types as t
from phalanx.control.endpoints import EVERYBODY, WRITERS, ApiError, Call, Endpoint
from phalanx.control.fast_socket import framed
from phalanx.control.wire import Profile, encode
from phalanx.observe import query
from phalanx.observe.findings import Finding
from phalanx.observe.ledger_time import slices
from phalanx.observe.recorder import JOB_TABLES, owner_of
from phalanx.observe.runs import (
    MOST_NOTE_LETTERS,
    MOST_NOTES,
    MOST_TAGS,
    Difference,
    Note,
    Run,
    differences,
)

Seconds = Annotated[float, Meta(ge=0, le=1e11)]
NAMES = r"^[a-z0-9_]{1,64}(,[a-z0-9_]{1,64}){0,63}$"
SAMPLE_NS = 10_000_000_000
DEFAULT_NAMES = "loss,grad_norm,learning_rate,tokens_per_second,mfu,step_seconds"


class MetricsQuery(t.In, frozen=True):
    """Times are seconds since 1970; 0: from the beginning, or until now."""

    names: Annotated[str, Meta(pattern=NAMES)] = DEFAULT_NAMES
    from_: Seconds = field(default=0.0, name="from")
    to: Seconds = 0.0
    points: Annotated[int, Meta(ge=1, le=5000)] = 800


class RanksQuery(t.In, frozen=True):
    from_: Seconds = field(default=0.0, name="from")
    to: Seconds = 0.0
    columns: Annotated[int, Meta(ge=1, le=2000)] = 300
    parts: bool = False


class MetricsOut(t.Out, frozen=True):
    job: int
    tier: str
    series: dict[str, query.Series]


class RanksOut(t.Out, frozen=True):
    """A row a rank (or a node, of large gangs), a column a step."""

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


def span_of(asked: MetricsQuery | RanksQuery | DevicesQuery) -> tuple[int, int]:
    """Nanoseconds that a question is about."""
    return int(asked.from_ * 1e9), int((asked.to or time.time() + 1) * 1e9)


async def job_metrics(call: Call) -> MetricsOut:
    """Metrics of a job over time."""
    owner, asked = owner_of(call.job().id), call.query
    names = list(dict.fromkeys(asked.names.split(",")))
    found = await call.server.read(
        query.series,
        call.server.metrics,
        owner,
        JOB_TABLES,
        names,
        span_of(asked),
        asked.points,
    )
    return MetricsOut(job=call.path.job, tier=found.tier, series=found.series)


class DevicesOut(t.Out, frozen=True):
    """Of a node: numbers of the host, and of each GPU."""

    node: str
    tier: str
    host: dict[str, query.Series]
    gpus: dict[str, list[query.Numbers]]
    time: list[float]


class DevicesQuery(t.In, frozen=True):
    from_: Seconds = field(default=0.0, name="from")
    to: Seconds = 0.0
    points: Annotated[int, Meta(ge=1, le=2000)] = 300


async def node_metrics(call: Call) -> DevicesOut:
    """What the devices of a node did."""
    name = call.leading.core.view.fleet.nodes[call.node()].name
    found = await call.server.read(
        query.devices, call.server.metrics, f"node:{name}", span_of(call.query), call.query.points
    )
    return DevicesOut(node=name, **structs.asdict(found))


async def job_ranks(call: Call) -> RanksOut:
    """What every rank of a job did."""
    owner, asked = owner_of(call.job().id), call.query
    found = await call.server.read(
        query.ranks,
        call.server.metrics,
        owner,
        span_of(asked),
        asked.columns,
        parts=asked.parts,
    )
    return RanksOut(job=call.path.job, **structs.asdict(found or query.RankAnswer()))


class LedgerQuery(t.In, frozen=True):
    """``bins`` 0: no timeline. ``by``: what its entries are."""

    bins: Annotated[int, Meta(ge=0, le=2000)] = 0
    by: Literal["bucket", "cause", "team"] = "bucket"
    from_: Seconds = field(default=0.0, name="from")
    to: Seconds = 0.0


class FindingsQuery(t.In, frozen=True):
    job: t.Number = 0  # 0: of all
    limit: t.Limit = 200


class RunsQuery(t.In, frozen=True):
    after: t.Number = 0
    limit: t.Limit = 100


class DiffQuery(t.In, frozen=True):
    a: t.JobId
    b: t.JobId


class NoteIn(t.In, frozen=True):
    text: Annotated[str, Meta(min_length=1, max_length=MOST_NOTE_LETTERS)]


class TagsIn(t.In, frozen=True):
    tags: Annotated[tuple[t.Word, ...], Meta(max_length=MOST_TAGS)]


class Slice(t.Out, frozen=True):
    """A stretch of time: GPU-nanoseconds as texts, since JSON's numbers are not exact."""

    from_: float = field(name="from")
    to: float
    buckets: dict[str, str]


class JobLedgerOut(t.Out, frozen=True):
    """The buckets sum to the allocation exactly."""

    allocation_gpu_ns: str
    buckets: dict[str, str]
    by_cause: dict[str, dict[str, str]]
    estimated: tuple[str, ...]
    dollars: float
    gpu_hours: float
    goodput: float
    ettr: float
    watt_hours: int
    timeline: list[Slice]


class FindingsOut(t.Out, frozen=True):
    findings: list[Finding]


class RunsOut(t.Out, frozen=True):
    runs: list[Run]
    next_after: int


class DiffOut(t.Out, frozen=True):
    a: int
    b: int
    differences: list[Difference]


NOTHING = Share(
    gpu_ns=0,
    buckets=dict.fromkeys(BUCKETS, 0),
    by_cause={},
    ettr_ppm=0,
    goodput_ppm=0,
    gpu_hours=0,
    micro_dollars=0,
    watt_hours=0,
)


async def job_ledger(call: Call) -> JobLedgerOut:
    """Where a job's GPU time went."""
    number, core = call.job().id, call.leading.core
    share = report(core.ledger, core.view.policy.price).jobs.get(number, NOTHING)
    return await ledger_out(call, f"job:{number}", share)


async def ledger_out(call: Call, owner: str, share: Share) -> JobLedgerOut:
    """A share with its timeline."""
    asked, core = call.query, call.leading.core
    timeline: list[Slice] = []
    if asked.bins:
        suffix = "" if asked.by == "bucket" else f"#{asked.by}"
        now_ns, now = call.leading.chronicle.ledger_now()
        end = int(asked.to * 1e9) or now_ns
        rows = await call.server.read(
            call.server.journal.ledger, owner + suffix, int(asked.from_ * 1e9), end
        )
        if end >= now_ns and owner + suffix in now:
            rows = [*rows, (now_ns, now[owner + suffix])]
        # Without a beginning, everything counts that there is.
        first = int(asked.from_ * 1e9) or (rows[0][0] - SAMPLE_NS if rows else now_ns)
        timeline = [
            Slice(from_=start / 1e9, to=stop / 1e9, buckets={k: str(v) for k, v in sums.items()})
            for start, stop, sums in slices(rows, first, end, asked.bins)
        ]
    price = core.view.policy.price
    return JobLedgerOut(
        allocation_gpu_ns=str(share.gpu_ns),
        buckets={name: str(gpu_ns) for name, gpu_ns in share.buckets.items()},
        by_cause={c: {k: str(v) for k, v in lost.items()} for c, lost in share.by_cause.items()},
        estimated=share.estimated,
        dollars=share.gpu_ns * price.micro_dollars_per_gpu_hour / HOUR_NS / 1e6,
        gpu_hours=share.gpu_ns / HOUR_NS,
        goodput=share.goodput_ppm / 1e6,
        ettr=share.ettr_ppm / 1e6,
        watt_hours=share.watt_hours,
        timeline=timeline,
    )


async def fleet_ledger(call: Call) -> JobLedgerOut:
    """Where the GPU time of the fleet (or of the caller's team) went, over time."""
    core = call.leading.core
    found = report(core.ledger, core.view.policy.price)
    team = call.token.team
    if not team:
        return await ledger_out(call, "fleet", found.fleet)
    return await ledger_out(call, f"team:{team}", found.teams.get(team, NOTHING))


def _team(call: Call, job: int) -> str:
    known = call.leading.core.view.jobs.get(job)
    if known is not None:
        return known.spec.team
    run = call.server.journal.run(job)
    return run.team if run is not None else "?"


async def findings(call: Call) -> FindingsOut:
    """Findings, newest last."""
    asked = call.query
    found = await call.server.read(call.server.journal.findings, asked.job, asked.limit)
    seen = {job: call.sees(_team(call, job)) for job in {each.job for each in found if each.job}}
    return FindingsOut(findings=[each for each in found if seen.get(each.job, True)])


async def job_incidents(call: Call) -> FindingsOut:
    """What happened to a job: findings, and gangs that had to form again."""
    found = await call.server.read(call.server.journal.findings, call.job().id, 1000)
    return FindingsOut(findings=found)


def the_run(call: Call, number: int) -> Run:
    """A run that the caller may see."""
    job = call.leading.core.view.jobs.get(number)
    chronicle = call.leading.chronicle
    run = chronicle.run_of(job) if job is not None else call.server.journal.run(number)
    if run is None or not call.sees(run.team):
        raise ApiError(404, "no_such_run", f"there is no run {number}")
    return run


async def list_runs(call: Call) -> RunsOut:
    """Runs in the order of their jobs."""
    rows = await call.server.read(call.server.journal.runs, call.query.after, call.query.limit)
    seen = [run for _, run in rows if call.sees(run.team)]
    more = rows[-1][0] if len(rows) == call.query.limit else 0
    return RunsOut(runs=seen, next_after=more)


async def show_run(call: Call) -> Run:
    """One run."""
    return the_run(call, call.path.job)


async def diff_runs(call: Call) -> DiffOut:
    """What differs between two runs."""
    a, b = call.query.a, call.query.b
    return DiffOut(a=a, b=b, differences=differences(the_run(call, a), the_run(call, b)))


async def add_note(call: Call) -> Run:
    """Adds a note to a run."""
    run = the_run(call, call.path.job)
    note = Note(time=time.time(), text=call.body.text, by=call.token.name)
    run.notes = [*run.notes[1 - MOST_NOTES :], note]
    call.leading.chronicle.change(call.path.job, run)
    return run


async def set_tags(call: Call) -> Run:
    """Gives a run its tags."""
    run = the_run(call, call.path.job)
    run.tags = list(dict.fromkeys(call.body.tags))
    call.leading.chronicle.change(call.path.job, run)
    return run


class ProfileIn(t.In, frozen=True):
    """``ranks`` (): the first rank of every node, at most eight."""

    steps: Annotated[int, Meta(ge=1, le=100)] = 5
    ranks: Annotated[tuple[t.Number, ...], Meta(max_length=64)] = ()


class ProfileOut(t.Out, frozen=True):
    """Traces appear as ``logs/trace-step-*-rank-R.json`` in the run's folder."""

    ranks: list[int]
    folder: str
    clock_skew_seconds: dict[str, float]  # by rank: of its node's clock, ahead of the server's


async def profile(call: Call) -> ProfileOut:
    """Has ranks of a running job trace their next steps."""
    job = call.job()
    placement, hub = job.placement, call.leading.hub
    if placement is None or job.gang is None or job.gang.phase != "running":
        raise ApiError(409, "not_running", f"job {job.id} does not run now")
    slot_ranks = max(1, job.spec.gang.slot_gpus)
    world = slot_ranks * len(placement.nodes)
    ranks = sorted(set(call.body.ranks)) or list(range(0, world, slot_ranks))[:8]
    if ranks[-1] >= world:
        raise ApiError(400, "bad_request", f"rank {ranks[-1]}: the gang has {world}")
    skew: dict[str, float] = {}
    for rank in ranks:
        node = placement.nodes[rank // slot_ranks]
        order = Profile(job=job.id, ranks=(rank,), steps=call.body.steps)
        hub.push(node, framed(encode(order)))
        skew[str(rank)] = hub.skew_ns.get(node, 0) / 1e9
    run = call.leading.chronicle.run_of(job)
    return ProfileOut(ranks=ranks, folder=run.folder, clock_skew_seconds=skew)


ENDPOINTS = [
    Endpoint(
        method="POST",
        path="/v1/jobs/{job}/profile",
        name="profile_job",
        summary="Have ranks of a running job trace their next steps.",
        roles=WRITERS,
        handler=profile,
        answer=ProfileOut,
        params=t.JobPath,
        body=ProfileIn,
        audited=True,
    ),
    Endpoint(
        method="GET",
        path="/v1/nodes/{node}/metrics",
        name="node_metrics",
        summary="Give what a node's devices did over time.",
        roles=EVERYBODY,
        handler=node_metrics,
        answer=DevicesOut,
        params=t.NodePath,
        query=DevicesQuery,
    ),
    Endpoint(
        method="GET",
        path="/v1/jobs/{job}/ledger",
        name="job_ledger",
        summary="Say where a job's GPU time went, exactly, and over time.",
        roles=EVERYBODY,
        handler=job_ledger,
        answer=JobLedgerOut,
        params=t.JobPath,
        query=LedgerQuery,
    ),
    Endpoint(
        method="GET",
        path="/v1/ledger/timeline",
        name="fleet_ledger",
        summary="Say where the fleet's GPU time went, exactly, and over time.",
        roles=EVERYBODY,
        handler=fleet_ledger,
        answer=JobLedgerOut,
        query=LedgerQuery,
    ),
    Endpoint(
        method="GET",
        path="/v1/jobs/{job}/incidents",
        name="job_incidents",
        summary="Tell what happened to a job, with evidence.",
        roles=EVERYBODY,
        handler=job_incidents,
        answer=FindingsOut,
        params=t.JobPath,
    ),
    Endpoint(
        method="GET",
        path="/v1/findings",
        name="findings",
        summary="List what the detectors found, newest last.",
        roles=EVERYBODY,
        handler=findings,
        answer=FindingsOut,
        query=FindingsQuery,
    ),
    Endpoint(
        method="GET",
        path="/v1/runs",
        name="list_runs",
        summary="List runs.",
        roles=EVERYBODY,
        handler=list_runs,
        answer=RunsOut,
        query=RunsQuery,
    ),
    Endpoint(
        method="GET",
        path="/v1/runs/diff",
        name="diff_runs",
        summary="Say what differs between two runs.",
        roles=EVERYBODY,
        handler=diff_runs,
        answer=DiffOut,
        query=DiffQuery,
    ),
    Endpoint(
        method="GET",
        path="/v1/runs/{job}",
        name="show_run",
        summary="Show a run: configuration, code, packages, placements, checkpoints, end.",
        roles=EVERYBODY,
        handler=show_run,
        answer=Run,
        params=t.JobPath,
    ),
    Endpoint(
        method="POST",
        path="/v1/runs/{job}/notes",
        name="add_note",
        summary="Add a note to a run.",
        roles=WRITERS,
        handler=add_note,
        answer=Run,
        params=t.JobPath,
        body=NoteIn,
        status=201,
        audited=True,
    ),
    Endpoint(
        method="PUT",
        path="/v1/runs/{job}/tags",
        name="set_tags",
        summary="Give a run its tags.",
        roles=WRITERS,
        handler=set_tags,
        answer=Run,
        params=t.JobPath,
        body=TagsIn,
        audited=True,
    ),
    Endpoint(
        method="GET",
        path="/v1/jobs/{job}/metrics",
        name="job_metrics",
        summary="Give a job's metrics over time.",
        roles=EVERYBODY,
        handler=job_metrics,
        answer=MetricsOut,
        params=t.JobPath,
        query=MetricsQuery,
    ),
    Endpoint(
        method="GET",
        path="/v1/jobs/{job}/ranks",
        name="job_ranks",
        summary="Give the step times of a job's ranks over time.",
        roles=EVERYBODY,
        handler=job_ranks,
        answer=RanksOut,
        params=t.JobPath,
        query=RanksQuery,
    ),
]
