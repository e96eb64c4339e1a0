"""``phalanx show``: a job, and which of its ranks is where."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from phalanx.cli.connection import connected, stored_run
from phalanx.cli.options import JobOrRun, Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import add_row, counted, moment, plain, print_table, span, table, when
from phalanx.cluster.jobs.job import JobSpec
from phalanx.control.wire.api_types import JobDetail, JobOut, NodeList, NodeOut

app = typer.Typer()


class RankPlace(msgspec.Struct, frozen=True):
    """Where a rank is: in the mesh, and in the fleet."""

    rank: int
    stage: int
    replica: int
    context: int
    tensor: int
    node: str
    leaf: str
    pod: str


@app.command()
def show(
    job: JobOrRun,
    ranks: Annotated[
        bool, typer.Option("--ranks", help="Show which rank runs on which node.")
    ] = False,
    spec: Annotated[bool, typer.Option(help="Also show what was submitted.")] = True,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print only its job file, as it runs.")
    ] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show a job: its state, its nodes, its progress.

    An engine's run that has ended is read from its folder; no server is needed.
    """
    if (stored := stored_run(job, json)) is not None:
        if ranks:
            raise typer.BadParameter("is known of jobs that run", param_hint="--ranks")
        _job_file(stored.detail) if toml else _show(stored.detail, spec, json)
        return
    with connected(server, json, state) as client:
        detail = client.get(f"/v1/jobs/{job}", JobDetail)
        if ranks:
            nodes = client.get("/v1/nodes", NodeList, limit=20_000).nodes
            _show_ranks(rank_places(detail, {node.name: node for node in nodes}), json)
            return
    _job_file(detail) if toml else _show(detail, spec, json)


def _job_file(detail: JobDetail) -> None:
    from phalanx.control.wire.payload import TrainingWork, decode_payload

    work = decode_payload(msgspec.json.decode(bytes(detail.spec))["payload"])
    if not isinstance(work, TrainingWork):
        raise typer.BadParameter(f"job {detail.job.id} is a program: it has no job file")
    print(work.toml, end="" if work.toml.endswith("\n") else "\n")


def _show(detail: JobDetail, spec: bool, json: bool) -> None:
    if json:
        print_json(detail)
        return
    for name, text in _describe(detail).items():
        print(plain(f"{name + ':':<11}{text}"))
    if not spec:
        return
    print("submission:")
    print(msgspec.json.format(bytes(detail.spec), indent=2).decode())


def _describe(detail: JobDetail) -> dict[str, str]:
    """A job, a few words a line."""
    job = detail.job
    return {
        "job": f"{job.id} {job.name}",
        "owner": f"{job.user or '?'} of team {job.team}",
        "state": f"{job.state}: {job.why.text}",
        "gang": f"{counted(job.replicas, 'replica')}, {counted(job.gpus, 'GPU')}, "
        f"generation {job.generation}" + (f", {job.phase}" if job.phase else ""),
        "step": _progress(job),
        "step time": f"{job.step_seconds:.3f} s" if job.step_seconds else "not measured yet",
        **({"planned": detail.plan.summary()} if detail.plan and detail.plan.summary() else {}),
        **({"not planned": detail.plan.problem} if detail.plan and detail.plan.problem else {}),
        "expected": _expected(detail),
        "times": f"submitted {moment(job.submitted_ns)}, started {when(job.started_ns) or '-'}, "
        f"ended {when(job.ended_ns) or '-'}, ran {span(job.ran_seconds)}",
        "used": f"{detail.used_gpu_hours:.2f} GPU-hours",
        "nodes": ", ".join(job.nodes) or "none",
        "spares": ", ".join(job.spares) or "none",
        "failures": "; ".join(detail.evidence) or "none",
        "lost": _lost(detail),
    }


def _progress(job: JobOut) -> str:
    """How far a job is, and what is safe of it."""
    if not job.step and not job.steps:
        return "none was reported"
    reached = f"{job.step}" + (f" of {job.steps}" if job.steps else "")
    if job.printed:
        return f"{reached} (as it prints; what it saves is its own)"
    return f"{reached} ({job.committed} in memory, {job.durable} durable)"


def _expected(detail: JobDetail) -> str:
    """The times that recovery and the queue reckon with, those of one origin together."""
    times_of: dict[str, list[str]] = {}
    for name, value in detail.expected.items():
        if name.endswith("_ns") and value:
            origin = detail.origins.get(name, "default")
            times_of.setdefault(origin, []).append(
                f"{name.removesuffix('_ns')} {value / 1e9:.3g} s"
            )
    return "; ".join(f"{origin}: {', '.join(parts)}" for origin, parts in times_of.items())


def _lost(detail: JobDetail) -> str:
    """Committed steps that a job lost, newest last."""
    if not detail.lost_steps:
        return "no committed step"
    each = [f"{loss.first} to {loss.last} ({loss.why.text})" for loss in detail.losses]
    return f"{detail.lost_steps} committed steps: " + "; ".join(each)


def rank_places(detail: JobDetail, nodes: dict[str, NodeOut]) -> list[RankPlace]:
    """Every rank with its place in the mesh and on the fleet, in order."""
    shape = msgspec.json.decode(detail.spec, type=JobSpec).gang
    job, slot = detail.job, max(1, shape.slot_gpus)
    places = []
    for rank in range(shape.replica_ranks * job.replicas if job.nodes else 0):
        rest, tensor = divmod(rank, shape.tensor)
        rest, context = divmod(rest, shape.context)
        stage, replica = divmod(rest, job.replicas)
        node = nodes[job.nodes[rank // slot]]
        place = RankPlace(rank, stage, replica, context, tensor, node.name, node.leaf, node.pod)
        places.append(place)
    return places


def _show_ranks(places: list[RankPlace], json: bool) -> None:
    if json:
        print_json(places)
        return
    made = table("RANK", "STAGE", "REPLICA", "CONTEXT", "TENSOR", "NODE", "LEAF", "POD")
    for place in places:
        add_row(made, *msgspec.structs.astuple(place))
    print_table(made)
