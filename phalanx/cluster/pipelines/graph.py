"""From steps to tasks: one for each value of a step's lists, with what it waits for."""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, cast

from msgspec import Struct, structs

from phalanx.cluster.pipelines.conditions import Condition, parse_condition, parse_metric
from phalanx.cluster.pipelines.description import PipelineFile, PipelineStep, Scalar
from phalanx.cluster.pipelines.templates import builtin, fill

End = Literal["ok", "any", "fail"]


class Produced(Struct, frozen=True, tag=True):
    """An output of another task."""

    task: str
    output: str


class RawFiles(Struct, frozen=True, tag=True):
    """Raw input files."""

    pattern: str


Reads = Produced | RawFiles


class WaitsFor(Struct, frozen=True):
    """A dependency: a task and the outcome that is required of it."""

    task: str
    end: End = "ok"


class Task(Struct, frozen=True):
    """A step with one value of each of its lists."""

    name: str
    step_name: str
    step: PipelineStep  # with the values filled in
    values: dict[str, Scalar]
    reads: dict[str, tuple[Reads, ...]]  # by name of the input
    waits: tuple[WaitsFor, ...]
    when: tuple[Condition, ...]
    require: tuple[Condition, ...]
    measured: dict[str, tuple[str, ...]]  # tasks that have a metric, by STEP.METRIC as written

    @property
    def raw_patterns(self) -> list[str]:
        """Raw inputs of the step, and its job file."""
        sources = [each for reads in self.reads.values() for each in reads]
        patterns = [each.pattern for each in sources if isinstance(each, RawFiles)]
        return [*patterns, self.step.job] if self.step.job else patterns

    @property
    def wants_release(self) -> bool:
        """Whether its conditions use scores of the current release."""
        return any(each.released for each in (*self.when, *self.require))


def task_name(step: str, values: Mapping[str, Scalar]) -> str:
    """``train`` or ``train[seed=1]``."""
    inside = ",".join(f"{name}={value}" for name, value in values.items())
    return f"{step}[{inside}]" if inside else step


def combinations(step: PipelineStep) -> Iterator[dict[str, Scalar]]:
    """Every combination of the values of its lists."""
    for values in itertools.product(*step.for_each.values()):
        yield dict(zip(step.for_each, values, strict=True))


def filled(step: PipelineStep, values: Mapping[str, object]) -> PipelineStep:
    """The step with placeholders filled in."""
    replacements = {**builtin(), **values}

    def texts(words: Iterable[str]) -> tuple[str, ...]:
        return tuple(fill(word, replacements) for word in words)

    def table(entries: Mapping[str, str]) -> dict[str, str]:
        return {name: fill(text, replacements) for name, text in entries.items()}

    return structs.replace(
        step,
        command=texts(step.command),
        job=fill(step.job, replacements),
        settings={
            key: fill(value, replacements) if isinstance(value, str) else value
            for key, value in step.settings.items()
        },
        inputs=table(step.inputs),
        outputs=table(step.outputs),
        environment=table(step.environment),
        when=texts(step.when),
        require=texts(step.require),
        by=fill(step.by, replacements),
        question=fill(step.question, replacements),
        model=fill(step.model, replacements),
        url=fill(step.url, replacements),
        after=texts(step.after),
    )


def split_after(text: str) -> tuple[str, End]:
    """Parse an `after` entry: a step or task, and the required outcome (ValueError if unknown)."""
    name, colon, end = text.rpartition(":")
    if not colon:
        return text, "ok"
    if end not in ("ok", "any", "fail"):
        raise ValueError(f'ends in ":{end}"')
    return name, cast("End", end)


def split_input(text: str, steps: Mapping[str, PipelineStep]) -> tuple[str, str] | None:
    """Step or task, and its output, where an input is one; None: it is a path."""
    name, dot, output = text.partition("].") if "[" in text else text.partition(".")
    step = name.partition("[")[0]
    if not dot or step not in steps or "/" in text or "*" in text:
        return None
    return (f"{name}]" if "[" in text else name), output


class TaskGraph:
    """All tasks of a pipeline that follows the rules, in an order in which they can run."""

    def __init__(self, pipeline: PipelineFile) -> None:
        self._steps = pipeline.steps
        self._values = {
            name: {task_name(name, values): values for values in combinations(step)}
            for name, step in pipeline.steps.items()
        }
        # By step and shared keys, tasks by their values of these.
        self._sharing: dict[tuple[str, tuple[str, ...]], dict[tuple[Scalar, ...], list[str]]] = {}
        made = [
            self._task(name, step_name, values)
            for step_name, tasks in self._values.items()
            for name, values in tasks.items()
        ]
        by_name = {task.name: task for task in made}
        waits = {task.name: [each.task for each in task.waits] for task in made}
        self.in_order = [by_name[name] for name in graphlib.TopologicalSorter(waits).static_order()]

    def matching(self, name: str, values: Mapping[str, Scalar]) -> list[str]:
        """Tasks that a step name refers to from a task: those with the same shared values."""
        if "[" in name:
            return [name]
        shared = tuple(key for key in values if key in self._steps[name].for_each)
        index = self._sharing.get((name, shared))
        if index is None:
            index = self._sharing[name, shared] = {}
            for task, others in self._values[name].items():
                index.setdefault(tuple(others[key] for key in shared), []).append(task)
        return index.get(tuple(values[key] for key in shared), [])

    def _task(self, name: str, step_name: str, values: dict[str, Scalar]) -> Task:
        step = filled(self._steps[step_name], values)
        reads: dict[str, tuple[Reads, ...]] = {}
        for given, text in step.inputs.items():
            made = split_input(text, self._steps)
            reads[given] = (
                (RawFiles(text),)
                if made is None
                else tuple(Produced(task, made[1]) for task in self.matching(made[0], values))
            )
        when, require = (tuple(map(parse_condition, each)) for each in (step.when, step.require))
        metrics = [each.name for each in (*when, *require)]
        metrics += [parse_metric(step.by)] if step.by else []
        measured = {str(each): tuple(self.matching(each.step, values)) for each in metrics}
        waits = [WaitsFor(each.task) for group in reads.values() for each in _produced(group)]
        waits += [WaitsFor(task) for tasks in measured.values() for task in tasks]
        for other, end in map(split_after, step.after):
            waits += [WaitsFor(task, end) for task in self.matching(other, values)]
        unique = tuple(dict.fromkeys(waits))
        return Task(name, step_name, step, values, reads, unique, when, require, measured)


def _produced(group: Iterable[Reads]) -> Iterator[Produced]:
    return (each for each in group if isinstance(each, Produced))
