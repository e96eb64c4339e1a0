"""The planner's word on choices of settings, and its constants fitted anew to what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct, structs

from phalanx.config import ConfigError, Job, resolve
from phalanx.hardware import Cluster
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.predict import predict
from phalanx.plan.evidence.fit import ROUNDS, CalibrationFit, Knob
from phalanx.plan.evidence.published import PublishedRun
from phalanx.plan.evidence.spreads import seen_in
from phalanx.plan.machine import family_of
from phalanx.plan.question.emit import mapping_of, workload_of
from phalanx.plan.tune.settings import Choice, Setting, changed, runs
from phalanx.plan.tune.trials import PredictedStep
from phalanx.plan.workload import Software, usual_software

# How far constants of one machine may be from the shipped ones, in log units.
WIDTHS = {"memory": 0.3, "kernel_seconds": 1.0, "step_seconds": 0.7, "unmodelled": 0.5}
MATMUL_WIDTH = 0.7
LEAST_STEPS = 4  # different mappings that a fit takes
LEAST_ERROR = 0.02


class MeasuredJob(Struct, frozen=True):
    """A resolved job and the seconds of its step."""

    job: Job
    seconds: float


class Refit(Struct, frozen=True, kw_only=True):
    """Constants for this machine, and how far predictions were and are from what was measured."""

    constants: Constants
    steps: int
    error_before: float  # mean of |predicted / measured - 1|
    error_after: float


def predictor(
    job: Job, settings: Sequence[Setting], ranks: int, on: Cluster | None, constants: Constants
) -> Callable[[Choice], PredictedStep | None]:
    """Says of a choice what its steps would take; without a known device only whether it runs."""

    def predicted(choice: Choice) -> PredictedStep | None:
        keys = (setting.key for setting in settings)
        asked = changed(job, dict(zip(keys, choice, strict=True)))
        if not runs(asked, ranks):
            return None
        if on is None:
            return PredictedStep()
        asked = resolve(asked, ranks)
        try:
            prediction = predict(
                workload_of(asked),
                mapping_of(asked),
                on,
                constants=constants,
                software=software_of(asked, on),
            )
        except ConfigError:
            return PredictedStep()
        limit = 0.0 if on.gpu.family == "cpu" else prediction.memory_limit
        return PredictedStep(prediction.step_seconds, prediction.memory_bytes, limit)

    return predicted


def software_of(job: Job, on: Cluster) -> Software:
    """This trainer as the job runs it: blocks that are not compiled make more passes."""
    usual = usual_software(on.gpu.family)
    return structs.replace(usual, fused=usual.fused and job.train.compile != "off")


def refit(measured: Sequence[MeasuredJob], on: Cluster, base: Constants) -> Refit | None:
    """Constants that explain measured steps; None where these say too little."""
    made = [_run(number, one, on) for number, one in enumerate(measured)]
    if len({str(run.mapping) + str(run.software.fused) for run in made}) < LEAST_STEPS:
        return None
    fit = CalibrationFit(made, base, _knobs(made[0], on, base))
    start = np.zeros(len(fit.knobs))
    before = fit.residuals(start)
    shift, _ = fit.solve(np.ones(len(made), dtype=bool), start, ROUNDS)
    after = fit.residuals(shift)
    label = f"{made[0].kind}:{family_of(on.gpu)}:{made[0].mapping.precision}"
    spread = max(LEAST_ERROR, float(np.sqrt(np.mean(after**2))))
    constants = fit.constants(shift)
    return Refit(
        constants=structs.replace(
            constants,
            error=constants.error | {label: spread},
            runs=constants.runs | {f"{made[0].software.name}:{made[0].kind}": len(made)},
            seen=constants.seen | _seen_here(made, constants),
        ),
        steps=len(made),
        error_before=float(np.mean(np.abs(np.expm1(before)))),
        error_after=float(np.mean(np.abs(np.expm1(after)))),
    )


def _seen_here(made: Sequence[PublishedRun], constants: Constants) -> dict[str, int]:
    """What own steps add to the runs that had a feature, where these are counted at all."""
    counted = seen_in(made) if constants.seen else {}
    return {name: count + constants.seen.get(name, 0) for name, count in counted.items()}


def _run(number: int, one: MeasuredJob, on: Cluster) -> PublishedRun:
    """A measured step in the form that calibration reads."""
    return PublishedRun(
        row=number,
        source="tune",
        project="tune",
        workload=workload_of(one.job),
        mapping=mapping_of(one.job),
        software=software_of(one.job, on),
        cluster=on,
        seconds=one.seconds,
        memory_bytes=None,
        out_of_memory=False,
        complete=True,
        recompute_known=True,
    )


def _knobs(run: PublishedRun, on: Cluster, base: Constants) -> list[Knob]:
    """The constants that steps of one machine decide; one that is zero stays so."""
    family, precision = family_of(on.gpu), run.mapping.precision
    names = (f"{family}:{precision}", f"{family}:bfloat16")
    key = next((name for name in names if name in base.matmul), "default")
    knobs = [Knob("matmul", key, base.matmul[key], MATMUL_WIDTH)]
    for field, width in WIDTHS.items():
        if value := getattr(base, field):
            knobs.append(Knob(field, "", value, width))
    return knobs
