"""How wide the interval of a prediction must be, measured on runs.

    spread^2 = within^2 + software^2 + unproven^2 + traits^2 + (exposed share * communication)^2

``within`` is what runs of one stack scatter about the stack's own pace, by kind, GPU family and
precision where there are enough. ``software`` is what stacks differ from each other as a whole
(left out of the fit, with their traits), and more where nobody named the stack: then its traits
are only typical. A stack with many runs has shown its pace, so that its share vanishes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import structs

from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.uncertainty import Z80
from phalanx.plan.evidence.fit import LeftOut, unnamed
from phalanx.plan.evidence.published import PublishedRun
from phalanx.plan.evidence.replay import Replay
from phalanx.plan.grid import Floats
from phalanx.plan.machine import family_of

LEAST_RUNS = 12  # for a spread of a group's own
LEAST_STACKS = 2  # for a spread between them
COVERED = 0.8


def with_spreads(
    constants: Constants, runs: Sequence[PublishedRun], left_out: LeftOut
) -> Constants:
    """Constants with each stack's pace and runs, and intervals that hold 80 % of the errors."""
    constants = structs.replace(_with_paces(constants, runs), seen=seen_in(runs))
    replay, kinds = Replay(runs), np.array([run.kind for run in runs])
    measured = np.log(np.array([run.seconds for run in runs], dtype=np.float64))
    seconds = replay.seconds(constants)
    constants = _with_within(constants, replay, np.log(seconds) - measured, kinds)
    _, widths = replay.price(without_software(constants))
    _, nameless = Replay([unnamed(run) for run in runs]).price(without_software(constants))
    table = dict(constants.error)
    for kind in sorted(set(kinds.tolist())):
        rows = kinds == kind
        stacks = {run.software.name for run in runs if run.kind == kind}
        if len(stacks) < LEAST_STACKS:
            continue  # nothing is seen between stacks: the prior stays
        named = _missing(left_out.named[rows], widths[rows] ** 2)
        table[f"software:{kind}"] = float(np.sqrt(named))
        further = _missing(left_out.unnamed[rows], nameless[rows] ** 2 + named)
        table[f"unnamed:{kind}"] = float(np.sqrt(further))
    return structs.replace(constants, error=table)


def seen_in(runs: Sequence[PublishedRun]) -> dict[str, int]:
    """How many runs had each schedule, offload, and kind of work on a GPU family."""
    seen: Counter[str] = Counter()
    for run in runs:
        seen[f"{run.kind}:{family_of(run.cluster.gpu)}:{run.mapping.precision}"] += 1
        if run.mapping.pipeline > 1:
            seen[run.mapping.schedule] += 1
        if run.mapping.offload != "none":
            seen[run.mapping.offload] += 1
    return dict(sorted(seen.items()))


def without_software(constants: Constants) -> Constants:
    """The same without what stacks differ by."""
    kept = {
        label: value
        for label, value in constants.error.items()
        if not label.startswith(("software:", "unnamed:"))
    }
    return structs.replace(constants, error=kept)


def _with_paces(constants: Constants, runs: Sequence[PublishedRun]) -> Constants:
    """Each stack's step over what the terms say, drawn towards 1 where its runs are few."""
    seconds = Replay(runs).seconds(structs.replace(constants, pace={}))
    measured = np.array([run.seconds for run in runs], dtype=np.float64)
    slower: Floats = np.log(measured / seconds)
    labels = [f"{run.software.name}:{run.kind}" if run.software.name else "" for run in runs]
    pace, counts = {}, {}
    for label, count in sorted(Counter(labels).items()):
        if not label:
            continue
        kind = label.partition(":")[2]
        within, between = constants.error[kind], constants.error.get(f"software:{kind}", 0.0)
        trust = between**2 / (between**2 + within**2 / count)
        rows = np.array([one == label for one in labels])
        pace[label], counts[label] = float(np.exp(trust * np.median(slower[rows]))), count
    return structs.replace(constants, pace=pace, runs=counts)


def _with_within(constants: Constants, replay: Replay, errors: Floats, kinds: Floats) -> Constants:
    """Spreads by kind, GPU family and precision, scaled together by kind.

    Exposed communication widens the interval further, so that quantiles alone would be too wide.
    """
    exact = [
        f"{run.kind}:{family}:{run.mapping.precision}"
        for run, family in zip(replay.runs, replay.families(), strict=True)
    ]
    table = dict(constants.error)
    for labels in (kinds.tolist(), exact):
        for label, count in Counter(labels).items():
            if count >= LEAST_RUNS:
                rows = np.array([one == label for one in labels])
                table[label] = float(np.quantile(np.abs(errors[rows]), COVERED)) / Z80
    for kind in sorted(set(kinds.tolist())):
        _, widths = replay.price(without_software(structs.replace(constants, error=table)))
        rows = kinds == kind
        scale = float(np.quantile(np.abs(errors[rows]) / (Z80 * widths[rows]), COVERED))
        table = {
            label: value * (scale if label.startswith(kind) else 1.0)
            for label, value in table.items()
        }
    return structs.replace(constants, error=table)


def _missing(errors: Floats, variances: Floats) -> float:
    """The variance that makes intervals of these variances hold 80 % of the errors."""
    return max(0.0, float(np.quantile((errors / Z80) ** 2 - variances, COVERED)))
