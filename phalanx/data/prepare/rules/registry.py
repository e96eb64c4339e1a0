"""The table of rules: name, source, thresholds with their published values, and the function.

A rule looks at a text and says None (keep it), a sentence (drop it, for this reason) or an
``Edited`` text to go on with. Its thresholds are keyword arguments; a recipe may change them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from phalanx.config.errors import ConfigProblem, did_you_mean, problem
from phalanx.data.prepare.words import TextView

Threshold: TypeAlias = int | float | str | tuple[str, ...]


@dataclass(frozen=True)
class Edited:
    """The text that a rule leaves of a document."""

    text: str


Outcome: TypeAlias = str | Edited | None
BoundRule: TypeAlias = Callable[[TextView], Outcome]


@dataclass(frozen=True)
class FilterRule:
    """One rule of a published set."""

    name: str  # "set.rule"
    source: str
    says: str
    thresholds: dict[str, Threshold]
    function: Callable[..., Outcome]

    @property
    def group(self) -> str:
        """The set that it belongs to."""
        return self.name.partition(".")[0]


class RuleTable(dict[str, FilterRule]):
    """All rules by name, in the order in which a set applies them."""

    def add(
        self, name: str, source: str
    ) -> Callable[[Callable[..., Outcome]], Callable[..., Outcome]]:
        """Put a function into the table; its keyword arguments are its thresholds."""

        def record(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
            parameters = list(inspect.signature(function).parameters.values())[1:]
            thresholds = {each.name: each.default for each in parameters}
            assert name not in self and function.__doc__
            says = function.__doc__.partition("\n")[0]
            self[name] = FilterRule(name, source, says, thresholds, function)
            return function

        return record

    @property
    def groups(self) -> list[str]:
        """Names of the sets."""
        return list(dict.fromkeys(rule.group for rule in self.values()))


RULES = RuleTable()


def chosen_rules(
    names: Sequence[str], changes: Mapping[str, Mapping[str, Threshold]]
) -> dict[str, BoundRule]:
    """The rules that names of sets or of rules choose, in that order, with changed thresholds."""
    chosen = [rule for name in names for rule in RULES.values() if name in (rule.name, rule.group)]
    return {rule.name: partial(rule.function, **changes.get(rule.name, {})) for rule in chosen}


def wrong_rules(
    names: Sequence[str], changes: Mapping[str, Mapping[str, Threshold]]
) -> list[ConfigProblem]:
    """Names and thresholds that do not exist, and values of another type than the default's."""
    known = [*RULES.groups, *RULES]
    problems = [
        problem(
            "filter.rules", name, "is neither a rule nor a set of rules", did_you_mean(name, known)
        )
        for name in names
        if name not in known
    ]
    for name, given in changes.items():
        key = f'filter.thresholds."{name}"'
        if name not in RULES:
            problems.append(problem(key, "", "is no rule", did_you_mean(name, list(RULES))))
            continue
        if not {name, RULES[name].group} & set(names):
            fix = f'add "{name}" to filter.rules, or take this out'
            problems.append(problem(key, "", "belongs to a rule that is not applied", fix))
        problems += _wrong_thresholds(key, RULES[name], given)
    return problems


def _wrong_thresholds(
    key: str, rule: FilterRule, given: Mapping[str, Threshold]
) -> list[ConfigProblem]:
    problems = []
    for threshold, value in given.items():
        if threshold not in rule.thresholds:
            known = list(rule.thresholds)
            fix = did_you_mean(threshold, known) if known else "this rule has none"
            problems.append(
                problem(f"{key}.{threshold}", value, "is not one of its thresholds", fix)
            )
            continue
        default = rule.thresholds[threshold]
        number = isinstance(default, int | float)
        fits = isinstance(value, int | float) if number else isinstance(value, type(default))
        if not fits or isinstance(value, bool):
            wanted = (
                "a number" if number else "a string" if isinstance(default, str) else "an array"
            )
            fix = f"its default is {default!r}"
            problems.append(problem(f"{key}.{threshold}", value, f"must be {wanted}", fix))
    return problems
