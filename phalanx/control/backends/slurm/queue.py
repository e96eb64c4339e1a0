"""Why a job waits in Slurm's queue, and what helps: reasons in words, from one batched query."""

from __future__ import annotations

import json
from bisect import bisect_right
from typing import Any

from msgspec import Struct

from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError, explained

# Slurm's reason (its beginning), in words, and what helps.
REASONS = (
    ("Resources", "it is first in line and waits for nodes", "to wait; fewer nodes would start it"),
    ("Priority", "jobs with a higher priority are before it", "to wait, or another QoS"),
    ("Dependency", "it waits for other jobs", "see backend.slurm.dependency"),
    ("DependencyNeverSatisfied", "what it waits for can no longer come", "cancel it"),
    ("BeginTime", "it may not start yet: Slurm holds a requeued job back for a while", "to wait"),
    ("JobHeldUser", "its owner holds it", "`scontrol release JOB`"),
    ("JobHeldAdmin", "an administrator holds it", "to ask them"),
    ("PartitionNodeLimit", "it asks for more nodes than its partition gives", "fewer nodes"),
    ("PartitionTimeLimit", "its time limit is above its partition's", "a lower backend.hours"),
    ("PartitionDown", "its partition is down", "another backend.slurm.partition"),
    ("PartitionInactive", "its partition takes no jobs", "another backend.slurm.partition"),
    ("ReqNodeNotAvail", "nodes that it needs are down, drained or reserved", "`sinfo -R` says why"),
    ("Reservation", "its reservation has not begun, or is full", "backend.slurm.reservation"),
    ("Licenses", "licences are used up", "to wait"),
    ("QOS", "a limit of its QoS is reached", "jobs of that QoS that end, or another QoS"),
    ("QOSNotAllowed", "its partition does not take its QoS", "backend.slurm.qos, or partition"),
    ("AccountNotAllowed", "its partition does not take its account", "backend.slurm.account"),
    ("Assoc", "a limit of its account is reached", "jobs of that account that end"),
    ("MaxNodePerAccount", "its account has all nodes it may have", "jobs of it that end"),
    ("BadConstraints", "no node has the features it asks for", "backend.slurm.constraint"),
    ("InvalidAccount", "its account is not known", "backend.slurm.account"),
    ("InvalidQOS", "its QoS is not known", "backend.slurm.qos"),
    ("JobArrayTaskLimit", "its array runs as many members as it may", "backend.slurm.array_width"),
    ("NodeDown", "a node that it needs is down", "`sinfo -R` says why"),
    ("SystemFailure", "Slurm itself failed to start it", "to ask the administrators"),
    ("launch failed requeued held", "it could not be started", "`scontrol release JOB`"),
)
BY_LENGTH = sorted(REASONS, key=lambda row: -len(row[0]))
# Limits of one job (QOSMaxNodePerJobLimit, AssocMaxWallDurationPerJobLimit): no other's end helps.
OF_ONE_JOB = "PerJob"
ALONE = (
    "it asks for more than its QoS or account gives one job, and waits for ever",
    "fewer nodes, a lower backend.hours, or another QoS (`sacctmgr show qos`)",
)


class SlurmQueuePosition(Struct, frozen=True, kw_only=True):
    """Where a job is in the queue."""

    job: int
    name: str
    state: str
    reason: str  # Slurm's word
    text: str
    helps: str
    priority: int
    estimated_start: int  # seconds since 1970; 0: Slurm does not say
    nodes: str
    ahead: int  # pending jobs of a higher priority in its partition
    output: str
    restarts: int


def queue(programs: SlurmCommands) -> list[SlurmQueuePosition]:
    """Every job that Slurm still knows, by one call: what asks often must not ask for each."""
    answer = json.loads(programs.run("squeue", "--json"))
    if wrong := answer.get("errors"):  # with --json squeue ends with 0, and does not say why
        programs.run("squeue", "--noheader")
        said = ": ".join(str(wrong[0].get(key) or "") for key in ("description", "error"))
        raise SlurmError(explained("squeue", said.strip(": ")))
    return places(answer)


def places(answer: dict[str, Any]) -> list[SlurmQueuePosition]:
    """What ``squeue --json`` says."""
    jobs = answer.get("jobs", [])
    waiting: dict[str, list[int]] = {}  # priorities by partition, sorted: a site has many jobs
    for job in jobs:
        if _word(job["job_state"]) == "PENDING":
            waiting.setdefault(job["partition"], []).append(_number(job.get("priority")))
    for priorities in waiting.values():
        priorities.sort()
    positions = []
    for job in jobs:
        reason = str(job.get("state_reason") or "")
        text, helps = in_words(reason)
        priority = _number(job.get("priority"))
        others = waiting.get(job["partition"], [])
        state = _word(job["job_state"])
        position = SlurmQueuePosition(
            job=int(job["job_id"]),
            name=str(job.get("name", "")),
            state=state.lower(),
            reason="" if reason == "None" else reason,
            text=text if state == "PENDING" else "",
            helps=helps if state == "PENDING" else "",
            priority=priority,
            estimated_start=_number(job.get("start_time")),
            nodes=str(job.get("nodes", "")),
            ahead=len(others) - bisect_right(others, priority) if state == "PENDING" else 0,
            output=str(job.get("standard_output", "")).replace("%j", str(job["job_id"])),
            restarts=_number(job.get("restart_cnt")),
        )
        positions.append(position)
    return positions


def place_of(programs: SlurmCommands, number: int) -> SlurmQueuePosition:
    """One job; SlurmError where Slurm does not know it any more."""
    for place in queue(programs):
        if place.job == number:
            return place
    raise SlurmError(
        f"Slurm has no job {number} (any more): `sacct -j {number}` knows older ones, where there "
        "is accounting"
    )


def in_words(reason: str) -> tuple[str, str]:
    """A reason of Slurm's, and what helps."""
    if OF_ONE_JOB in reason:
        return ALONE
    for word, text, helps in BY_LENGTH:
        if reason.startswith(word):
            return text, helps
    return (f"Slurm says {reason}" if reason not in ("", "None") else "it is about to start"), ""


def _word(value: object) -> str:
    """Newer releases of Slurm write a list of states."""
    return str(value[0]) if isinstance(value, list) and value else str(value)


def _number(value: object) -> int:
    """Newer releases write {"set": …, "number": …}."""
    if isinstance(value, dict):
        value = value.get("number", 0) if value.get("set", True) else 0
    return int(value) if isinstance(value, int | float) else 0
