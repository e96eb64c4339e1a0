"""Validation of a pipeline: every mistake, before anything runs."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import PurePosixPath

from phalanx.cluster.pipelines.conditions import HINT, MetricName, parse_condition, parse_metric
from phalanx.cluster.pipelines.description import PipelineFile, PipelineStep
from phalanx.cluster.pipelines.graph import (
    Produced,
    RawFiles,
    Task,
    TaskGraph,
    combinations,
    split_after,
    split_input,
    task_name,
)
from phalanx.cluster.pipelines.size import HERE, PipelineLimits, texts_of, too_large
from phalanx.cluster.pipelines.templates import builtin, placeholders
from phalanx.config import ConfigError, ConfigProblem, problem
from phalanx.config.errors import did_you_mean, first_of

_NAME = re.compile(r"[a-zA-Z0-9][\w-]*")
_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*")
_MANY = re.compile(r"[*?\[]")  # in a path that may mean several files
MOST_PATH = 4096  # characters: what a system takes
_FROM_HERE = "name one that exists, by its path from the folder where the command runs"
SCORES = "scores"  # the output, and the input, that holds them

# By kind: keys that it needs, and those that it may have beside what every step has.
WORK = {"inputs", "environment", "retries", "backoff_seconds", "timeout_minutes", "gpus"}
EVERY = {"kind", "after", "when", "for_each", "model"}
KEYS: dict[str, tuple[set[str], set[str]]] = {
    "program": ({"command"}, WORK | {"outputs", "scores"}),
    "data": ({"command", "outputs"}, WORK | {"scores"}),
    "train": ({"job", "outputs"}, WORK | {"settings"}),
    "eval": ({"command", "outputs", "scores"}, WORK),
    "export": ({"inputs", "outputs"}, WORK | {"command"}),
    "best": ({"inputs", "by"}, {"better"}),
    "gate": ({"require"}, set()),
    "approval": ({"question"}, set()),
    "register": ({"model", "inputs"}, {"retries", "backoff_seconds"}),
    "notify": ({"url"}, {"retries", "backoff_seconds", "timeout_minutes"}),
}
SINGLE = {"export": ("checkpoint",), "register": ("checkpoint", SCORES, "export")}  # inputs


def check_pipeline(
    pipeline: PipelineFile,
    exists: Callable[[str], bool],
    limits: PipelineLimits = HERE,
) -> TaskGraph:
    """Its tasks; ConfigError with its mistakes. ``exists``: whether there are such files."""
    large = too_large(pipeline, limits)
    if large is not None:
        raise ConfigError.of([large])
    problems = first_of(chain(_names(pipeline), _steps(pipeline)))
    if problems:
        raise ConfigError.of(problems)
    try:
        tasks = TaskGraph(pipeline)
    except graphlib.CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        fix = "take one of their inputs, conditions or `after` away"
        raise ConfigError("steps", "", f"wait for each other: {circle}", fix) from None
    problems = first_of(_of_tasks(tasks, exists))
    if problems:
        raise ConfigError.of(problems)
    return tasks


def _of_tasks(tasks: TaskGraph, exists: Callable[[str], bool]) -> Iterator[ConfigProblem]:
    yield from _outputs(tasks.in_order)
    for task in tasks.in_order:
        yield from _filled(task)
        yield from _files(task, exists)
        yield from _choices(task, tasks)


def _names(pipeline: PipelineFile) -> Iterator[ConfigProblem]:
    rule, fix = "must be letters, digits, - and _", "take another name"
    if not _NAME.fullmatch(pipeline.name):
        yield problem("name", pipeline.name, rule, fix)
    if not pipeline.steps:
        yield problem("steps", "", "there are none", "write [steps.NAME]")
    for name, step in pipeline.steps.items():
        if not _NAME.fullmatch(name):
            yield problem(f"steps.{name}", "", rule, fix)
        for variable, values in step.for_each.items():
            key = f"steps.{name}.for_each.{variable}"
            if not variable.isidentifier() or variable in builtin():
                yield problem(
                    key, "", "is not a valid name for a value", "use letters, digits and _"
                )
            if not values:
                yield problem(key, list(values), "has no values", "name some, or leave it out")
            if len(set(map(str, values))) < len(values):
                yield problem(key, list(values), "contains a value twice", "name each once")


def _steps(pipeline: PipelineFile) -> Iterator[ConfigProblem]:
    for name, step in pipeline.steps.items():
        key = f"steps.{name}"
        yield from _keys(key, step)
        yield from _placeholders(key, step)
        yield from _references(key, step, pipeline)


def _keys(key: str, step: PipelineStep) -> Iterator[ConfigProblem]:
    needed, allowed = KEYS[step.kind]
    plain = PipelineStep()
    for name in step.__struct_fields__:
        given = getattr(step, name) != getattr(plain, name)
        if name in needed and not given:
            yield problem(f"{key}.{name}", "", f"is missing: kind {step.kind} needs it", "add it")
        elif given and name not in needed | allowed | EVERY:
            others = sorted(kind for kind, keys in KEYS.items() if name in keys[0] | keys[1])
            rule = f"is not a key of kind {step.kind}"
            yield problem(f"{key}.{name}", "", rule, f"it belongs to {', '.join(others)}")
    if step.scores and SCORES not in step.outputs:
        rule = f"are read from an output called {SCORES}, and there is none"
        yield problem(f"{key}.scores", list(step.scores), rule, f"add {SCORES} to its outputs")
    if step.kind in ("train", "export") and len(step.outputs) > 1:
        rule = f"kind {step.kind} makes one output, a folder"
        yield problem(f"{key}.outputs", list(step.outputs), rule, "name one")
    if step.kind in ("export", "register") and "checkpoint" not in step.inputs:
        rule = f"kind {step.kind} reads an input called checkpoint, and there is none"
        yield problem(f"{key}.inputs", list(step.inputs), rule, "add checkpoint")
    if step.kind == "notify" and not step.url.startswith(("http://", "https://")):
        yield problem(f"{key}.url", step.url, "is no address", "e.g. https://host/path")


def _placeholders(key: str, step: PipelineStep) -> Iterator[ConfigProblem]:
    paths = {f"inputs.{name}" for name in step.inputs} | {
        f"outputs.{each}" for each in step.outputs
    }
    values = {*step.for_each, *builtin()}
    for name, text in texts_of(step):
        with_paths = name == "command" or name.startswith(("settings.", "environment."))
        allowed = values | paths if with_paths else values
        for each in placeholders(text):
            if each not in allowed:
                rule = f"{{{each}}} is not a placeholder here"
                fix = (
                    did_you_mean(each, sorted(allowed))
                    + " (braces of a program are doubled: {{ }})"
                )
                yield problem(f"{key}.{name}", text, rule, fix)


def _references(key: str, step: PipelineStep, pipeline: PipelineFile) -> Iterator[ConfigProblem]:
    for name, text in step.inputs.items():
        if (made := split_input(text, pipeline.steps)) is None:
            continue
        yield from _task_named(f"{key}.inputs.{name}", text, made[0], pipeline)
        other = pipeline.steps[made[0].partition("[")[0]]
        offered = list(other.inputs if other.kind == "best" else other.outputs)
        if made[1] not in offered:
            rule = f"{made[0]} has no output {made[1]}"
            fix = did_you_mean(made[1], offered) if offered else "give it one"
            yield problem(f"{key}.inputs.{name}", text, rule, f"{fix} (a file: ./{text})")
    for text in step.after:
        try:
            other_name = split_after(text)[0]
        except ValueError as error:
            yield problem(f"{key}.after", text, str(error), "use :ok, :any or :fail")
        else:
            yield from _task_named(f"{key}.after", text, other_name, pipeline)
    for name in ("when", "require"):
        for text in getattr(step, name):
            try:
                condition = parse_condition(text)
            except ValueError as error:
                yield problem(f"{key}.{name}", text, str(error), HINT)
                continue
            yield from _metric(f"{key}.{name}", text, condition.name, pipeline)
            if condition.released and not step.model:
                rule = "refers to a release, but no model is named"
                yield problem(f"{key}.{name}", text, rule, f"add {key}.model, a registered name")
    if step.by:
        try:
            yield from _metric(f"{key}.by", step.by, parse_metric(step.by), pipeline)
        except ValueError as error:
            yield problem(f"{key}.by", step.by, str(error), "e.g. eval.loss")


def _task_named(key: str, text: str, name: str, pipeline: PipelineFile) -> Iterator[ConfigProblem]:
    step = name.partition("[")[0]
    if step not in pipeline.steps:
        yield problem(key, text, "there is no such step", did_you_mean(step, list(pipeline.steps)))
    elif "{" not in name and "[" in name:
        tasks = [task_name(step, values) for values in combinations(pipeline.steps[step])]
        if name not in tasks:
            yield problem(key, text, "there is no such task", did_you_mean(name, tasks))


def metrics_of(step: PipelineStep, pipeline: PipelineFile) -> tuple[str, ...]:
    """Metrics that a step has when it is done; the best of several has theirs."""
    if step.kind != "best" or not step.by:
        return step.scores
    measured = pipeline.steps.get(parse_metric(step.by).step.partition("[")[0])
    return measured.scores if measured is not None else ()


def _metric(
    key: str, text: str, name: MetricName, pipeline: PipelineFile
) -> Iterator[ConfigProblem]:
    wrong = list(_task_named(key, text, name.step, pipeline))
    yield from wrong
    if wrong:
        return
    offered = metrics_of(pipeline.steps[name.step.partition("[")[0]], pipeline)
    if name.metric not in offered:
        rule = f"no step produces {name}"
        fix = did_you_mean(name.metric, list(offered)) if offered else "list it in its `scores`"
        yield problem(key, text, rule, fix)


def _outputs(tasks: list[Task]) -> Iterator[ConfigProblem]:
    """Mistakes in outputs: paths outside the folder, and paths with two writers."""
    owners: dict[tuple[str, ...], str] = {}
    for task in tasks:
        for name, text in task.step.outputs.items():
            key, path = f"steps.{task.step_name}.outputs.{name}", PurePosixPath(text[:MOST_PATH])
            if len(text) > MOST_PATH:
                rule = f"is longer than {MOST_PATH} characters"
                yield problem(key, f"{text[:40]}…", rule, "take a shorter path")
                continue
            if path.is_absolute() or ".." in path.parts or not path.parts:
                yield problem(key, text, "must lie in the pipeline's folder", "e.g. corpus")
                continue
            owner = f"{task.name}.{name}"
            other = owners.setdefault(path.parts, owner)
            if other != owner:
                rule = f"{other} and {owner} both write it"
                fix = "give each a path of its own" + _vary(task)
                yield problem(key, text, rule, fix)
    for parts, owner in owners.items():
        for size in range(1, len(parts)):
            if (outer := owners.get(parts[:size])) is not None:
                rule = f"lies inside {'/'.join(parts[:size])}, which {outer} writes"
                key = f"steps.{owner.partition('[')[0].partition('.')[0]}.outputs"
                yield problem(key, "/".join(parts), rule, "give each a path of its own")


def _filled(task: Task) -> Iterator[ConfigProblem]:
    """Words that no program and no registry takes, with the values of lists in them."""
    key, step = f"steps.{task.step_name}", task.step
    if step.model and not _MODEL.fullmatch(step.model):
        rule = "must be letters, digits, . _ and -, as a name of a model"
        yield problem(f"{key}.model", step.model, rule, "take another name")
    for name in step.environment:
        if not name or "=" in name or "\0" in name:
            rule = "is no name of a variable"
            yield problem(f"{key}.environment", ascii(name), rule, "take letters, digits and _")
    for name, text in texts_of(step):
        if "\0" in text:
            rule = "holds a NUL character, which no program can be given"
            yield problem(f"{key}.{name}", ascii(text), rule, "take it out")


def _vary(task: Task) -> str:
    return f", with {{{next(iter(task.values))}}} in it" if task.values else ""


def _files(task: Task, exists: Callable[[str], bool]) -> Iterator[ConfigProblem]:
    """Mistakes in inputs: missing raw files, and several files where one is expected."""
    key = f"steps.{task.step_name}"
    for name, reads in task.reads.items():
        patterns = [each.pattern for each in reads if isinstance(each, RawFiles)]
        for pattern in patterns:
            if not exists(pattern):
                rule = "there is no such file, and no step makes it"
                yield problem(f"{key}.inputs.{name}", pattern, rule, _FROM_HERE)
        if len(reads) > 1 or any(map(_MANY.search, patterns)):
            yield from _several(key, name, task.step)
    if task.step.job and not exists(task.step.job):
        yield problem(f"{key}.job", task.step.job, "there is no such file", _FROM_HERE)


def _several(key: str, name: str, step: PipelineStep) -> Iterator[ConfigProblem]:
    """Places where an input of several files cannot stand."""
    placeholder = f"{{inputs.{name}}}"
    if name in SINGLE.get(step.kind, ()):
        rule = f"may be several, and kind {step.kind} takes one"
        fix = "choose one with a step of kind best, or give this step the same for_each"
        yield problem(f"{key}.inputs.{name}", step.inputs[name], rule, fix)
    for word in step.command:
        if placeholder in word and word != placeholder:
            rule = f"{placeholder} may be several files, but is only part of an argument"
            yield problem(key, word, rule, "make it an argument of its own")
    for table in ("settings", "environment"):
        for each, text in getattr(step, table).items():
            if placeholder in str(text):
                rule = f"{placeholder} may be several files, and this takes one"
                yield problem(f"{key}.{table}.{each}", text, rule, "name one, or a folder")


def _choices(task: Task, tasks: TaskGraph) -> Iterator[ConfigProblem]:
    """A best step's inputs must have one candidate for each score."""
    if task.step.kind != "best":
        return
    values = {each.name: each.values for each in tasks.in_order}
    for name, reads in task.reads.items():
        candidates = [each.task for each in reads if isinstance(each, Produced)]
        for measured in task.measured[task.step.by]:
            step = candidates[0].partition("[")[0] if candidates else ""
            of_it = set(tasks.matching(step, values[measured])) if step else set()
            if sum(each in of_it for each in candidates) != 1:
                key, text = f"steps.{task.step_name}.inputs.{name}", task.step.inputs[name]
                metric = f"{measured}.{parse_metric(task.step.by).metric}"
                rule = f"does not have exactly one candidate for {metric}"
                yield problem(key, text, rule, "give both the same for_each")
                break
