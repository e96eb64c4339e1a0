"""Job files that somebody writes on the page: checked, planned and priced; nothing is started."""

from __future__ import annotations

import logging
import shlex
from typing import Annotated

from msgspec import Meta

from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.plan_record import PlanRecord
from phalanx.config import ConfigError, Job
from phalanx.control.server.http.endpoints import EVERYBODY, ApiError, Call, Endpoints
from phalanx.control.server.http.planned_job import (
    cost_estimate,
    costs_above,
    planned,
    site_of,
    unplanned,
)
from phalanx.control.server.http.submission import JobSchedule, RequestedWork, spec_of, submission
from phalanx.control.server.http.views import usual_node_gpus
from phalanx.control.wire import api_types as t
from phalanx.observe.job_draft import MOST_TEXT, DraftProblem, drafted, placed

logger = logging.getLogger("phalanx.server")

Setting = Annotated[str, Meta(pattern=r"^[a-z0-9_.]+=", max_length=256)]


class DraftIn(t.In, frozen=True):
    """A job file as text, and what `phalanx submit` takes beside it. No files of anybody."""

    toml: Annotated[str, Meta(max_length=MOST_TEXT)]
    settings: Annotated[tuple[Setting, ...], Meta(max_length=64)] = ()
    gpus: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # 0: as the file says
    folder: Annotated[str, Meta(pattern=r"^(/[^\x00]*)?$", max_length=4096)] = ""
    team: t.Owner = "default"
    minutes: Annotated[float, Meta(ge=0, le=1e7)] = 0.0  # time limit; 0: none
    priority: Annotated[int, Meta(ge=-t.MOST, le=t.MOST)] = 0
    spares: Annotated[int, Meta(ge=0, le=100_000)] = 0
    held: bool = False


class DraftOut(t.Out, frozen=True):
    """What would be submitted, what it takes, and the command that does the same."""

    command: str
    problems: tuple[DraftProblem, ...] = ()
    ranks: int = 0
    nodes: int = 0
    submission: t.Submission | None = None  # what POST /v1/jobs takes
    plan: PlanRecord | None = None
    estimate: t.CostEstimate | None = None
    ask: str = ""  # why it must be confirmed


ENDPOINTS = Endpoints()


@ENDPOINTS.add("POST /v1/drafts", EVERYBODY, body=DraftIn)
async def check_draft(call: Call) -> DraftOut:
    """Check, plan and price a job file; nothing is stored or started."""
    asked, core = call.body, call.leading.core
    node_gpus = usual_node_gpus(core.view.fleet)
    found = await call.server.read(drafted, asked.toml, asked.settings, asked.gpus, node_gpus)
    command = command_of(asked)
    if found.job is None:
        return DraftOut(problems=found.problems, command=command)
    if found.job.code.files:
        rule = "the page sends no files of your own along"
        error = ConfigError("code.files", "", rule, "submit it from where they are: " + command)
        return DraftOut(problems=placed(asked.toml, error.problems), command=command)
    wanted = RequestedWork(
        job=found.job,
        ranks=found.ranks,
        folder=asked.folder,
        team=asked.team,
        minutes=asked.minutes,
        priority=asked.priority,
        spares=asked.spares,
        schedule=JobSchedule(held=asked.held),
    )
    try:
        made = submission(wanted, node_gpus)
    except ConfigError as error:
        return DraftOut(problems=placed(asked.toml, error.problems), command=command)
    spec = await _planned(call, spec_of(made.spec, made.work, found.job), found.job)
    price, shape = core.view.policy.price, spec.gang
    return DraftOut(
        command=command,
        ranks=shape.ranks(shape.replicas),
        nodes=shape.slots(shape.replicas),
        submission=made,
        plan=spec.plan,
        estimate=cost_estimate(price, [spec]),
        ask=costs_above(price, [spec]),
    )


async def _planned(call: Call, spec: JobSpec, job: Job) -> JobSpec:
    """The draft with its plan, made beside the server; why there is none, where it fails."""
    site = site_of(call.leading.core, spec, job, call.server.options.state)
    try:
        return await call.helped(planned, spec, job, site)
    except ApiError:
        raise
    except Exception as error:
        logger.exception("the draft of %s could not be planned", spec.name)
        return unplanned(spec, job, f"the planner failed ({type(error).__name__}: {error})")


def command_of(asked: DraftIn) -> str:
    """What does the same from a terminal, in the folder of the file."""
    words = ["phalanx", "submit", "job.toml"]
    if asked.gpus:
        words += ["--world-size", str(asked.gpus)]
    for each in asked.settings:
        words += ["--set", each]
    if asked.folder:
        words += ["--workdir", asked.folder]
    if asked.team != "default":
        words += ["--team", asked.team]
    for name in ("minutes", "priority", "spares"):
        if value := getattr(asked, name):
            words += [f"--{name}", f"{value:g}" if isinstance(value, float) else str(value)]
    if asked.held:
        words.append("--hold")
    return shlex.join(words)
