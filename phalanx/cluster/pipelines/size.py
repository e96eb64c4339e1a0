"""How much a pipeline makes of its file: counted before its tasks are made.

A file of a few lines can describe billions of tasks, each waiting for all others, with texts of
gigabytes. What is counted here bounds the time and the memory of everything that follows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from phalanx.cluster.pipelines.description import PipelineFile, PipelineStep
from phalanx.cluster.pipelines.templates import placeholders
from phalanx.config import ConfigProblem, problem

MOST_CHARACTERS = 32 << 20  # of all texts of all tasks, with their values filled in
BUILTIN_CHARACTERS = 256  # of a value that every step has
_STEP = re.compile(r"[\w-]*")  # at the beginning of what refers to one


class PipelineLimits(Struct, frozen=True):
    """The most that is taken of a file."""

    tasks: int
    waits: int  # pairs of a task and one that it refers to


HERE = PipelineLimits(tasks=10_000, waits=25_000_000)  # of one that runs where its file is


def too_large(pipeline: PipelineFile, limits: PipelineLimits) -> ConfigProblem | None:
    """What a pipeline has too much of; None: it is not too large."""
    steps = pipeline.steps
    sizes = {name: math.prod(map(len, step.for_each.values())) for name, step in steps.items()}
    tasks = sum(sizes.values())
    if tasks > limits.tasks:
        rule = f"make {tasks:,} tasks, and {limits.tasks:,} is the most"
        return problem("steps", "", rule, "make the lists shorter")
    waits = characters = 0
    for name, step in steps.items():
        waits += sum(_waits(step, sizes[name], text, steps) for text in _references(step))
        characters += sizes[name] * _characters(step)
    if waits > limits.waits:
        rule = (
            f"refer to each other {waits:,} times, task by task, and {limits.waits:,} is the most"
        )
        return problem("steps", "", rule, "make the lists shorter, or let fewer steps wait")
    if characters > MOST_CHARACTERS:
        rule = (
            f"have {characters:,} characters of text in all tasks, and {MOST_CHARACTERS:,} is the"
        )
        return problem("steps", "", f"{rule} most", "make the texts or the lists shorter")
    return None


def texts_of(step: PipelineStep) -> Iterator[tuple[str, str]]:
    """Every text that can contain placeholders, with its key."""
    for name in ("job", "by", "question", "model", "url"):
        yield name, getattr(step, name)
    for name in ("command", "after", "when", "require"):
        yield from ((name, text) for text in getattr(step, name))
    for name in ("inputs", "outputs", "environment", "settings"):
        for key, value in getattr(step, name).items():
            yield f"{name}.{key}", value if isinstance(value, str) else ""


def _waits(step: PipelineStep, tasks: int, text: str, steps: Mapping[str, PipelineStep]) -> int:
    """Pairs of a step's tasks and those that a text refers to."""
    found = _STEP.match(text.strip())
    other = steps.get(found[0]) if found is not None else None
    if other is None:
        return tasks
    if "[" in text:  # one task, which is looked for among all
        return tasks + math.prod(map(len, other.for_each.values()))
    own = (len(values) for key, values in other.for_each.items() if key not in step.for_each)
    return tasks * math.prod(own)


def _references(step: PipelineStep) -> Iterator[str]:
    """Texts that may name another step."""
    by = (step.by,) if step.by else ()
    yield from (*step.after, *step.when, *step.require, *step.inputs.values(), *by)


def _characters(step: PipelineStep) -> int:
    """Of a task of the step, at most."""
    values = (str(value) for values in step.for_each.values() for value in values)
    longest = max(map(len, values), default=0) + BUILTIN_CHARACTERS
    return sum(len(text) + len(placeholders(text)) * longest for _, text in texts_of(step))
