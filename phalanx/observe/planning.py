"""The planner and the simulator for the page: plain functions that a helper process runs."""

from __future__ import annotations

import tomllib

import msgspec
from msgspec import Struct

from phalanx.config import PRESETS, ConfigError, job_from_table, resolve
from phalanx.config.toml_text import parse_toml
from phalanx.hardware import catalogue, cluster
from phalanx.plan import Mapping, Prediction, predict, propose, stage_workloads, understand
from phalanx.plan.cost.money import Range
from phalanx.plan.question.request import PlanRequest
from phalanx.plan.search.proposal import idle_sentence
from phalanx.plan.workload import PRECISIONS


class Choices(Struct, frozen=True):
    """What the planner's sliders offer."""

    models: tuple[str, ...]
    gpus: tuple[str, ...]
    precisions: tuple[str, ...]


class Predicted(Struct, frozen=True, kw_only=True):
    """One mapping and what a step of it takes."""

    mapping: Mapping
    gpus: int
    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    tokens_per_second: float
    mfu: float
    parts: dict[str, float]
    bound_by: str
    memory_bytes: float
    memory_limit: float


class OtherMapping(Struct, frozen=True):
    """A mapping that was nearly as good."""

    mapping: Mapping
    step_seconds: float
    memory_bytes: float


class Planned(Struct, frozen=True, kw_only=True):
    """The best plan for a question, or why there is none."""

    problem: str = ""
    model: str = ""
    parameters: int = 0
    active_parameters: int = 0
    tokens: int = 0
    prediction: Predicted | None = None
    days: Range | None = None
    dollars: Range | None = None
    dollars_per_million_tokens: float = 0.0
    megawatt_hours: Range | None = None
    goodput: Range | None = None
    failures_per_day: float = 0.0
    checkpoint_seconds: float = 0.0
    spare_nodes: int = 0
    alternatives: tuple[OtherMapping, ...] = ()
    considered: int = 0
    search_seconds: float = 0.0
    assumed: tuple[str, ...] = ()


class JobPlan(Struct, frozen=True, kw_only=True):
    """What the plan says of a job that runs; ``problem`` where it can say nothing."""

    problem: str = ""
    prediction: Predicted | None = None


def choices() -> Choices:
    """Models and devices that the planner knows."""
    return Choices(tuple(PRESETS), tuple(each.key for each in catalogue()), tuple(PRECISIONS))


def plan(request: PlanRequest) -> Planned:
    """The best plan. A question without an answer is answered in words."""
    try:
        proposal = propose(understand(request))
    except ConfigError as error:
        return Planned(problem=str(error))
    ahead = proposal.failures
    idle = (f"idle: {idle_sentence(proposal)}",) if proposal.idle else ()
    return Planned(
        model=proposal.model,
        parameters=proposal.parameters,
        active_parameters=proposal.active_parameters,
        tokens=proposal.tokens,
        prediction=_predicted(proposal.prediction),
        days=proposal.bill.days,
        dollars=proposal.bill.dollars,
        dollars_per_million_tokens=proposal.bill.dollars_per_million_tokens,
        megawatt_hours=proposal.bill.megawatt_hours,
        goodput=Range(ahead.goodput_low, ahead.goodput, ahead.goodput_high),
        failures_per_day=ahead.failures_per_day,
        checkpoint_seconds=ahead.interval_seconds,
        spare_nodes=ahead.spares[0].spares,
        alternatives=tuple(
            OtherMapping(each.mapping, each.step_seconds, each.memory_bytes)
            for each in proposal.alternatives
        ),
        considered=proposal.considered,
        search_seconds=proposal.search_seconds,
        assumed=(*proposal.assumed, *idle),
    )


def job_plan(toml: str, ranks: int, kind: str) -> JobPlan:
    """What the planner expects of a job file on devices of a kind."""
    if not kind:
        return JobPlan(problem="the nodes name no kind of GPU that the planner knows")
    try:
        job = resolve(job_from_table(parse_toml(toml), ()), ranks)
        on = cluster(f"{kind}-{ranks}")
        stages = [predict(*each, on) for each in stage_workloads(job)]
        fullest = max(stages, key=lambda each: each.memory_bytes)
        return JobPlan(prediction=_predicted(stages[0].holding(fullest)))
    except (ConfigError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        return JobPlan(problem=str(error))


def _predicted(found: Prediction) -> Predicted:
    return Predicted(**{name: getattr(found, name) for name in Predicted.__struct_fields__})
