"""Conditions on scores: ``eval.mmlu >= 0.55``, ``eval.loss <= released + 0.5 %``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

from msgspec import Struct

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
MOST_CHARACTERS = 1_000  # of a condition: numbers are read again for each of their digits
_CONDITION = re.compile(
    rf"(?P<metric>[^<>=\[]+(?:\[[^\]]*\][^<>=]+)?)(?P<sign>>=|<=|==|>|<)\s*"
    rf"(?:(?P<number>{_NUMBER})|released(?:\s*(?P<way>[+-])\s*(?P<margin>{_NUMBER})\s*(?P<percent>%)?)?)\s*"
)
_METRIC = re.compile(r"([\w-]+(?:\[[^\]]*\])?)\.([\w./@-]+)")
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
HINT = 'e.g. "eval.mmlu >= 0.55", or "eval.loss <= released + 0.5 %"'


class MetricName(Struct, frozen=True):
    """A metric of a step."""

    step: str  # with the values of one of its tasks, or without: of all
    metric: str

    def __str__(self) -> str:
        return f"{self.step}.{self.metric}"


class Condition(Struct, frozen=True):
    """A score against a number, or against that of the last release."""

    text: str
    name: MetricName
    sign: str
    number: float  # or what may be added to the released score
    released: bool = False
    percent: bool = False  # of the released score

    def bound(self, released: float) -> float:
        """What a score is compared with."""
        if not self.released:
            return self.number
        margin = abs(released) * self.number / 100 if self.percent else self.number
        return released + margin


class JudgedCondition(Struct, frozen=True):
    """Whether a condition holds, and why."""

    holds: bool
    reason: str


def parse_metric(text: str) -> MetricName:
    """STEP.METRIC; ValueError where it is none."""
    match = _METRIC.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a metric of a step")
    return MetricName(match[1], match[2])


def parse_condition(text: str) -> Condition:
    """A condition; ValueError where it is none."""
    match = _CONDITION.fullmatch(text.strip()) if len(text) <= MOST_CHARACTERS else None
    if match is None:
        raise ValueError("is not a condition")
    name = parse_metric(match["metric"])
    if match["number"] is not None:
        return Condition(text, name, match["sign"], float(match["number"]))
    margin = float(match["margin"] or 0) * (-1 if match["way"] == "-" else 1)
    return Condition(text, name, match["sign"], margin, True, match["percent"] is not None)


def judge(
    condition: Condition, scores: Mapping[str, float], released: Mapping[str, float]
) -> JudgedCondition:
    """Whether it holds for the scores of every task; ``released``: scores of the last release."""
    metric = condition.name.metric
    if condition.released and metric not in released:
        return JudgedCondition(True, f"{condition.text}: the current release has no such score")
    bound = condition.bound(released.get(metric, 0.0))
    failing = {
        task: value for task, value in scores.items() if not _HOLDS[condition.sign](value, bound)
    }
    shown = ", ".join(
        f"{task}.{metric} is {value:.6g}" for task, value in (failing or scores).items()
    )
    against = f" (released: {released[metric]:.6g})" if condition.released else ""
    return JudgedCondition(not failing, f"{condition.text}: {shown}{against}")
