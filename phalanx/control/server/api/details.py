"""Endpoints for looking closely: every rank's records of some steps, and traces of steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from msgspec import Meta

from phalanx.config import (
    ConfigError,
    batch_ramp,
    job_from_table,
    resolve,
    stage_at,
)
from phalanx.config.toml_text import parse_toml
from phalanx.control.server.http.endpoints import EVERYBODY, WRITERS, ApiError, Call, Endpoints
from phalanx.control.wire import api_types as t
from phalanx.control.wire.agent_messages import Profile, encode
from phalanx.control.wire.payload import TrainingWork, decode_payload
from phalanx.control.wire.websocket_frames import framed

AT_ONCE = 32  # nodes that are asked together
NEWEST = 20  # steps, where nobody says which
MOST_STEPS = 5_000


class RecordsQuery(t.In, frozen=True):
    """Of which steps; ``last`` 0: the newest one, ``first`` 0: as many before it as are shown."""

    first: t.Number = 0
    last: t.Number = 0
    rank: Annotated[int, Meta(ge=-1, le=t.MOST)] = -1  # -1: of all


class TracePath(t.In, frozen=True):
    job: t.JobId
    rank: t.Number


class TraceQuery(t.In, frozen=True):
    after_ns: Annotated[int, Meta(ge=0, le=1 << 62)] = 0  # older ones are not meant


ENDPOINTS = Endpoints()


@ENDPOINTS.add("GET /v1/jobs/{job}/records", EVERYBODY, params=t.JobPath, query=RecordsQuery)
async def job_records(call: Call) -> AsyncIterator[bytes]:
    """Give every rank's records of some steps, as far as the nodes still have them.

    Lines of JSON, one a rank and step, from the rings of the nodes that run the job.
    """
    job, asked, hub = call.job(), call.query, call.leading.hub
    nodes, world = _running(call)
    slot_ranks = max(1, job.spec.gang.slot_gpus)
    if asked.rank >= world:
        raise ApiError(404, "no_such_rank", f"job {job.id} has ranks 0 to {world - 1}")
    if asked.rank >= 0:
        nodes = nodes[asked.rank // slot_ranks :][:1]
    last = asked.last or max(job.step, 1 << 53)
    first = asked.first or max(0, (asked.last or job.step) - NEWEST + 1)
    if asked.last and last - first >= MOST_STEPS:
        raise ApiError(400, "bad_request", f"at most {MOST_STEPS} steps at a time")

    async def of(node: int) -> list[bytes]:
        lines = hub.logs.steps(node, job.id, asked.rank, first, last)
        return [line async for line in lines]

    async def all_nodes() -> AsyncIterator[bytes]:
        for at in range(0, len(nodes), AT_ONCE):
            for found in await asyncio.gather(*(of(node) for node in nodes[at : at + AT_ONCE])):
                for part in found:
                    yield part

    return all_nodes()


@ENDPOINTS.add("GET /v1/jobs/{job}/traces/{rank}", EVERYBODY, params=TracePath, query=TraceQuery)
async def job_trace(call: Call) -> AsyncIterator[bytes]:
    """Give the newest trace of a rank.

    As torch's profiler wrote it on its node.
    """
    job, rank = call.job(), call.path.rank
    nodes, world = _running(call)
    slot = rank // max(1, job.spec.gang.slot_gpus)
    folder = call.leading.run_history.run_of(job).folder
    if rank >= world or not folder:
        raise ApiError(
            404, t.RefusalCode.NO_SUCH_TRACE, f"rank {rank} of job {job.id} has no trace"
        )
    parts = call.leading.hub.logs.trace(nodes[slot], job.id, rank, folder, call.query.after_ns)
    first = await anext(parts)
    if first.problem:
        raise ApiError(404, t.RefusalCode.NO_SUCH_TRACE, first.problem)

    async def all_parts() -> AsyncIterator[bytes]:
        yield first.data
        async for part in parts:
            if part.problem:
                raise ConnectionError(part.problem)  # cut off: half a trace must not look whole
            yield part.data

    return all_parts()


class StacksQuery(t.In, frozen=True):
    """Of a generation; 0: of the last one that was looked at."""

    generation: t.Number = 0
    rank: Annotated[int, Meta(ge=-1, le=t.MOST)] = -1  # -1: of all, on at most 32 nodes


@ENDPOINTS.add("GET /v1/jobs/{job}/stacks", EVERYBODY, params=t.JobPath, query=StacksQuery)
async def job_stacks(call: Call) -> AsyncIterator[bytes]:
    """Give the stacks of a gang's ranks from its last hang.

    Text, from the nodes that ran it.
    """
    job, hub, asked = call.job(), call.leading.hub, call.query
    slot_ranks, generation = max(1, job.spec.gang.slot_gpus), asked.generation
    placements = [
        each["nodes"]
        for each in call.leading.run_history.run_of(job).placements
        if each["generation"] <= (generation or job.generation)
    ]
    index = call.leading.core.view.fleet.index
    nodes = [index.get(name) for name in placements[-1]] if placements else []
    if asked.rank >= 0:
        nodes = nodes[asked.rank // slot_ranks :][:1]

    async def all_nodes() -> AsyncIterator[bytes]:
        for node in nodes[:AT_ONCE]:
            if node is not None:
                async for part in hub.logs.evidence(node, job.id, generation, asked.rank):
                    yield part

    return all_nodes()


class BatchQuery(t.In, frozen=True):
    step: Annotated[int, Meta(ge=1, le=t.MOST)]
    rank: t.Number = 0


class BatchOut(t.Out, frozen=True):
    """The samples of a step by their numbers within the run, were none skipped before it."""

    step: int
    first_sample: int
    samples: int
    sequence: int  # tokens of each
    data: tuple[str, ...]  # where they come from, as the job names it
    rank: int
    rank_first_sample: int  # of the replica of this rank
    rank_samples: int


@ENDPOINTS.add("GET /v1/jobs/{job}/batch", EVERYBODY, params=t.JobPath, query=BatchQuery)
async def job_batch(call: Call) -> BatchOut:
    """Give the samples that a step of a job reads, and those of one rank's replica."""
    job, asked = call.job(), call.query
    work = decode_payload(job.spec.payload)
    if not isinstance(work, TrainingWork):
        raise ApiError(409, "no_batch", f"job {job.id} is a program: what it reads is its own")
    try:
        described = resolve(job_from_table(parse_toml(work.toml)), work.world_size)
    except (ConfigError, ValueError) as error:
        raise ApiError(409, "no_batch", f"its job file cannot be read: {error}") from None
    ramp, mesh = batch_ramp(described), described.parallel
    first = ramp.samples(asked.step - 1)
    count, data = ramp.at(first), stage_at(described, first).data
    corpora = tuple(str(each.path) for each in data.blend.values())
    replicas, micro_batch = mesh.data, described.train.micro_batch
    rows = -(-count // (replicas * micro_batch)) * micro_batch  # of each replica
    replica = asked.rank // (mesh.context * mesh.tensor) % replicas
    inside = min(count, replica * rows), min(count, (replica + 1) * rows)
    return BatchOut(
        step=asked.step,
        first_sample=first,
        samples=count,
        sequence=data.sequence,
        data=corpora or (str(data.path or data.source),),
        rank=asked.rank,
        rank_first_sample=first + inside[0],
        rank_samples=inside[1] - inside[0],
    )


def _running(call: Call) -> tuple[tuple[int, ...], int]:
    """Nodes of a gang that runs, by slot, and how many ranks it has."""
    job = call.job()
    if job.placement is None or job.gang is None or job.gang.phase != "running":
        raise ApiError(409, t.RefusalCode.NOT_RUNNING, f"job {job.id} does not run now")
    return job.placement.nodes, job.spec.gang.ranks(job.placement.replicas)


class ProfileIn(t.In, frozen=True):
    """``ranks`` (): the first rank of every node, at most eight."""

    steps: Annotated[int, Meta(ge=1, le=100)] = 5
    ranks: Annotated[tuple[t.Number, ...], Meta(max_length=64)] = ()


class ProfileOut(t.Out, frozen=True):
    """The traces can be had at ``/v1/jobs/{job}/traces/{rank}`` once their steps are made."""

    ranks: list[int]
    asked_ns: int  # for ``after_ns`` there
    folder: str  # of the run, on its nodes
    clock_skew_seconds: dict[str, float]  # by rank: of its node's clock, ahead of the server's


@ENDPOINTS.add(
    "POST /v1/jobs/{job}/profile", WRITERS, params=t.JobPath, body=ProfileIn, audited=True
)
async def profile_job(call: Call) -> ProfileOut:
    """Have ranks of a running job trace their next steps."""
    job = call.job()
    (nodes, world), hub = _running(call), call.leading.hub
    slot_ranks = max(1, job.spec.gang.slot_gpus)
    ranks = sorted(set(call.body.ranks)) or list(range(0, world, slot_ranks))[:8]
    if ranks[-1] >= world:
        raise ApiError(400, "bad_request", f"rank {ranks[-1]}: the gang has {world}")
    asked_ns, skew = hub.controller.clock.now_ns(), dict[str, float]()
    for rank in ranks:
        node = nodes[rank // slot_ranks]
        order = Profile(job=job.id, ranks=(rank,), steps=call.body.steps)
        hub.push(node, framed(encode(order)))
        skew[str(rank)] = hub.skew_ns.get(node, 0) / 1e9
    run = call.leading.run_history.run_of(job)
    return ProfileOut(
        ranks=ranks,
        asked_ns=asked_ns,
        folder=run.folder,
        clock_skew_seconds=skew,
    )
