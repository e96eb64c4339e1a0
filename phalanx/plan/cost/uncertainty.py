"""How far a prediction may be off.

Errors of a validated model are close to log-normal: measured = predicted * exp(error). The
spread is what published runs showed when their project was left out of the fit; time that is
communication or waiting is less certain than time that is compute:

    spread^2 = compute^2 + (exposed share * communication)^2
"""

from __future__ import annotations

import numpy as np

from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.step import StepSeconds
from phalanx.plan.grid import Floats
from phalanx.plan.machine import Machine
from phalanx.plan.workload import Workload

Z80 = 1.2815515655446004  # deviations to either side that hold 80 %; above: the 90th percentile
COMMUNICATION = ("tensor", "context", "expert", "data", "pipeline", "offload")


def least_spread(
    workload: Workload, machine: Machine, precision: str, constants: Constants
) -> float:
    """The spread of a step without any exposed communication."""
    kind = "moe" if workload.model.moe is not None else "dense"
    table = constants.error
    return table.get(f"{kind}:{machine.family}:{precision}", table[kind])


def spread(
    workload: Workload, machine: Machine, time: StepSeconds, precision: str, constants: Constants
) -> Floats:
    """Standard deviation of log(measured / predicted), for each mapping."""
    compute = least_spread(workload, machine, precision, constants)
    exposed = sum(time.parts[name] for name in COMMUNICATION) / time.seconds
    return np.sqrt(compute**2 + (exposed * constants.error["communication"]) ** 2)
