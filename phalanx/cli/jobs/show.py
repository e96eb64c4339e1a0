"""``phalanx show``: a job, and which of its ranks is where."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import JobNumber, Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import add_row, plain, print_table, span, table, when
from phalanx.cluster.jobs.job import JobSpec
from phalanx.control.wire.api_types import JobDetail, NodeList, NodeOut

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
    print_table(made)
