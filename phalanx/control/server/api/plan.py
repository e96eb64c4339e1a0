"""Endpoints of the planner and the simulator: questions of people, answered beside the server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field, structs

from phalanx.config import StageEdit
from phalanx.control.server.http.endpoints import (
    EVERYBODY,
    WRITERS,
    ApiError,
    Call,
    Endpoints,
    in_time,
)
from phalanx.control.server.http.replanned_job import priced_change
from phalanx.control.wire import api_types as t
from phalanx.observe import planning, scenarios
from phalanx.plan.question.request import PlanRequest
from phalanx.plan.search.what_if import JobChange, WhatIf

SHOWN = 200  # results in a list
MOST_RESULTS = 2_000  # beyond these nobody makes more through the server
Quantity = Annotated[str, Meta(pattern=r"^[0-9.]*[kKMGTB]?$", max_length=16)]
Word = Annotated[str, Meta(pattern=r"^[A-Za-z0-9.-]{1,64}$")]
Setting = Annotated[str, Meta(pattern=r"^[a-z0-9_.]+=", max_length=4096)]
Source = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]+$", max_length=64)]
Share = Annotated[float, Meta(ge=0, le=1e30)]
Weights = Annotated[dict[Source, Share], Meta(max_length=256)]
Axis = Annotated[int, Meta(ge=1, le=1_000_000)]


class PlanIn(t.In, frozen=True):
    """As ``phalanx plan`` takes it; quantities as people write them. No files of the server."""

    model: Word
    gpu: Word
    gpus: Annotated[int, Meta(ge=1, le=1_000_000)]
    tokens: Quantity = ""
    sequence: Quantity = ""
    batch: Quantity = ""
    precision: Literal["", "bfloat16", "float16", "fp8", "mxfp8", "nvfp4", "float32"] = ""
    objective: Literal["tokens", "dollars", "days", "memory"] = "tokens"
    tensor: Axis | None = None
    pipeline: Axis | None = None
    context: Axis | None = None
    expert: Axis | None = None
    price: Annotated[float, Meta(ge=0, le=10_000)] | None = None


class SimulateIn(t.In, frozen=True):
    """A small simulation: minutes of a processor are for the command line."""

    scenario: Word
    gpus: Annotated[int, Meta(ge=8, le=scenarios.MOST_GPUS)] = 256
    days: Annotated[float, Meta(gt=0, le=scenarios.MOST_DAYS)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=t.MOST)] = 0


class StageIn(t.In, frozen=True):
    """What is to hold after a step of a job; what is left out stays as it is there."""

    after_step: Annotated[int, Meta(ge=0, le=t.MOST)] = 0  # 0: as soon as is safe
    weights: Weights = field(default_factory=dict)  # of sources of the blend
    sequence: Annotated[int, Meta(ge=0, le=10**9)] = 0  # tokens in a sample
    global_batch: Annotated[int, Meta(ge=0, le=10**9)] = 0
    micro_batch: Annotated[int, Meta(ge=0, le=10**9)] = 0
    rope_scaling: Annotated[tuple[Setting, ...], Meta(max_length=16)] = ()
    remove: bool = False  # the stages that begin there


class WhatIfIn(t.In, frozen=True):
    """A change of a job that runs."""

    settings: Annotated[tuple[Setting, ...], Meta(max_length=64)] = ()  # of its job file
    gpus: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # 0: as many as now
    interval_seconds: Annotated[float, Meta(ge=0, le=1e7)] = 0.0  # between checkpoints; 0: as now
    spares: Annotated[int, Meta(ge=-1, le=100_000)] = -1  # nodes; -1: as now
    precision: Literal["", "float32", "float16", "bfloat16", "fp8"] = ""
    search: bool = False  # the best mapping that there is
    stage: StageIn | None = None  # what it is to read after a step
    undo: bool = False  # its stages are what they were before they were changed last


class ReplanIn(WhatIfIn, frozen=True):
    """A change that is carried out, and a person's reason: a note of the run."""

    why: Annotated[str, Meta(max_length=t.MOST_WHY)] = ""


class ResultPath(t.In, frozen=True):
    result: t.Word


