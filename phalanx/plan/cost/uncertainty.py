"""How far a prediction may be off.

Errors of a validated model are close to log-normal: measured = predicted * exp(error). Spreads are
what published runs showed (``evidence/spreads.py``); time that is communication or waiting is less
certain than time that is compute, and one stack runs at another pace than the next:

    spread^2 = within^2 + software^2 + unproven^2 + traits^2 + (exposed share * communication)^2

``unproven`` is of schedules and offload of which hardly a run was measured: a search that goes by
the 90th percentile takes one only where it wins by a margin. ``traits`` is of software that nobody
named: it may hide none of its traffic and gather weights one by one, and a mapping that is only
fast where that is done well is a gamble there.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import structs

from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.step import StepSeconds, step_time
from phalanx.plan.grid import Floats, Grid
from phalanx.plan.machine import Machine
from phalanx.plan.workload import (
    GATHERS_ONE_BY_ONE,
    OFFLOADS,
    SCHEDULES,
    Software,
    Workload,
)

Z80 = 1.2815515655446004  # deviations to either side that hold 80 %; above: the 90th percentile
UNPROVEN = 0.1  # of the logarithm of a step, where no run has shown what a feature really gives
PROVEN_RUNS = 12
COMMUNICATION = ("tensor", "context", "expert", "data", "pipeline", "offload")


def least_spread(
    workload: Workload, machine: Machine, precision: str, constants: Constants, software: Software
) -> float:
    """The spread of a step without any exposed communication."""
    kind, table = workload.kind, constants.error
    within = table.get(f"{kind}:{machine.family}:{precision}", table[kind])
    return math.hypot(within, software_spread(kind, within, constants, software))


def software_spread(kind: str, within: float, constants: Constants, software: Software) -> float:
    """What is left of the spread between stacks once so many runs have shown this one's pace."""
    between = constants.error.get(f"software:{kind}", 0.0)
    if not software.name:
        return math.hypot(between, constants.error.get(f"unnamed:{kind}", 0.0))
    runs = constants.runs.get(f"{software.name}:{kind}", 0)
    return between * within / math.sqrt(within**2 + runs * between**2)


def spread(
    workload: Workload,
    machine: Machine,
    time: StepSeconds,
    grid: Grid,
    constants: Constants,
    software: Software,
) -> Floats:
    """Standard deviation of log(measured / predicted), for each mapping."""
    compute = least_spread(workload, machine, grid.precision, constants, software)
    exposed = sum(time.parts[name] for name in COMMUNICATION) / time.seconds
    unproven = unproven_variance(grid, constants)
    if not software.name:
        plain = step_time(workload, grid, machine, constants, _plain(software))
        unproven = unproven + trait_spread(time.seconds, plain.seconds) ** 2
    return np.sqrt(compute**2 + unproven + (exposed * constants.error["communication"]) ** 2)


def trait_spread(seconds: Floats, plain_seconds: Floats) -> Floats:
    """What it adds that software may be plain: how much longer its step would be.

    As one deviation: of the projects with published runs, near half hid no traffic.
    """
    longer: Floats = np.log(np.maximum(plain_seconds / seconds, 1.0))
    return longer


def _plain(software: Software) -> Software:
    """The same software if it hid no traffic and gathered every parameter by itself."""
    return structs.replace(
        software,
        overlap_gradients=False,
        overlap_tensor=False,
        overlap_pipeline=False,
        overlap_expert=False,
        logarithmic_gathers=False,
        gathers_per_block=GATHERS_ONE_BY_ONE,
    )


def unproven_variance(grid: Grid, constants: Constants) -> Floats:
    """Of what was measured in too few runs; nothing where no run was counted at all."""
    schedule, offload = _unproven(SCHEDULES, constants), _unproven(OFFLOADS, constants)
    piped = np.where(grid.pipeline > 1, schedule[grid.schedule], 0.0)
    variance: Floats = piped + offload[grid.offload]
    return variance


def unproven_spread(feature: str, constants: Constants) -> float:
    """The spread that a schedule or an offload adds."""
    runs = constants.seen.get(feature, 0)
    if not constants.seen or runs >= PROVEN_RUNS or feature == "none":
        return 0.0
    return UNPROVEN / math.sqrt(1 + runs)


def _unproven(features: tuple[str, ...], constants: Constants) -> Floats:
    return np.array([unproven_spread(feature, constants) ** 2 for feature in features])
