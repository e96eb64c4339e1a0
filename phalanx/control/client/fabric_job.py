"""Measures a cluster's fabric: a gang job on whole nodes, whose first rank prints the report."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec
from msgspec import Struct, structs

from phalanx.cluster.fabric.verdict import MOST_PLACES_BYTES
from phalanx.cluster.placement.constraints import matches, parse
from phalanx.control.client.client import Client, ClientError
from phalanx.control.client.followed_log import follow_log
from phalanx.control.server.http.submission import JobSchedule, RequestedWork, submission
from phalanx.control.wire.api_types import Done, JobDetail, JobsSubmitted, NodeList, NodeOut
from phalanx.doctor.fabric.report import (
    REPORT_MARK,
    FabricReport,
    FabricRequest,
    find_report,
    program_arguments,
)

PAGE = 1000  # nodes of one answer
REPORT_BYTES = 16 << 20  # of the program's output
MINUTES = 60.0


class FabricJob(Struct, frozen=True, kw_only=True):
    """Which nodes, and what they measure."""

    request: FabricRequest
    nodes: int = 0  # 0: all that are free
    constraint: str = ""
    team: str = "default"
    python: str = ""  # on the nodes; "": as here
    minutes: float = MINUTES
    start_seconds: float = 0.0  # within which it has to start; 0: it waits


def pairs_only(request: FabricRequest) -> FabricRequest:
    """The short measurement: seconds, at a join, after suspicion, before a big job."""
    return structs.replace(request, collectives=())


class FabricError(Exception):
    """It was not measured, and why."""


def measure_fabric(
    client: Client, wanted: FabricJob, say: Callable[[str], None] = lambda _: None
) -> FabricReport:
    """Submit the job, follow it, and read its report; FabricError where there is none."""
    work = _work(wanted, _free_nodes(client, wanted.constraint))
    made = structs.replace(submission(work, work.slot_gpus), confirmed=True)
    number = client.post("/v1/jobs", made, JobsSubmitted).jobs[0]
    say(f"job {number}: {work.ranks} ranks")
    try:
        _follow(client, number, say)
    except BaseException:
        with suppress(ClientError):
            client.post(f"/v1/jobs/{number}/cancel", None, Done)
        raise
    # Read again as a whole: of what is followed, parts are left out when they come too fast.
    log = client.stream(f"/v1/jobs/{number}/logs", rank=0, tail_bytes=REPORT_BYTES)
    report = find_report(b"".join(log))
    if report is None:
        job = client.get(f"/v1/jobs/{number}", JobDetail).job
        raise FabricError(f"job {number} is {job.state}: {job.why.text} (phalanx logs {number})")
    return report


def _follow(client: Client, number: int, say: Callable[[str], None]) -> None:
    """Say what rank 0 prints, until the job has ended."""
    rest = b""
    for piece in follow_log(
        client, number, lambda error: say(f"the server is away, trying again: {error}"), rank=0
    ):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if REPORT_MARK.encode() not in line:
                say(line.decode(errors="replace"))


def list_nodes(client: Client, constraint: str = "") -> list[NodeOut]:
    """All nodes that a constraint admits."""
    wanted = parse(constraint)
    nodes: list[NodeOut] = []
    after: int | None = None
    while after != -1:
        page = client.get("/v1/nodes", NodeList, limit=PAGE, after=after)
        nodes += [node for node in page.nodes if matches(wanted, (*node.features, node.kind))]
        after = page.next_after
    return nodes


def _free_nodes(client: Client, constraint: str) -> list[NodeOut]:
    """Nodes that could take the job now."""
    return [each for each in list_nodes(client, constraint) if is_free(each)]


def is_free(node: NodeOut) -> bool:
    """Whether a node could take whole-node work; jobs that may not be seen hold GPUs, too."""
    empty = not node.jobs and node.free_gpus == node.gpus
    return node.connected and node.state == "healthy" and empty


def _work(wanted: FabricJob, free: list[NodeOut]) -> RequestedWork:
    """One rank a GPU, or one a node without GPUs; whole nodes, so that pairs are of nodes."""
    count = wanted.nodes or len(free)
    if count < 2:
        raise FabricError(f"{count} of {len(free)} free nodes: a fabric joins two or more")
    gpus = min((node.gpus for node in free), default=0)
    cpus = 1 if gpus else min((node.cpus for node in free), default=1)
    places = {node.name: (node.leaf, node.pod) for node in free}
    if len(msgspec.json.encode(places)) > MOST_PLACES_BYTES:
        places = {}
    request = structs.replace(wanted.request, ranks_per_node=max(1, gpus), places=places)
    argv = (wanted.python or sys.executable, *program_arguments(request))
    return RequestedWork(
        argv=argv,
        ranks=count * max(1, gpus),
        name="doctor-fabric",
        team=wanted.team,
        constraint=wanted.constraint,
        slot_gpus=gpus,
        slot_cpus=cpus,
        retries=0,
        minutes=wanted.minutes,
        schedule=JobSchedule(deadline_ns=_deadline_ns(wanted)),
    )


def _deadline_ns(wanted: FabricJob) -> int:
    """When it would have to have ended; 0: it waits for its nodes."""
    if not wanted.start_seconds:
        return 0
    return time.time_ns() + int((wanted.start_seconds + 60 * wanted.minutes) * 1e9)
