"""``phalanx nodes``: nodes, and machines that want to be nodes."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from phalanx.cli.cluster.description import print_description
from phalanx.cli.completion import node_names
from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import add_row, moment, plain, print_table, table, when
from phalanx.control.wire.api_types import (
    DecideNode,
    NodeDetail,
    NodeList,
    NodeOut,
    PendingList,
)

app = typer.Typer()


@app.command()
def nodes(
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME|pending|approve|reject]",
            help="What to show or do.",
            autocompletion=node_names,
        ),
    ] = "",
    machine: Annotated[str, typer.Argument(help="Machine to approve or reject.")] = "",
    key: Annotated[
        str, typer.Option(help="Prefix of its key, if several machines wait under one name.")
    ] = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """List nodes, or show one with its history; approve or reject machines that want to join.

    `nodes pending` lists them; `nodes approve NAME` admits one, `nodes reject NAME` refuses it.
    """
    if name in ("pending", "approve", "reject"):
        _pending(name, machine, key, server, state, json)
        return
    if machine or key:
        raise typer.BadParameter("nodes [NAME], nodes pending, or nodes approve|reject NAME")
    if name:
        _show_node(name, server, state, json)
        return
    with connected(server, json, state) as client:
        listed = client.get("/v1/nodes", NodeList, limit=20_000)
    if json:
        print_json(listed)
        return
    if not listed.nodes:
        print("no nodes yet: start an agent with `phalanx agent --join URL`")
        return
    made = table("NODE", "STATE", "GPUS", "FREE", "KIND", "JOBS", "AGENT", "WHY")
    for node in listed.nodes:
        agent = "connected" if node.connected else "away"
        jobs = ",".join(map(str, node.jobs))
        cells = (node.name, node.state, node.gpus, node.free_gpus, node.kind, jobs, agent)
        add_row(made, *cells, node.why.text)
    print_table(made)


def _pending(what: str, name: str, key: str, server: str, state: State, json: bool) -> None:
    if (what == "pending") == bool(name):
        raise typer.BadParameter("nodes pending, or nodes approve|reject NAME")
    with connected(server, json, state) as client:
        if what == "pending":
            pending = client.get("/v1/pending-nodes", PendingList)
        else:
            path = f"/v1/pending-nodes/{quote(name, safe='')}/{what}"
            pending = client.post(path, DecideNode(key=key), PendingList)
    if json:
        print_json(pending)
    elif what != "pending":
        done = "is let in" if what == "approve" else "is turned away"
        for node in pending.nodes:
            print(plain(f"{node.name} ({node.key}) {done}"))
    elif not pending.nodes:
        print("no machine waits to be let in")
    else:
        made = table("NODE", "KEY", "SINCE", "")
        for node in pending.nodes:
            known = "a node of this name is known by another key" if node.known else ""
            add_row(made, node.name, node.key, when(node.since_ns), known)
        print_table(made)


def _place(node: NodeOut) -> str:
    """Where a node stands, as placement sees it."""
    places = {
        "domain": node.domain,
        "leaf": node.leaf,
        "pod": node.pod,
        "rack": node.rack,
        "power": node.power,
        "switch": node.switch,
        "partition": node.partition,
    }
    named = [f"{key} {value}" for key, value in places.items() if value]
    rails = f"{node.rails} rail{'s' if node.rails != 1 else ''}"
    return ", ".join([*named, rails])


def _show_node(name: str, server: str, state: State, json: bool) -> None:
    with connected(server, json, state) as client:
        detail = client.get(f"/v1/nodes/{quote(name, safe='')}", NodeDetail)
    if json:
        print_json(detail)
        return
    node = detail.node
    print(plain(f"{node.name}: {node.state} ({node.why.text})"))
    kind = f"{node.kind} " if node.kind else ""
    print(plain(f"{node.gpus} {kind}GPUs, {node.free_gpus} free; {node.cpus} CPUs; {_place(node)}"))
    if detail.description is not None:
        print_description(detail.description)
    if abs(node.clock_skew_seconds) > 1:
        print(f"its clock is {node.clock_skew_seconds:+.0f} s off")
    for change in detail.history:
        print(plain(f"  {moment(change.time_ns)}  {change.state:<12}{change.why.text}"))
