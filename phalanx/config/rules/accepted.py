"""Fixes that were tried: what a problem suggests is accepted by the very rules that refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from msgspec import structs

from phalanx.config.errors import Change, ConfigProblem, written
from phalanx.config.schema import Job

RANKS = "world size"  # the key of the number of ranks, which is no setting
LEFT_OUT = 0  # of a number: as if nobody had given it

Rules = Callable[[Job, int], Sequence[ConfigProblem]]


def with_accepted_fix(
    problem: ConfigProblem, job: Job, world_size: int, before: Sequence[ConfigProblem], rules: Rules
) -> ConfigProblem:
    """The problem with those of its changes that mend it and break nothing else."""
    accepted = []
    for group in problem.tries:
        for change in group:
            after = rules(*_changed(job, world_size, change))
            if _is_better(before, after):
                accepted.append(_words(problem, change))
                break
    fix = ", or ".join(dict.fromkeys(accepted)) or problem.fix
    return structs.replace(problem, fix=fix, tries=())


def nearest_first(values: Iterable[int], wanted: int) -> list[int]:
    """Values by their distance; the smaller of two equally near ones first."""
    return sorted(set(values), key=lambda value: (abs(value - wanted), value))


def _is_better(before: Sequence[ConfigProblem], after: Sequence[ConfigProblem]) -> bool:
    """Fewer problems, and none with a key that had none (or fewer)."""
    old, new = (Counter(each.key for each in problems) for problems in (before, after))
    return len(after) < len(before) and new <= old


def _changed(job: Job, world_size: int, change: Mapping[str, Any]) -> tuple[Job, int]:
    for key, value in change.items():
        if key == RANKS:
            world_size = value
            continue
        section, _, name = key.partition(".")
        inner = structs.replace(getattr(job, section), **{name: value})
        job = structs.replace(job, **{section: inner})
    return job, world_size


def _words(problem: ConfigProblem, change: Change) -> str:
    """What to do, in words."""
    settings = {key: value for key, value in change.items() if key != RANKS}
    if RANKS in change:
        text = " and ".join(f"{key} = {written(value)}" for key, value in settings.items())
        return f"start {change[RANKS]} ranks" + (f" with {text}" if text else "")
    texts = []
    for key, value in settings.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if key != problem.key:
            texts.append(f"set {key} = {written(value)}")
        elif number and value == LEFT_OUT:
            texts.append("leave it out")
        else:
            texts.append(f"nearest: {value}" if number else f"set it to {written(value)}")
    return " and ".join(texts)
