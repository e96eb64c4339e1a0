"""``phalanx ps|show|why|logs|cancel|scale``: what becomes of jobs."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from phalanx.cli.connection import (
    ServerUrl,
    State,
    add_row,
    connected,
    harmless,
    plain,
    span,
    table,
    when,
)
from phalanx.cli.connection import show as show_table
from phalanx.cli.options import Json, print_json
from phalanx.cluster.jobs.job import JobSpec
from phalanx.control.wire.api_types import (
    Done,
    JobDetail,
    JobList,
    JobOut,
    NodeList,
    NodeOut,
    Replicas,
    Waits,
)

JobNumber = Annotated[int, typer.Argument(metavar="JOB", min=1, help="Number of the job.")]

ps, show, why, logs, cancel, scale = (typer.Typer() for _ in range(6))


@ps.command()
def list_jobs(
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that ended.")] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """List jobs: those that wait or run, or all."""
    found: list[JobOut] = []
    with connected(server, json, state) as client:
        after = -1
        while after:
            wanted = "all" if everything else "live"
            page = client.get("/v1/jobs", JobList, state=wanted, after=max(after, 0), limit=1000)
            found += page.jobs
            after = page.next_after
    if json:
        print_json({"jobs": found})
        return
    if not found:
        print("no jobs" if everything else "no jobs wait or run (--all: also those that ended)")
        return
    made = table("JOB", "NAME", "TEAM", "STATE", "GPUS", "STEP", "RAN", "WHY")
    for job in found:
        steps = f"{job.step}/{job.steps}" if job.steps else job.step
        ran = span(job.ran_seconds)
        add_row(made, job.id, job.name, job.team, job.state, job.gpus, steps, ran, job.why.text)
    show_table(made)


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


@show.command()
def show_job(
    job: JobNumber,
    ranks: Annotated[bool, typer.Option("--ranks", help="Which rank is on which node.")] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show a job: its state, where it runs, how far it is."""
    with connected(server, json, state) as client:
        found = client.get(f"/v1/jobs/{job}", JobDetail)
        if ranks:
            nodes = client.get("/v1/nodes", NodeList, limit=20_000).nodes
            _show_ranks(rank_places(found, {node.name: node for node in nodes}), json)
            return
    if json:
        print_json(found)
        return
    known = found.job
    lines = {
        "job": f"{known.id} {known.name}",
        "owner": f"{known.user or '?'} of team {known.team}",
        "state": f"{known.state}: {known.why.text}",
        "gang": f"{known.replicas} replicas, {known.gpus} GPUs, generation {known.generation}"
        + (f", {known.phase}" if known.phase else ""),
        "step": f"{known.step}"
        + (f" of {known.steps}" if known.steps else "")
        + f" ({known.committed} in memory, {known.durable} durable)",
        "step time": f"{known.step_seconds:.3f} s" if known.step_seconds else "not measured yet",
        "times": f"submitted {when(known.submitted_ns)}, started {when(known.started_ns) or '-'}, "
        f"ended {when(known.ended_ns) or '-'}, ran {span(known.ran_seconds)}",
        "used": f"{found.used_gpu_hours:.2f} GPU-hours",
        "nodes": ", ".join(known.nodes) or "none",
        "spares": ", ".join(known.spares) or "none",
        "failures": "; ".join(found.evidence) or "none",
        "lost": _lost(found),
    }
    for name, text in lines.items():
        print(plain(f"{name + ':':<11}{text}"))
    print("submission:")
    print(msgspec.json.format(bytes(found.spec), indent=2).decode())


def _lost(found: JobDetail) -> str:
    """Committed steps that a job lost, newest last."""
    if not found.lost_steps:
        return "no committed step"
    each = [f"{loss.first} to {loss.last} ({loss.why.text})" for loss in found.losses]
    return f"{found.lost_steps} committed steps: " + "; ".join(each)


def rank_places(found: JobDetail, nodes: dict[str, NodeOut]) -> list[RankPlace]:
    """Every rank with its place in the mesh and on the fleet, in order."""
    shape = msgspec.json.decode(found.spec, type=JobSpec).gang
    job, slot = found.job, max(1, shape.slot_gpus)
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
    show_table(made)


@why.command()
def why_job(
    job: Annotated[str, typer.Argument(metavar="JOB", help="Its number, or slurm:NUMBER.")],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Say why a job is where it is and, while it waits, for what."""
    if ":" in job:
        from phalanx.cli.jobs.engines import why_elsewhere

        why_elsewhere(job, json)
        return
    if not job.isdigit():
        raise typer.BadParameter(f"{job!r} is no number of a job")
    with connected(server, json, state) as client:
        found = client.get(f"/v1/jobs/{job}/why", Waits)
    if json:
        print_json(found)
        return
    print(plain(f"job {job} is {found.state}: {found.why.text}"))
    if found.waits_for is not None:
        told = found.waits_for.text
        verb = "it" if told.startswith(("waits ", "can never ")) else "it waits:"
        print(plain(f"{verb} {told}"))
        print(plain(f"estimated start: {found.start}"))
        parts = ", ".join(f"{name} {value}" for name, value in found.priority.items())
        print(f"priority {sum(found.priority.values())}: {parts}")
    for each in found.history:
        print(plain(f"  {each.text}"))


@logs.command()
def read_logs(
    job: JobNumber,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    rank: Annotated[
        int, typer.Option(min=-1, help="One rank; -1: all ranks of the first node.")
    ] = -1,
    tail_kb: Annotated[int, typer.Option(min=0, max=16384, help="KiB from the end.")] = 64,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show what a job's ranks print; followed, until the job has ended."""
    with connected(server, json, state) as client:
        pieces = client.stream(
            f"/v1/jobs/{job}/logs", rank=rank, follow=follow, tail_bytes=tail_kb << 10
        )
        for piece in pieces:
            if json:  # one object a piece
                piece = msgspec.json.encode({"text": piece.decode(errors="replace")}) + b"\n"
            sys.stdout.buffer.write(harmless(piece) if sys.stdout.isatty() else piece)
            sys.stdout.buffer.flush()
        if follow:
            ended = client.get(f"/v1/jobs/{job}", JobDetail).job
            print(plain(f"job {job} is {ended.state}: {ended.why.text}"), file=sys.stderr)


def _own_number(text: str) -> int:
    """The number of a job of ours; what ends a job of Slurm is Slurm's."""
    engine, found, number = text.partition(":")
    if found and engine == "slurm" and number.isdecimal():
        raise typer.BadParameter(f"{text} is a job of Slurm: `scancel {number}` ends it")
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is no number of a job")
    return int(text)


@cancel.command()
def cancel_jobs(
    jobs: Annotated[list[int], typer.Argument(metavar="JOB…", parser=_own_number, help="Numbers.")],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """End jobs at once."""
    done = []
    with connected(server, json, state) as client:
        for job in jobs:
            done.append(client.post(f"/v1/jobs/{job}/cancel", None, Done))
            if not json:
                print(plain(f"job {job}: {done[-1].message}"))
    if json:
        print_json({"cancelled": done})


@scale.command()
def scale_job(
    job: JobNumber,
    replicas: Annotated[int, typer.Argument(min=1, help="Replicas it should have.")],
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Give an elastic job another number of replicas."""
    with connected(server, json, state) as client:
        body = Replicas(replicas=replicas)
        done = client.post(f"/v1/jobs/{job}/scale", body, Done)
    if json:
        print_json(done)
    else:
        print(plain(f"job {job}: {done.message}"))
