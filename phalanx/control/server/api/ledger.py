"""Endpoints of the ledger over time."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Annotated, Literal

from msgspec import Meta, field

from phalanx.cluster.ledger.buckets import BUCKETS
from phalanx.cluster.ledger.report import Share, report
from phalanx.cluster.units import HOUR_NS
from phalanx.control.server.http.endpoints import EVERYBODY, Call, Endpoints
from phalanx.control.wire import api_types as t
from phalanx.observe.tracker.ledger_time import slices

SAMPLE_NS = 10_000_000_000
DAY_SECONDS = 86_400
EPOCH = date(1970, 1, 1)


class LedgerQuery(t.In, frozen=True):
    """``bins`` 0: no timeline. ``by``: what its entries are."""

    bins: Annotated[int, Meta(ge=0, le=2000)] = 0
    by: Literal["bucket", "cause", "team"] = "bucket"
    from_: t.Seconds = field(default=0.0, name="from")
    to: t.Seconds = 0.0


class FleetLedgerQuery(LedgerQuery, frozen=True):
    """Of a team alone, where one is named."""

    team: Annotated[str, Meta(max_length=200)] = ""


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
    goodput: float | None  # None: nothing was held, or a program that told of no step
    ettr: float | None
    watt_hours: int
    lost_steps: int  # committed ones that were lost
    timeline: list[Slice]


NOTHING = Share(
    gpu_ns=0,
    buckets=dict.fromkeys(BUCKETS, 0),
    by_cause={},
    ettr_ppm=0,
    goodput_ppm=0,
    gpu_hours=0,
    micro_dollars=0,
    watt_hours=0,
    steps_known=False,
)
ENDPOINTS = Endpoints()


@ENDPOINTS.add("GET /v1/jobs/{job}/ledger", EVERYBODY, params=t.JobPath, query=LedgerQuery)
async def job_ledger(call: Call) -> JobLedgerOut:
    """Show exactly where a job's GPU time went, in total and over time."""
    number, core = call.job().id, call.leading.core
    share = report(core.ledger, core.view.policy.price).jobs.get(number, NOTHING)
    return await ledger_out(call, f"job:{number}", share)


async def ledger_out(call: Call, owner: str, share: Share) -> JobLedgerOut:
    """A share with its timeline."""
    asked, core = call.query, call.leading.core
    timeline: list[Slice] = []
    if asked.bins:
        suffix = "" if asked.by == "bucket" else f"#{asked.by}"
        now_ns, now = call.leading.run_history.ledger_now()
        end = int(asked.to * 1e9) or now_ns
        rows = await call.server.read(
            call.server.journal.ledger, owner + suffix, int(asked.from_ * 1e9), end
        )
        sums = now.get(owner + suffix)
        while len(rows) > 1 and rows[-2][1] == sums:
            rows.pop()
        if rows and not asked.to and rows[-1][1] == sums:
            end = rows[-1][0]  # it is over: nothing was added since
        elif end >= now_ns and sums is not None:
            rows = [*rows, (now_ns, sums)]
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
        goodput=share.goodput_ppm / 1e6 if share.steps_known else None,
        ettr=share.ettr_ppm / 1e6 if share.steps_known else None,
        watt_hours=share.watt_hours,
        lost_steps=share.lost_steps,
        timeline=timeline,
    )


@ENDPOINTS.add("GET /v1/usage", EVERYBODY, query=t.UsageQuery)
async def usage(call: Call) -> t.UsageList:
    """Show GPU usage over time by team, user or project.

    As far as the caller may see; all jobs count that ever ran here, also those that are forgotten.
    """
    query, core = call.query, call.leading.core
    price = core.view.policy.price.micro_dollars_per_gpu_hour
    first, last = int(query.from_) // DAY_SECONDS, int(query.to) // DAY_SECONDS
    gpu_ns_of: dict[tuple[str, str], int] = {}
    for row in core.ledger.usage():
        if row.day < first or (query.to and row.day > last) or not call.sees(row.team):
            continue
        key = (_stretch(row.day, query.every), getattr(row.owner, query.by))
        gpu_ns_of[key] = gpu_ns_of.get(key, 0) + row.gpu_ns
    rows = [
        t.UsageOut(
            start=start,
            owner=owner,
            gpu_ns=str(gpu_ns),
            gpu_hours=gpu_ns / HOUR_NS,
            dollars=gpu_ns * price / HOUR_NS / 1e6,
        )
        for (start, owner), gpu_ns in sorted(gpu_ns_of.items())
    ]
    return t.UsageList(usage=rows)


def _stretch(day: int, every: str) -> str:
    """The first day of the day, week or month that a day is in; "": of all time."""
    begin = EPOCH + timedelta(days=day)
    if every == "week":
        begin -= timedelta(days=begin.weekday())
    elif every == "month":
        begin = begin.replace(day=1)
    return "" if every == "all" else begin.isoformat()


@ENDPOINTS.add("GET /v1/ledger/timeline", EVERYBODY, query=FleetLedgerQuery)
async def fleet_ledger(call: Call) -> JobLedgerOut:
    """Show exactly where the fleet's GPU time went, in total and over time.

    Or that of a team; the caller's, if it has one.
    """
    core = call.leading.core
    ledger = report(core.ledger, core.view.policy.price)
    team = call.token.team or call.query.team
    if not team:
        return await ledger_out(call, "fleet", ledger.fleet)
    return await ledger_out(call, f"team:{team}", ledger.teams.get(team, NOTHING))