class Results(t.Out, frozen=True):
    folder: str  # where `phalanx simulate --json` may put more
    known: dict[str, str]  # scenarios that come with Phalanx
    results: list[scenarios.ListedResult]


class ResultOut(t.Out, frozen=True):
    name: str
    report: dict[str, Any]


ENDPOINTS = Endpoints()


@ENDPOINTS.add("GET /v1/plan/choices", EVERYBODY)
async def plan_choices(call: Call) -> planning.Choices:
    """List models and devices that the planner knows."""
    return planning.choices()


@ENDPOINTS.add("POST /v1/plan", EVERYBODY, body=PlanIn)
async def plan(call: Call) -> planning.Planned:
    """Choose a mapping for a model on a cluster; nothing is started."""
    body = call.body
    request = PlanRequest(
        model=body.model,
        cluster=f"{body.gpu}-{body.gpus}",
        tokens=body.tokens,
        sequence=body.sequence,
        batch=body.batch,
        precision=body.precision,
        objective=body.objective,
        tensor=body.tensor,
        pipeline=body.pipeline,
        context=body.context,
        expert=body.expert,
        price=body.price,
    )
    if body.model.endswith(".toml") or body.gpu.endswith(".toml"):
        raise ApiError(400, "bad_request", "the server reads no files for others: name a model")
    return await call.helped(planning.plan, request)


@ENDPOINTS.add("GET /v1/jobs/{job}/plan", EVERYBODY, params=t.JobPath)
async def job_plan(call: Call) -> planning.JobPlan:
    """Give the planner's prediction for a job.

    To compare with what is measured.
    """
    return await in_time(call.server.expectations.of(call.leading, call.job()))


@ENDPOINTS.add("POST /v1/jobs/{job}/what-if", EVERYBODY, params=t.JobPath, body=WhatIfIn)
async def what_if(call: Call) -> WhatIf:
    """Estimate what a change would do to a job; nothing is carried out."""
    return (await priced_change(call, asked_change(call.body))).answer


def asked_change(body: WhatIfIn) -> JobChange:
    """The change as the planner takes it."""
    asked = structs.asdict(body)
    asked.pop("why", None)
    if body.stage is not None:
        asked["stage"] = StageEdit(**structs.asdict(body.stage))
    return JobChange(**asked)


@ENDPOINTS.add("GET /v1/simulations", EVERYBODY)
async def list_simulations(call: Call) -> Results:
    """List results of simulations.

    Newest first.
    """
    folder = _folder(call)
    found = await call.server.read(scenarios.lines, folder, SHOWN)
    return Results(folder=str(folder), known=scenarios.names(), results=found)


@ENDPOINTS.add("GET /v1/simulations/{result}", EVERYBODY, params=ResultPath)
async def show_simulation(call: Call) -> ResultOut:
    """Show one result.

    As `phalanx simulate --json` wrote it.
    """
    report = await call.server.read(scenarios.read, _folder(call), call.path.result)
    if report is None:
        raise ApiError(404, "no_such_result", f"there is no result {call.path.result}")
    return ResultOut(name=call.path.result, report=report)


@ENDPOINTS.add("POST /v1/simulations", WRITERS, body=SimulateIn, status=201, audited=True)
async def simulate(call: Call) -> ResultOut:
    """Run a small scenario through the cluster core."""
    body = call.body
    if body.scenario not in scenarios.names():
        known = ", ".join(scenarios.names())
        raise ApiError(404, "no_such_scenario", f"no scenario {body.scenario}; there are {known}")
    if await call.server.read(scenarios.count, _folder(call)) >= MOST_RESULTS:
        text = f"{MOST_RESULTS} results are kept: an administrator removes some"
        raise ApiError(409, "too_many", f"{text} ({_folder(call)})")
    report = await call.helped(scenarios.run, body.scenario, body.gpus, body.days, body.seed)
    name = re.sub(r"[^A-Za-z0-9.-]", "-", f"{body.scenario}-{body.gpus}-{body.days:g}d-{body.seed}")
    await call.server.read(scenarios.write, _folder(call), name, report)
    return ResultOut(name=name, report=report)


def _folder(call: Call) -> Path:
    return call.server.options.state / "simulations"
