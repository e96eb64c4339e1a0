"""Options of ``phalanx submit`` that say when, after whom and how often, and what may be used."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import typer

from phalanx.cli.queue.times import time_ns
from phalanx.cli.tables import when
from phalanx.cluster.job_relations import After, Array, Dependency
from phalanx.config import ConfigError
from phalanx.control.server.http.submission import JobSchedule
from phalanx.control.wire.api_types import JobRequest

MICRO = 1_000_000
MOST_INDEX = 1_000_000_000  # of an array; how many jobs it may have is the site's policy
_AFTER = re.compile(r"(?:slurm:)?(\d+)(?::(\w+))?")
_KINDS: dict[str, After] = {"ok": "afterok", "any": "afterany", "fail": "afternotok"}
_ARRAY = re.compile(r"(\d+)(?:-(\d+))?(?::(\d+))?(?:%(\d+))?")
_ARRAY_HINT = "e.g. 0-99, 0-99%8 (8 at a time) or 0-30:10 (every tenth)"


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """What the queue is asked for beside nodes."""

    after: Annotated[
        list[str] | None,
        typer.Option(metavar="JOB[:ok|any|fail]", help="Start after this job (repeatable)."),
    ] = None
    array: Annotated[
        str,
        typer.Option(
            metavar="0-99%8",
            help="Submit a job for each index, at most so many at a time (programs only).",
        ),
    ] = ""
    begin: Annotated[
        str, typer.Option(metavar="TIME", help="Not before: 08:00, 2026-11-19T08:00, +2h.")
    ] = ""
    deadline: Annotated[
        str, typer.Option(metavar="TIME", help="Stop the job if it has not ended by then.")
    ] = ""
    partition: Annotated[str, typer.Option(help="Partition whose nodes it takes.")] = ""
    project: Annotated[str, typer.Option(help="Project that its GPU time is charged to.")] = ""
    budget_gpu_hours: Annotated[
        float | None, typer.Option(help="Checkpoint and stop the job when it has used this much.")
    ] = None
    budget_dollars: Annotated[
        float | None, typer.Option(help="The same, at the policy's price of a GPU-hour.")
    ] = None
    time_min: Annotated[
        float,
        typer.Option(
            min=0,
            help="Shortest time limit it accepts in order to start earlier than with --minutes.",
        ),
    ] = 0.0
    hold: Annotated[bool, typer.Option("--hold", help="Wait for `phalanx release`.")] = False
    exclusive: Annotated[
        bool | None,
        typer.Option("--exclusive/--share", help="Give it whole nodes, or only what it asks for."),
    ] = None
    mail: Annotated[str, typer.Option(metavar="ADDRESS", help="Mail when it has ended.")] = ""
    webhook: Annotated[
        str, typer.Option(metavar="URL", help="The server posts there when it has ended.")
    ] = ""

    def schedule(self, now: datetime) -> JobSchedule:
        """What they mean; ConfigError where they make no sense."""
        begin_ns = time_ns("--begin", self.begin, now) if self.begin else 0
        deadline_ns = time_ns("--deadline", self.deadline, now) if self.deadline else 0
        if deadline_ns and deadline_ns <= now.timestamp() * 1e9:
            rule = "is in the past"
            raise ConfigError("--deadline", f'"{self.deadline}"', rule, "give a later time")
        if deadline_ns and deadline_ns <= begin_ns:
            rule = f'is not after --begin "{self.begin}"'
            raise ConfigError("--deadline", f'"{self.deadline}"', rule, "give a later time")
        return JobSchedule(
            after=tuple(dependency(text) for text in self.after or ()),
            array=indices(self.array) if self.array else None,
            begin_ns=begin_ns,
            deadline_ns=deadline_ns,
            held=self.hold,
            partition=self.partition,
            project=self.project,
            budget_gpu_seconds=int(_budget("--budget-gpu-hours", self.budget_gpu_hours) * 3600),
            budget_micro_dollars=int(_budget("--budget-dollars", self.budget_dollars) * MICRO),
            time_min=self.time_min,
            exclusive=self.exclusive,
            mail=self.mail,
            webhook=self.webhook,
        )


def describe_schedule(spec: JobRequest) -> str:
    """When a job runs, after what and how often, and what it may use; "": as soon as it can."""
    kinds: dict[str, str] = {kind: word for word, kind in _KINDS.items()}
    parts = [f"after job {each.job} ({kinds.get(each.kind, each.kind)})" for each in spec.after]
    if (array := spec.array) is not None:
        width = f", {array.width} at a time" if array.width else ""
        parts.append(f"{array.count} jobs{width}")
    parts += [f"not before {when(spec.begin_ns)}"] if spec.begin_ns else []
    parts += [f"ended by {when(spec.deadline_ns)}"] if spec.deadline_ns else []
    if spec.time_min_ns:
        parts.append(f"{spec.time_min_ns / 60e9:g} minutes are enough to start earlier")
    parts += [f"partition {spec.partition}"] if spec.partition else []
    parts += [f"for project {spec.project}"] if spec.project else []
    if spec.budget_gpu_seconds:
        parts.append(f"at most {spec.budget_gpu_seconds / 3600:g} GPU-hours")
    if spec.budget_micro_dollars:
        parts.append(f"at most {spec.budget_micro_dollars / MICRO:g} dollars")
    parts += ["held"] if spec.held else []
    return ", ".join(parts)


def dependency(text: str) -> Dependency:
    """A job to wait for, and what must become of it: JOB[:ok|any|fail]."""
    match = _AFTER.fullmatch(text)
    condition = _KINDS.get(match[2] or "ok") if match is not None else None
    if match is None or condition is None or not int(match[1]):
        rule = "names no job and what must become of it"
        raise ConfigError("--after", f'"{text}"', rule, "e.g. 12, 12:any or 12:fail")
    return Dependency(condition, int(match[1]))


def indices(text: str) -> Array:
    """An array of jobs: FIRST-LAST[:STEP][%WIDTH]."""
    match = _ARRAY.fullmatch(text)
    if match is None:
        rule = "is a list, and an array is a range" if "," in text else "is no range of indices"
        raise ConfigError("--array", f'"{text}"', rule, _ARRAY_HINT)
    first, last, step, width = (int(part) if part is not None else None for part in match.groups())
    assert first is not None
    last = first if last is None else last
    for wrong, rule, fix in (
        (last < first, "ends before it begins", f"give {last}-{first}"),
        (step == 0, "has steps of nothing", "leave :0 out"),
        (width == 0, "lets none of its jobs run", "leave %0 out, or let some run"),
        (max(last, width or 0) > MOST_INDEX, f"goes beyond {MOST_INDEX:,}", _ARRAY_HINT),
    ):
        if wrong:
            raise ConfigError("--array", f'"{text}"', rule, fix)
    count = (last - first) // (step or 1) + 1
    return Array(count, width or 0, first, step or 1)


def _budget(key: str, amount: float | None) -> float:
    if amount is not None and not 0 < amount < 1e9:
        rule = "lets no job run" if amount <= 0 else "is no budget"
        raise ConfigError(key, f"{amount:g}", rule, "give more than 0, or leave it out")
    return amount or 0.0
