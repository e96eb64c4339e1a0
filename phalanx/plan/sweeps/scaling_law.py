"""Loss against model size and tokens, fitted to a sweep of sizes: E + A / N^a + B / D^b.

For given exponents the law is linear in E, A and B, which none may be negative: they are solved for
exactly, and only the exponents are searched. Residuals are relative and weighed as Huber does, so
that a trial that went wrong does not bend the curve. Intervals are those of refits to trials drawn
again with repetition.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from phalanx.config import ConfigError

Floats = NDArray[np.float64]
LEAST_POINTS = 5  # of the whole law; fewer than it has constants say nothing
LEAST_SIZES = 3  # of models, and of tokens
MOST_ALIKE = 0.98  # correlation of sizes and tokens above which nobody can tell their parts
EXPONENTS = (0.02, 2.0)
HUBER = 1.345  # deviations that a residual counts in full up to
ROUNDS = 6  # of weights
REFITS = 60
SHARE = 0.9  # of refits that an interval holds
SPREAD = 0.15  # first step of a refit's search, in logarithms of exponents
FINEST = 2e-3  # the last


class ScalingPoint(Struct, frozen=True, kw_only=True):
    """A trained model."""

    parameters: float
    tokens: float
    flops: float
    loss: float


class LawConstants(Struct, frozen=True, kw_only=True):
    """E + A / N^a + B / D^b; without tokens N is the compute, and B is 0."""

    floor: float  # E
    size_factor: float  # A
    size_exponent: float  # a
    token_factor: float = 0.0  # B
    token_exponent: float = 0.0  # b

    def loss(self, size: float, tokens: float = 1.0) -> float:
        """Predicted loss of a model."""
        model = self.size_factor * math.pow(size, -self.size_exponent)
        return self.floor + model + self.token_factor * math.pow(tokens, -self.token_exponent)


class ConfidenceInterval(Struct, frozen=True):
    """A value, and the interval that it lies in."""

    value: float
    low: float
    high: float


class BudgetChoice(Struct, frozen=True, kw_only=True):
    """The best model for a compute budget; size and tokens are None if only the loss is known."""

    flops: float
    loss: ConfidenceInterval
    parameters: ConfidenceInterval | None = None
    tokens: ConfidenceInterval | None = None


class ScalingFit(Struct, frozen=True, kw_only=True):
    """The result of fitting a sweep of sizes."""

    law: Literal["size-and-tokens", "compute"]
    constants: LawConstants
    intervals: dict[str, ConfidenceInterval]  # of the constants, by their names
    error: float  # typical, relative
    points: int
    flops_per_parameter_token: float
    largest_flops: float  # of a trial: beyond it the law is extrapolated
    choices: tuple[BudgetChoice, ...]
    why_compute_alone: str = ""


def fit_scaling_law(points: Sequence[ScalingPoint], budgets: Sequence[float]) -> ScalingFit:
    """Fit the law to trained models, and choose a model for each budget of FLOPs."""
    if len(points) < LEAST_POINTS:
        rule = f"{len(points)} trials reported a loss, too few for the five constants of the law"
        raise ConfigError("fit", "", rule, f"run at least {LEAST_POINTS} sizes")
    problem = alone_because(points)
    law: Literal["size-and-tokens", "compute"] = "compute" if problem else "size-and-tokens"
    losses = np.array([each.loss for each in points])
    if problem:
        axes = [np.array([each.flops for each in points])]
    else:
        axes = [
            np.array([each.parameters for each in points]),
            np.array([each.tokens for each in points]),
        ]
    fitted = _Fit(axes, losses)
    best = fitted.search()
    refits = fitted.refits(best)
    ratio = float(np.median([each.flops / (each.parameters * each.tokens) for each in points]))
    names = ["floor", "size_factor", "size_exponent"]
    names += [] if problem else ["token_factor", "token_exponent"]
    every = [best, *refits]
    return ScalingFit(
        law=law,
        constants=best,
        intervals={name: _within([getattr(each, name) for each in every]) for name in names},
        error=fitted.error(best),
        points=len(points),
        flops_per_parameter_token=ratio,
        largest_flops=max(each.flops for each in points),
        choices=tuple(_choice(flops, ratio, every, law) for flops in budgets),
        why_compute_alone=problem,
    )


def alone_because(points: Sequence[ScalingPoint]) -> str:
    """Why size and tokens cannot be separated; "" if they can."""
    sizes = np.log([each.parameters for each in points])
    tokens = np.log([each.tokens for each in points])
    for name, values in (("model sizes", sizes), ("numbers of tokens", tokens)):
        count = len(np.unique(values.round(3)))
        if count < LEAST_SIZES:
            return f"there are {count} {name}, and {LEAST_SIZES} are needed"
    if abs(float(np.corrcoef(sizes, tokens)[0, 1])) > MOST_ALIKE:
        return "tokens grow with the model in all trials: train some sizes for longer"
    return ""


def optimal(constants: LawConstants, ratio: float, flops: float) -> tuple[float, float]:
    """(parameters, tokens) with the lowest loss for a compute budget."""
    a, b = constants.size_exponent, constants.token_exponent
    pairs = flops / ratio  # parameters times tokens
    lean = constants.size_factor * a, constants.token_factor * b
    if lean[0] <= 0 or lean[1] <= 0:
        return (math.nan, math.nan)
    size = (lean[0] / lean[1]) ** (1 / (a + b)) * pairs ** (b / (a + b))
    return size, pairs / size


def _choice(flops: float, ratio: float, laws: Sequence[LawConstants], law: str) -> BudgetChoice:
    if law == "compute":
        return BudgetChoice(flops=flops, loss=_within([each.loss(flops) for each in laws]))
    chosen = [optimal(each, ratio, flops) for each in laws]
    losses = [each.loss(*pair) for each, pair in zip(laws, chosen, strict=True)]
    return BudgetChoice(
        flops=flops,
        loss=_within(losses),
        parameters=_within([size for size, _ in chosen]),
        tokens=_within([tokens for _, tokens in chosen]),
    )


def _within(values: Sequence[float]) -> ConfidenceInterval:
    """The first value with the interval that holds most of the values and itself."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return ConfidenceInterval(math.nan, math.nan, math.nan)
    low, high = np.quantile(known, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    value = values[0]
    return ConfidenceInterval(value, min(float(low), value), max(float(high), value))


class _Fit:
    """The search for exponents over one or two axes."""

    def __init__(self, axes: Sequence[Floats], losses: Floats) -> None:
        self._losses = losses
        self._middles = [float(np.exp(np.log(axis).mean())) for axis in axes]
        self._logs = [
            np.log(axis / middle) for axis, middle in zip(axes, self._middles, strict=True)
        ]

    def search(self) -> LawConstants:
        """The best law: a coarse look everywhere, then ever finer around the best."""
        everywhere = np.log(np.geomspace(*EXPONENTS, 24))
        grid = np.array(list(itertools.product(everywhere, repeat=len(self._logs))))
        rows = np.arange(len(self._losses))
        start = grid[int(np.argmin(self._solved(grid, rows)[0]))]
        return self._refined(start, rows, 0.2)

    def refits(self, best: LawConstants) -> list[LawConstants]:
        """Fits to bootstrap samples of the trials."""
        draws = np.random.default_rng(0)
        exponents = (best.size_exponent, best.token_exponent)[: len(self._logs)]
        start, found = np.log(exponents), []
        for _ in range(REFITS):
            rows = draws.integers(0, len(self._losses), len(self._losses))
            if len(np.unique(rows)) > len(self._logs) * 2:
                found.append(self._refined(start, rows, SPREAD))
        return found

    def error(self, law: LawConstants) -> float:
        """Typical relative error."""
        axes = [np.exp(log) * middle for log, middle in zip(self._logs, self._middles, strict=True)]
        predicted = [law.loss(*map(float, each)) for each in zip(*axes, strict=True)]
        return float(np.median(np.abs(np.array(predicted) / self._losses - 1)))

    def _refined(self, start: Floats, rows: NDArray[np.int64], step: float) -> LawConstants:
        """A pattern search in the logarithms of the exponents: both at a time, in halving steps."""
        moves = np.array([m for m in itertools.product((-1, 0, 1), repeat=len(start)) if any(m)])
        here, (least, *_) = start, self._solved(start[None], rows)[0]
        low, high = np.log(EXPONENTS)
        while step > FINEST:
            tried = np.clip(here + step * moves, low, high)
            costs = self._solved(tried, rows)[0]
            best = int(np.argmin(costs))
            if costs[best] < least:
                here, least = tried[best], costs[best]
            else:
                step /= 2
        return self._law(np.exp(here), self._solved(here[None], rows)[1][0])

    def _law(self, exponents: Floats, constants: Floats) -> LawConstants:
        """The same law with absolute sizes instead of ratios to their mean."""
        floor, *factors = constants.tolist()
        scaled = [
            (factor * middle**exponent, exponent)
            for factor, middle, exponent in zip(
                factors, self._middles, exponents.tolist(), strict=True
            )
        ]
        (size, size_exponent), (tokens, token_exponent) = [*scaled, (0.0, 0.0)][:2]
        return LawConstants(
            floor=floor,
            size_factor=size,
            size_exponent=size_exponent,
            token_factor=tokens,
            token_exponent=token_exponent,
        )

    def _solved(self, at: Floats, rows: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """(cost, constants) at each of some exponents, which are given by their logarithms."""
        losses = self._losses[rows]
        logs = np.stack([log[rows] for log in self._logs], axis=1)  # [trial, axis]
        columns = np.exp(-np.exp(at)[:, None, :] * logs)  # [candidate, trial, axis]
        ones = np.ones((*columns.shape[:2], 1))
        # Relative: each row is divided by its loss, and should come to 1.
        matrix = np.concatenate([ones, columns], axis=2) / losses[:, None]
        constants = _non_negative(matrix, np.ones(columns.shape[:2]))
        for _ in range(ROUNDS):
            residuals, bound = _residuals(matrix, constants)
            constants = _non_negative(matrix, 1 / np.maximum(1.0, residuals / bound))
        residuals, bound = _residuals(matrix, constants)
        cost = np.where(residuals < bound, residuals**2, bound * (2 * residuals - bound))
        return cost.sum(axis=1), constants


def _residuals(matrix: Floats, constants: Floats) -> tuple[Floats, Floats]:
    """(residuals, what counts in full), by candidate."""
    residuals = np.abs(np.einsum("cti,ci->ct", matrix, constants) - 1)
    deviation = 1.4826 * np.median(residuals, axis=1, keepdims=True)
    return residuals, HUBER * np.maximum(1e-9, deviation)


def _non_negative(matrix: Floats, weights: Floats) -> Floats:
    """Weighted least squares towards 1 by candidate, no constant below 0."""
    weighted = matrix * weights[:, :, None]
    normal = np.einsum("cti,ctj->cij", weighted, matrix)
    normal += 1e-12 * np.eye(matrix.shape[2])
    right = weighted.sum(axis=1)
    found: Floats = np.linalg.solve(normal, right[:, :, None])[:, :, 0]
    for candidate in np.flatnonzero((found < 0).any(axis=1)):
        found[candidate] = _some_left_out(normal[candidate], right[candidate])
    return found


def _some_left_out(normal: Floats, right: Floats) -> Floats:
    """The best of the solutions in which some constants are 0 and none is below."""
    count = len(right)
    best, least = np.zeros(count), 0.0
    for size in range(1, count):
        for kept in itertools.combinations(range(count), size):
            index = np.array(kept)
            square = normal[np.ix_(index, index)]
            part = np.linalg.solve(square, right[index])
            cost = float(part @ square @ part - 2 * part @ right[index])
            if (part >= 0).all() and cost < least:
                least, best = cost, np.zeros(count)
                best[index] = part
    return best
