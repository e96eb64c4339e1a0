"""Whether predictions order mappings as measurements do, and what the pick by them would cost.

The pick is by the 90th percentile, as the search's is. Runs of one source that answer one question
(the same model, batch, stack, GPUs and format) and differ in their mapping or in what the stack was
set to do form a group: somebody chose among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from msgspec import Struct

from phalanx.plan.cost.uncertainty import Z80
from phalanx.plan.evidence.published import PublishedRun
from phalanx.plan.grid import Floats

TIE = 0.01  # measured as near as this, neither of two is the faster one


class Ordering(Struct, frozen=True, kw_only=True):
    """How measured groups of mappings are ordered; fractions."""

    groups: int
    pairs: int  # measured apart by more than a tie
    right: float  # of those, predicted in the right order
    regret: float  # time of the predicted best over that of the best, less 1: mean of groups
    worst_regret: float


class _Candidate(NamedTuple):
    late: float  # the 90th percentile of what is predicted
    predicted: float
    measured: float


def ordering_of(runs: Sequence[PublishedRun], errors: Floats, spreads: Floats) -> Ordering | None:
    """Of timed runs, their log(predicted / measured) and the spreads of their predictions; None
    where nobody had a choice.
    """
    groups: dict[object, dict[object, list[tuple[float, float, float]]]] = {}
    for run, error, spread in zip(runs, errors.tolist(), spreads.tolist(), strict=True):
        assert run.seconds is not None
        choice = groups.setdefault(_question(run), {}).setdefault((run.mapping, run.software), [])
        measured = math.log(run.seconds)
        choice.append((measured + error + Z80 * spread, measured + error, measured))
    candidates = [[_mean(times) for times in choices.values()] for choices in groups.values()]
    chosen = [group for group in candidates if any(_pairs(group))]
    outcomes = [
        (first.predicted - second.predicted) * (first.measured - second.measured) > 0
        for group in chosen
        for first, second in _pairs(group)
    ]
    if not outcomes:
        return None
    regrets = [min(group).measured / min(one.measured for one in group) - 1 for group in chosen]
    return Ordering(
        groups=len(chosen),
        pairs=len(outcomes),
        right=sum(outcomes) / len(outcomes),
        regret=sum(regrets) / len(regrets),
        worst_regret=max(regrets),
    )


def _question(run: PublishedRun) -> object:
    """What was given when the mapping was chosen."""
    cluster = run.cluster.name, run.mapping.gpus
    return run.project, run.source, run.workload, run.software.name, cluster, run.mapping.precision


def _mean(times: list[tuple[float, float, float]]) -> _Candidate:
    """What was measured several times counts once."""
    return _Candidate(*(math.exp(sum(column) / len(times)) for column in zip(*times, strict=True)))


def _pairs(group: list[_Candidate]) -> Iterator[tuple[_Candidate, _Candidate]]:
    """Those of which one is the faster."""
    for first, second in combinations(group, 2):
        if abs(math.log(first.measured / second.measured)) > TIE:
            yield first, second
