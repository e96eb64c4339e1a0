"""The measured runs that stand behind a prediction, feature by feature."""

from __future__ import annotations

import math

from msgspec import Struct

from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.predict import Prediction
from phalanx.plan.cost.uncertainty import Z80, least_spread, unproven_spread
from phalanx.plan.machine import Machine
from phalanx.plan.workload import Software


class EvidenceBehind(Struct, frozen=True, kw_only=True):
    """Runs that had one feature of the pick."""

    what: str
    runs: int
    margin: float  # by which a step with it must be predicted faster to be proposed, as a share


def evidence_behind(
    prediction: Prediction, machine: Machine, constants: Constants, software: Software
) -> tuple[EvidenceBehind, ...]:
    """The runs behind the software, the work on its GPUs, the schedule and the offload."""
    workload, mapping = prediction.workload, prediction.mapping
    kind, family = workload.kind, machine.family
    within = least_spread(workload, machine, mapping.precision, constants, software)
    stack = f"software {software.name}" if software.name else "software that is not named"
    named = constants.runs.get(f"{software.name}:{kind}", 0)
    work = constants.seen.get(f"{kind}:{family}:{mapping.precision}", 0)
    words = "mixtures of experts" if kind == "moe" else "dense models"
    evidence = [
        EvidenceBehind(what=stack, runs=named, margin=0.0),
        EvidenceBehind(what=f"{words} on {family} in {mapping.precision}", runs=work, margin=0.0),
    ]
    features: dict[str, str] = {mapping.schedule: "schedule"} if mapping.pipeline > 1 else {}
    for feature, sort in (features | {mapping.offload: "offload"}).items():
        if feature == "none":
            continue
        wide = math.hypot(within, unproven_spread(feature, constants))
        what = f"{sort} {feature}"
        margin = math.expm1(Z80 * (wide - within))
        runs = constants.seen.get(feature, 0)
        evidence.append(EvidenceBehind(what=what, runs=runs, margin=margin))
    return tuple(evidence)
