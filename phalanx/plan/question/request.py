"""What a person asks of the planner, and the exact question that it means."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct, structs

from phalanx.config import (
    STATE_FORMATS,
    ConfigError,
    Model,
    StateFormat,
    load_job,
    model_of_job,
    named_model,
    run_tokens,
)
from phalanx.config.errors import did_you_mean, plain_reason
from phalanx.config.rules.model import model_problems
from phalanx.config.rules.numbers import nearest_divisor
from phalanx.hardware import Cluster, cluster
from phalanx.plan.cost.constants import Constants, read_constants, shipped
from phalanx.plan.cost.failures import FailureSettings, rate_named
from phalanx.plan.machine import computes
from phalanx.plan.memory.model_counts import parameters
from phalanx.plan.question.emit import workload_of
from phalanx.plan.question.quantities import quantity, short
from phalanx.plan.stacks import stack_of
from phalanx.plan.workload import (
    OFFLOADS,
    PRECISIONS,
    RECOMPUTES,
    ROUTING_SKEW,
    SCHEDULES,
    Software,
    Workload,
    usual_software,
)

Objective = Literal["tokens", "dollars", "days", "memory"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

# Llama 3 trained its 8B and 70B with up to 4M tokens in a batch, its 405B with 16M.
LARGE_PARAMETERS = 100e9
BATCH_TOKENS, LARGE_BATCH_TOKENS = 4 * 2**20, 16 * 2**20
MOST_SEQUENCE = 2**24

NUMBERS = (
    "tensor",
    "pipeline",
    "data",
    "context",
    "expert",
    "zero",
    "micro_batch",
    "virtual_stages",
)
WORDS: dict[str, tuple[str, ...]] = {
    "recompute": RECOMPUTES,
    "schedule": SCHEDULES,
    "precision": PRECISIONS,
    "offload": OFFLOADS,
}


class PlanRequest(Struct, frozen=True, kw_only=True):
    """The question as it was typed; None or "" where nothing was said."""

    model: str
    cluster: str
    tokens: str = ""
    sequence: str = ""
    batch: str = ""  # tokens in a step
    objective: str = "tokens"
    robust: bool = True
    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    context: int | None = None
    expert: int | None = None
    zero: int | None = None
    micro_batch: int | None = None
    virtual_stages: int | None = None
    recompute: str = ""
    schedule: str = ""
    precision: str = ""
    offload: str = ""
    optimizer_state: str = ""
    routing: str = ""  # of tokens to experts
    price: float | None = None
    failure_rate: str = ""
    recovery_seconds: float | None = None
    constants: str = ""  # a file of calibrated constants
    stack: str = ""  # the training software: a name, its traits as key=value, or both


class PlanQuestion(Struct, frozen=True, kw_only=True):
    """The same, understood: a workload, a cluster, what is fixed and what is wanted."""

    name: str  # of the model
    workload: Workload
    cluster: Cluster
    tokens: int
    pins: dict[str, Any]  # fields of Mapping
    objective: Objective
    robust: bool
    failures: FailureSettings
    constants: Constants
    software: Software
    assumed: tuple[str, ...]  # what nobody said


def understand(request: PlanRequest) -> PlanQuestion:
    """Read a request; everything that is wrong with it raises ConfigError with a way out."""
    assumed: list[str] = []
    name, said, tokens = _workload(request.model, assumed)
    model, sequence, batch = said.model, said.sequence, said.global_batch
    if request.sequence:
        sequence = quantity(request.sequence, "sequence", 1, MOST_SEQUENCE, binary=True)
    if not sequence:
        sequence = 8192
        assumed.append(f"sequence {sequence}")
    if request.batch:
        batch = _samples(quantity(request.batch, "batch", 1, 1e12, binary=True), sequence)
    if not batch:
        large = parameters(model).total >= LARGE_PARAMETERS
        batch = max(1, (LARGE_BATCH_TOKENS if large else BATCH_TOKENS) // sequence)
        assumed.append(f"batch of {batch:,} samples, {short(batch * sequence)} tokens")
    on = _priced(cluster(request.cluster), request.price)
    if request.tokens:
        tokens = quantity(request.tokens, "tokens", 1, 1e18)
    if not tokens:
        # Hoffmann et al. 2022: about twenty tokens a parameter.
        tokens = 20 * parameters(model).active
        assumed.append(f"{short(tokens)} tokens, twenty an active parameter")
    pins = _pins(request, model, on)
    if "precision" not in pins and "bfloat16" not in on.gpu.peak_flops:
        pins["precision"] = "float16"
        assumed.append("float16: the GPU has no bfloat16")
    return PlanQuestion(
        name=name,
        workload=structs.replace(
            said,
            sequence=sequence,
            global_batch=batch,
            state=_state(request.optimizer_state) if request.optimizer_state else said.state,
            routing_skew=_routing_skew(request.routing, model, assumed),
        ),
        cluster=on,
        tokens=tokens,
        pins=pins,
        objective=_objective(request.objective),
        robust=request.robust,
        failures=_failures(request),
        constants=load_constants(Path(request.constants))
        if request.constants
        else shipped(on.gpu.family),
        software=stack_of(request.stack, usual_software(on.gpu.family)),
        assumed=tuple(assumed),
    )


# How options are named on the command line.
SHORT = {"tp": "tensor", "pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert"}


def changed(request: PlanRequest, text: str) -> PlanRequest:
    """The request with ``tp=8,cluster=h200-16k`` laid over it."""
    table = msgspec.to_builtins(request)
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in pair.partition("="))
        name = SHORT.get(name, name).replace("-", "_")
        if not equals:
            raise ConfigError(pair, "", "must be option=value", "e.g. tp=8,cluster=h200-16k")
        if name not in table:
            known = [*SHORT, *(field for field in table if field not in SHORT.values())]
            raise ConfigError(name, value, "no such option", did_you_mean(name, known))
        table[name] = value
    try:
        return msgspec.convert(table, PlanRequest, strict=False)
    except msgspec.ValidationError as error:
        fix = "write numbers as numbers, e.g. tp=8,cluster=h200-16k"
        raise ConfigError("options", text, str(error), fix) from None


def _workload(text: str, assumed: list[str]) -> tuple[str, Workload, int]:
    """Name, and what a job file says of a step and of all tokens; 0: nothing is said."""
    if not text.endswith(".toml"):
        return text, Workload(model=named_model(text), sequence=0, global_batch=0), 0
    job = load_job(Path(text))
    model = model_of_job(job, text)
    if problems := list(model_problems(model)):
        raise ConfigError.of(problems)
    if job.train.sequence_stages:
        assumed.append("samples as long as the first (`phalanx train --dry-run` counts the others)")
    return job.name, workload_of(structs.replace(job, model=model)), run_tokens(job)


def _state(text: str) -> StateFormat:
    for known in STATE_FORMATS:
        if text == known:
            return known
    words = did_you_mean(text, STATE_FORMATS)
    raise ConfigError("optimizer-state", text, "no such format of the optimizer's moments", words)


def _routing_skew(text: str, model: Model, assumed: list[str]) -> float:
    if text and model.moe is None:
        raise ConfigError("routing", text, "the model has no experts", "leave it out")
    if text and text not in ROUTING_SKEW:
        fix = did_you_mean(text, list(ROUTING_SKEW))
        raise ConfigError("routing", text, "no such routing", fix)
    if model.moe is not None and not text:
        assumed.append(f"real routing: experts' loads spread by {ROUTING_SKEW['real']:.0%}")
    return ROUTING_SKEW[text or "real"]


def _samples(tokens: int, sequence: int) -> int:
    if tokens < sequence:
        rule = f"must hold at least one sample of {sequence} tokens"
        raise ConfigError("batch", tokens, rule, f"try {sequence}")
    return round(tokens / sequence)


def _priced(on: Cluster, price: float | None) -> Cluster:
    if price is None:
        return on
    if not 0 <= price <= 1e4:
        raise ConfigError("price", price, "must be dollars a GPU-hour, 0 to 10000", "e.g. 2.5")
    return structs.replace(on, price_per_gpu_hour=price)


def _objective(text: str) -> Objective:
    for known in OBJECTIVES:
        if text == known:
            return known
    raise ConfigError("objective", text, "no such objective", did_you_mean(text, OBJECTIVES))


def _failures(request: PlanRequest) -> FailureSettings:
    settings = FailureSettings()
    if request.failure_rate:
        settings = structs.replace(settings, rate=rate_named(request.failure_rate))
    if request.recovery_seconds is not None:
        if not 0 < request.recovery_seconds <= 1e6:
            rule = "must be above 0, at most 1e6"
            raise ConfigError("recovery-seconds", request.recovery_seconds, rule, "e.g. 300")
        settings = structs.replace(settings, recovery_seconds=request.recovery_seconds)
    return settings


_CALIBRATE = "make one with `phalanx plan calibrate`"


def load_constants(path: Path) -> Constants:
    """Constants that ``phalanx plan calibrate`` wrote."""
    try:
        return read_constants(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("constants", str(path), "no such file", _CALIBRATE) from None
    except (OSError, msgspec.ValidationError, ValueError) as error:
        rule = f"cannot be read: {plain_reason(error)}"
        raise ConfigError("constants", str(path), rule, _CALIBRATE) from None


def _pins(request: PlanRequest, model: Model, on: Cluster) -> dict[str, Any]:
    pins: dict[str, Any] = {}
    gpus = on.gpus
    for name in NUMBERS:
        value = getattr(request, name)
        if value is not None:
            least, most = (0, 3) if name == "zero" else (1, gpus)
            if name in ("micro_batch", "virtual_stages"):
                most = 4096
            if not least <= value <= most:
                near = f"nearest: {min(max(value, least), most)}"
                raise ConfigError(name, value, f"must be {least} to {most:,}", near)
            pins[name] = value
    for name, known in WORDS.items():
        value = getattr(request, name)
        if value:
            if value not in known:
                raise ConfigError(name, f'"{value}"', "unknown", did_you_mean(value, known))
            pins[name] = value
    _check_axes(pins, model, gpus)
    _check_precision(pins.get("precision", ""), on)
    return pins


def _check_precision(precision: str, on: Cluster) -> None:
    # Devices that have fp4 are those that scale blocks of narrow numbers in hardware.
    needed = {"mxfp8": "fp4", "nvfp4": "fp4"}.get(precision, precision)
    wider = precision == "float32" and computes(on.gpu, precision)
    if needed and needed not in on.gpu.peak_flops and not wider:
        fix = "its formats: " + ", ".join(on.gpu.peak_flops)
        raise ConfigError("precision", f'"{precision}"', f"{on.gpu.name} lacks it", fix)


def _check_axes(pins: dict[str, Any], model: Model, gpus: int) -> None:
    product = 1
    for axis in ("tensor", "pipeline", "data", "context"):
        if axis in pins:
            rest = gpus // product
            if gpus % (product * pins[axis]):
                rule = f"must divide the {gpus:,} GPUs" + (f" / {product}" if product > 1 else "")
                near = nearest_divisor(rest, pins[axis])
                raise ConfigError(axis, pins[axis], rule, f"nearest: {near}")
            product *= pins[axis]
    if {"tensor", "pipeline", "data", "context"} <= pins.keys() and product != gpus:
        rule = f"tensor x pipeline x data x context = {product:,} must be the {gpus:,} GPUs"
        fix = f"leave out data: it follows as {gpus * pins['data'] // product}"
        raise ConfigError("data", pins["data"], rule, fix)
    if "expert" in pins and pins["expert"] > 1:
        if model.moe is None:
            raise ConfigError("expert", pins["expert"], "the model has no experts", "leave it out")
        if model.moe.experts % pins["expert"]:
            near = nearest_divisor(model.moe.experts, pins["expert"])
            rule = f"must divide the {model.moe.experts} experts"
            raise ConfigError("expert", pins["expert"], rule, f"nearest: {near}")
    _check_stages(pins)
    if pins.get("pipeline", 1) > model.layers:
        rule = f"must be at most the {model.layers} layers"
        raise ConfigError("pipeline", pins["pipeline"], rule, f"nearest: {model.layers}")


def _check_stages(pins: dict[str, Any]) -> None:
    """What only a pipeline has is not asked of one GPU after the other without one."""
    usual = {"schedule": "1f1b", "virtual_stages": 1}
    for name, plain in usual.items():
        if pins.get("pipeline") == 1 and pins.get(name, plain) != plain:
            fix = "leave it out, or fix pipeline at 2 or more"
            raise ConfigError(name, pins[name], "needs a pipeline, and pipeline = 1", fix)
