"""The settings of every trial: a function of the file and the trial's number alone."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence

from phalanx.config.errors import written
from phalanx.plan.sweeps.description import Draw, Scalar, Settings, SweepFile, SweepParameter
from phalanx.plan.sweeps.sobol import sobol_points

DIGITS = 6  # of a drawn number: what a person can read, and finer than any loss tells


def trial_settings(sweep: SweepFile) -> list[Settings]:
    """Settings of each trial, in the order of their numbers."""
    method = sweep.method
    count = method.trials or None
    if method.kind == "grid" or (method.kind == "asha" and method.draw == "grid"):
        grid = [axis_values(each) for each in sweep.parameters.values()]
        found = [_settings(sweep, chosen) for chosen in itertools.product(*grid)]
        if method.kind == "asha":  # those that come first stand for all: no corner of the grid
            random.Random(method.seed).shuffle(found)
        return found[:count]
    assert count is not None
    draw: Draw = method.draw if method.kind == "asha" else method.kind
    return [
        _settings(sweep, [at(each, share) for each, share in zip(axes, point, strict=True)])
        for axes in [list(sweep.parameters.values())]
        for point in _points(draw, len(axes), count, method.seed)
    ]


def grid_size(parameters: dict[str, SweepParameter]) -> int:
    """Trials of the whole grid."""
    return math.prod(len(axis_values(each)) for each in parameters.values())


def texts_of(settings: Settings) -> dict[str, str]:
    """Settings as text in a job file's notation."""
    return {key: written(value) for key, value in settings.items()}


def axis_values(parameter: SweepParameter) -> list[Scalar | Settings]:
    """Grid values of one parameter."""
    if parameter.values:
        return list(parameter.values)
    count = parameter.points
    shares = [0.5] if count == 1 else [index / (count - 1) for index in range(count)]
    return list(dict.fromkeys(_between(parameter, share) for share in shares))


def at(parameter: SweepParameter, share: float) -> Scalar | Settings:
    """The value at a share of the way, below 1."""
    if parameter.values:
        return parameter.values[int(share * len(parameter.values))]
    return _between(parameter, share, drawn=True)


def _between(parameter: SweepParameter, share: float, *, drawn: bool = False) -> float | int:
    low, high = ends(parameter)
    if parameter.range is not None:
        whole = _whole(low) and _whole(high)
        if whole and drawn:  # every number is as likely as the others
            return int(low) + int(share * (int(high) - int(low) + 1))
        value = low + share * (high - low)
    else:
        whole = _whole(low) and _whole(high) and low >= 1
        value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    if whole:
        return min(int(high), max(int(low), round(value)))
    return min(high, max(low, float(f"{value:.{DIGITS}g}")))


def ends(parameter: SweepParameter) -> tuple[float, float]:
    """Of a range, the least and the largest value."""
    found = parameter.range or parameter.log_range
    assert found is not None
    return found


def _whole(value: float) -> bool:
    return isinstance(value, int)


def _points(draw: Draw, dimensions: int, count: int, seed: int) -> Iterator[Sequence[float]]:
    if draw == "sobol":
        yield from sobol_points(dimensions, count, seed)
        return
    draws = random.Random(seed)
    for _ in range(count):
        yield [draws.random() for _ in range(dimensions)]


def _settings(sweep: SweepFile, chosen: Sequence[Scalar | Settings]) -> Settings:
    found: Settings = {}
    for key, value in zip(sweep.parameters, chosen, strict=True):
        found |= value if isinstance(value, dict) else {key: value}
    return found
