"""``phalanx nodes|drain|resume|events|quota|answer``: the fleet and its log."""

from __future__ import annotations

import time
from typing import Annotated
from urllib.parse import quote

import typer

from phalanx.cli.connection import (
    ServerUrl,
    State,
    add_row,
    connected,
    plain,
    show,
    table,
    when,
)
from phalanx.cli.options import Json, print_json
from phalanx.control.wire.api_types import (
    DecideNode,
    Decision,
    Done,
    Drain,
    EventList,
    EventOut,
    NodeDetail,
    NodeList,
    PendingList,
    QuotaIn,
    QuotaList,
    Readmit,
    Status,
)

nodes, drain, resume, events, quota, answer = (typer.Typer() for _ in range(6))


@nodes.command()
def list_nodes(
    name: Annotated[
        str, typer.Argument(metavar="[NAME|pending|approve|reject]", help="What to show or do.")
    ] = "",
    machine: Annotated[str, typer.Argument(help="Whom to approve or reject.")] = "",
    key: Annotated[
        str, typer.Option(help="Of several that wait under one name: how its key begins.")
    ] = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """List nodes, or show one with its history; decide about machines that want to be nodes.

    `nodes pending` lists those, `nodes approve NAME` lets one in, `nodes reject NAME` does not.
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
        found = client.get("/v1/nodes", NodeList, limit=20_000)
    if json:
        print_json(found)
        return
    if not found.nodes:
        print("no nodes yet: start an agent with `phalanx agent --join URL`")
        return
    made = table("NODE", "STATE", "GPUS", "FREE", "KIND", "JOBS", "AGENT", "WHY")
    for node in found.nodes:
        agent = "connected" if node.connected else "away"
        jobs = ",".join(map(str, node.jobs))
        cells = (node.name, node.state, node.gpus, node.free_gpus, node.kind, jobs, agent)
        add_row(made, *cells, node.why.text)
    show(made)


def _pending(what: str, name: str, key: str, server: str, state: State, json: bool) -> None:
    if (what == "pending") == bool(name):
        raise typer.BadParameter("nodes pending, or nodes approve|reject NAME")
    with connected(server, json, state) as client:
        if what == "pending":
            found = client.get("/v1/pending-nodes", PendingList)
        else:
            path = f"/v1/pending-nodes/{quote(name, safe='')}/{what}"
            found = client.post(path, DecideNode(key=key), PendingList)
    if json:
        print_json(found)
    elif what != "pending":
        done = "is let in" if what == "approve" else "is turned away"
        for node in found.nodes:
            print(plain(f"{node.name} ({node.key}) {done}"))
    elif not found.nodes:
        print("no machine waits to be let in")
    else:
        made = table("NODE", "KEY", "SINCE", "")
        for node in found.nodes:
            known = "a node of this name is known by another key" if node.known else ""
            add_row(made, node.name, node.key, when(node.since_ns), known)
        show(made)


def _show_node(name: str, server: str, state: State, json: bool) -> None:
    with connected(server, json, state) as client:
        found = client.get(f"/v1/nodes/{quote(name, safe='')}", NodeDetail)
    if json:
        print_json(found)
        return
    node = found.node
    print(plain(f"{node.name}: {node.state} ({node.why.text})"))
    print(
        f"{node.gpus} {node.kind} GPUs, {node.free_gpus} free; {node.cpus} CPUs; leaf {node.leaf}"
    )
    if abs(node.clock_skew_seconds) > 1:
        print(f"its clock is {node.clock_skew_seconds:+.0f} s off")
    for change in found.history:
        print(plain(f"  {when(change.time_ns)}  {change.state:<12}{change.why.text}"))


@drain.command()
def drain_thing(
    what: Annotated[str, typer.Argument(metavar="NODE|JOB", help="Name or number.")],
    within: Annotated[int, typer.Option(min=0, help="A node: empty it in so many seconds.")] = 0,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Empty a node and give it no new work; a job makes a checkpoint and waits for ``resume``."""
    with connected(server, json, state) as client:
        if what.isdigit():
            done = client.post(f"/v1/jobs/{what}/drain", None, Done)
        else:
            body = Drain(deadline_seconds=within)
            done = client.post(f"/v1/nodes/{quote(what, safe='')}/drain", body, Done)
    _say(what, done, json)


@resume.command()
def resume_thing(
    what: Annotated[str, typer.Argument(metavar="NODE|JOB", help="Name or number.")],
    tested: Annotated[bool, typer.Option(help="A node: without a test before.")] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Give a node back to the fleet, or let a held job into the queue."""
    with connected(server, json, state) as client:
        if what.isdigit():
            done = client.post(f"/v1/jobs/{what}/release", None, Done)
        else:
            body = Readmit(tested=tested)
            done = client.post(f"/v1/nodes/{quote(what, safe='')}/readmit", body, Done)
    _say(what, done, json)


@answer.command()
def answer_question(
    question: Annotated[int, typer.Argument(min=0, help="Its number.")] = 0,
    take_out: Annotated[
        bool | None, typer.Option("--take-out/--keep", help="What becomes of the nodes.")
    ] = None,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show what a person must decide, or decide it (NUMBER --take-out, or --keep)."""
    if bool(question) != (take_out is not None):
        raise typer.BadParameter("give a number with --take-out or --keep, or neither to list them")
    with connected(server, json, state) as client:
        if take_out is not None:
            done = client.post(f"/v1/questions/{question}", Decision(approve=take_out), Done)
            _say(f"question {question}", done, json)
            return
        found = client.get("/v1/status", Status).questions
    if json:
        print_json(found)
        return
    made = table("QUESTION", "SINCE", "ABOUT", "CAUSES", "NODES")
    for each in found:
        causes = ", ".join(dict.fromkeys(each.causes))
        named = ", ".join(each.nodes[:8]) + (" …" if len(each.nodes) > 8 else "")
        about = f"{each.about} of {len(each.nodes)} nodes"
        add_row(made, each.question, when(each.asked_ns), about, causes, named)
    show(made) if found else print("nothing waits for a person's word")


def _say(what: str, done: Done, json: bool) -> None:
    if json:
        print_json(done)
    else:
        print(plain(f"{what}: {done.message}"))


@events.command()
def read_events(
    job: Annotated[int, typer.Option(min=0, help="Only about this job.")] = 0,
    last: Annotated[int, typer.Option("--last", "-n", min=1, max=1000, help="How many.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they come.")] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Read the log: what happened, and what was decided about it."""
    with connected(server, json, state) as client:
        found = client.get("/v1/events", EventList, after=-1, limit=last, job=job)
        if job and not found.events:
            client.get(f"/v1/jobs/{job}", dict)  # says so where there is none
        if json and not follow:
            print_json(found)
            return
        while True:
            for event in found.events:
                print_event(event, json)
            if not follow:
                return
            time.sleep(1.0)
            found = client.get("/v1/events", EventList, after=found.next_after, job=job)


def print_event(event: EventOut, json: bool) -> None:
    """An event and what was decided about it, a line each."""
    if json:
        import msgspec

        print(msgspec.json.encode(event).decode(), flush=True)
        return
    shown = {key: value for key, value in event.body.items() if isinstance(value, int | str)}
    facts = " ".join(f"{key}={value}" for key, value in shown.items())
    print(plain(f"{event.sequence:>8} {when(event.time_ns)} {event.kind} {facts}").rstrip())
    for command in event.commands:
        where = f" to {command.nodes} nodes" if command.nodes else ""
        print(plain(f"{'':>8} → {command.kind}{where}: {command.why.text}"), flush=True)


@quota.command()
def show_or_set_quota(
    team: Annotated[str, typer.Argument(help="Team whose quota is set.")] = "",
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs that it owns.")] = None,
    ceiling: Annotated[int, typer.Option(min=0, help="Most it may use; 0: no limit.")] = 0,
    weight: Annotated[int, typer.Option(min=1, help="Of its fair share.")] = 1,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show what teams own and use, or set it (TEAM --gpus N)."""
    if bool(team) != (gpus is not None):
        raise typer.BadParameter("give a team and --gpus to set a quota, or neither to list them")
    with connected(server, json, state) as client:
        if team and gpus is not None:
            body = QuotaIn(gpus=gpus, ceiling=ceiling, weight=weight)
            client.put(f"/v1/quotas/{quote(team, safe='')}", body, Done)
        found = client.get("/v1/quotas", QuotaList)
    if json:
        print_json(found)
        return
    made = table("TEAM", "OWNS", "CEILING", "WEIGHT", "USES")
    for each in found.quotas:
        add_row(made, each.team, each.gpus, each.ceiling or "-", each.weight, each.used_gpus)
    show(made)
