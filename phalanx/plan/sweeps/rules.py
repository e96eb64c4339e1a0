"""Validation of a sweep: every mistake, before a trial is submitted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.config import (
    ConfigError,
    ConfigProblem,
    Job,
    check,
    default_world_size,
    job_from_table,
    problem,
)
from phalanx.config.errors import did_you_mean
from phalanx.config.load import read_table
from phalanx.plan.sweeps.description import Settings, SweepFile, SweepParameter, read_sweep
from phalanx.plan.sweeps.machine import RungShape, rung_shape
from phalanx.plan.sweeps.planned import SweepPlan, base_steps, base_table, sweep_key
from phalanx.plan.sweeps.sobol import MOST_DIMENSIONS
from phalanx.plan.sweeps.space import ends, grid_size, trial_settings

MOST_TRIALS = 100_000
MOST_CHECKED = 300  # trials that are checked one by one; of more, those that differ in one value
_NAME = re.compile(r"[a-zA-Z0-9][\w-]{0,99}")
OWN = {  # settings that the sweep itself gives its trials
    "name": "each trial has its own",
    "checkpoint.resume": "a trial resumes from its own checkpoint",
}
RUNG_OWN = {
    "train.steps": "the rungs set it; the last one is train.steps of the job file",
    "schedule.steps": "the learning rate of every rung is that of the whole run",
    "checkpoint.at_end": "a promoted trial needs the checkpoint of its rung",
}


def check_sweep(path: Path, node_gpus: int = 0) -> SweepPlan:
    """Check a sweep file; ConfigError with every mistake that can be found beforehand."""
    sweep = read_sweep(path)
    _refuse([*_names(sweep), *_parameters(sweep), *_budget(sweep)])
    base = base_table(_base(sweep, path), sweep.settings)
    _refuse(_method(sweep, base_steps(base)))
    plan = plan_trials(sweep, base)
    _refuse(_trials(plan, node_gpus))
    _refuse(_metric(plan))
    _refuse(_step_budget(plan))
    return plan


def plan_trials(sweep: SweepFile, base: dict[str, Any]) -> SweepPlan:
    """The trials and rungs of a sweep that was checked."""
    shape, settings = _shape(sweep, base_steps(base)), trial_settings(sweep)
    return SweepPlan(
        sweep=sweep,
        base=base,
        key=sweep_key(sweep, base),
        settings=settings if shape is None else settings[: shape.trials[0]],
        shape=shape,
    )


def _refuse(problems: Iterator[ConfigProblem] | list[ConfigProblem]) -> None:
    found = list({(each.key, each.rule): each for each in problems}.values())
    if found:
        raise ConfigError.of(found)


def _names(sweep: SweepFile) -> Iterator[ConfigProblem]:
    if not _NAME.fullmatch(sweep.name):
        yield problem("name", sweep.name, "must be letters, digits, - and _", "take another name")
    if not sweep.parameters:
        yield problem("parameters", "", "there are none", 'write [parameters."optimizer.…"]')


def _parameters(sweep: SweepFile) -> Iterator[ConfigProblem]:
    own = OWN | (RUNG_OWN if sweep.method.kind == "asha" else {})
    for name, parameter in sweep.parameters.items():
        yield from _parameter(f"parameters.{name}", parameter)
        tables = [each for each in parameter.values if isinstance(each, dict)]
        plain = len(tables) < len(parameter.values) or not parameter.values
        keys = dict.fromkeys([*([name] if plain else []), *(key for one in tables for key in one)])
        for key in keys:
            if key in own:
                yield problem(f"parameters.{name}", key, own[key], "take it out")
    for key in sweep.settings:
        if key in OWN:
            yield problem(f"settings.{key}", "", OWN[key], "take it out")


def _parameter(key: str, parameter: SweepParameter) -> Iterator[ConfigProblem]:
    given = [
        name
        for name in ("values", "range", "log_range")
        if getattr(parameter, name) not in ((), None)
    ]
    if not given:
        yield problem(key, "", "has no values", "give values, range or log_range")
    elif len(given) > 1:
        rule = f"has {' and '.join(given)}"
        yield problem(key, "", rule, "give one of them")
    elif parameter.values:
        if len(set(map(str, parameter.values))) < len(parameter.values):
            yield problem(f"{key}.values", "", "contains a value twice", "name each once")
        if any(not each for each in parameter.values if isinstance(each, dict)):
            yield problem(f"{key}.values", "", "has an empty table", "name settings in it")
    else:
        low, high = ends(parameter)
        shown = [low, high]
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            fix = f"e.g. {[high, low]}" if high < low else "give a larger upper bound, or values"
            yield problem(f"{key}.{given[0]}", shown, "is empty", fix)
        elif given == ["log_range"] and low <= 0:
            yield problem(
                f"{key}.log_range", shown, "has no logarithm", "use a lower bound above 0, or range"
            )


def _budget(sweep: SweepFile) -> Iterator[ConfigProblem]:
    given = [
        name
        for name in ("gpu_hours", "dollars", "steps")
        if getattr(sweep.budget, name) is not None
    ]
    for name in given:
        value = getattr(sweep.budget, name)
        if not 0 < value < 1e30:
            rule = "allows no trial" if value <= 0 else "is no budget"
            yield problem(f"budget.{name}", value, rule, "give more than 0, or leave it out")
    if len(given) > 1:
        rule = f"has {' and '.join(given)}"
        yield problem("budget", "", rule, "give one of them; the others follow from it")


def _base(sweep: SweepFile, path: Path) -> dict[str, Any]:
    """The table of the job file, which must itself be a job."""
    try:
        table = read_table(path.parent / sweep.job)
        texts = base_table(table, sweep.settings)
        job_from_table(texts)
    except ConfigError as error:
        raise ConfigError.of(
            problem(f"job {sweep.job}: {each.key}", each.value, each.rule, each.fix)
            for each in error.problems
        ) from None
    return table


def _method(sweep: SweepFile, steps: int) -> Iterator[ConfigProblem]:
    method = sweep.method
    on_grid = method.kind == "grid" or (method.kind == "asha" and method.draw == "grid")
    if on_grid:
        size = grid_size(sweep.parameters)
        if method.trials > size:
            rule = f"the grid has {size:,} trials"
            yield problem("method.trials", method.trials, rule, f"give {size}, or 0 for all of it")
        elif size > MOST_TRIALS:
            rule = f"makes {size:,} trials, and {MOST_TRIALS:,} is the most"
            yield problem("method", "", rule, "give fewer points, or draw: method.kind = random")
    elif not 1 <= method.trials <= MOST_TRIALS:
        rule = f"{method.kind} draws 1 to {MOST_TRIALS:,} trials"
        yield problem("method.trials", method.trials, rule, "say how many, e.g. 27")
    sobol = method.kind == "sobol" or (method.kind == "asha" and method.draw == "sobol")
    if sobol and len(sweep.parameters) > MOST_DIMENSIONS:
        rule = f"sobol spreads over at most {MOST_DIMENSIONS} parameters, and these are "
        rule += str(len(sweep.parameters))
        yield problem("method", "", rule, "draw by random")
    if method.kind == "asha" and not 1 <= method.first_steps <= steps // method.reduction:
        rule = f"the first rung is at most a {method.reduction}th of the job's {steps} steps"
        fix = f"e.g. {max(1, steps // method.reduction**2)}"
        yield problem("method.first_steps", method.first_steps, rule, fix)
    elif method.kind != "asha" and method.first_steps:
        rule = f"{method.kind} has no rungs"
        yield problem("method.first_steps", method.first_steps, rule, 'set method.kind = "asha"')


def _shape(sweep: SweepFile, steps: int) -> RungShape | None:
    method = sweep.method
    if method.kind != "asha":
        return None
    trials = method.trials or grid_size(sweep.parameters)
    return rung_shape(trials, method.first_steps, steps, method.reduction)


def _trials(plan: SweepPlan, node_gpus: int) -> Iterator[ConfigProblem]:
    """Mistakes in the jobs of the trials."""
    for trial in checked_trials(plan.settings):
        try:
            job = plan.job_of(trial)
            check(job, plan.sweep.ranks or default_world_size(job, node_gpus))
        except ConfigError as error:
            for each in error.problems:
                varies = each.key in plan.settings[trial]
                key = f"parameters.{each.key}" if varies else f"trial {trial}: {each.key}"
                yield problem(key, each.value, each.rule, each.fix)


def checked_trials(settings: list[Settings]) -> list[int]:
    """Representative trials to check: all if few, otherwise one for each value of each setting."""
    if len(settings) <= MOST_CHECKED:
        return list(range(len(settings)))
    seen: dict[tuple[str, object], int] = {}
    for trial, values in enumerate(settings):
        for each in values.items():
            seen.setdefault(each, trial)
    found = sorted(set(seen.values()))
    return found if len(found) <= MOST_CHECKED else found[:: -(-len(found) // MOST_CHECKED)]


def _metric(plan: SweepPlan) -> Iterator[ConfigProblem]:
    """Why trials would not report the metric at the end of a rung."""
    metric, job = plan.sweep.metric, plan.job_of(0)
    scores = (*job.evaluate.tasks, *job.evaluate.perplexity)
    if metric == "loss":
        return
    if metric == "validation_loss":
        key, every = "train.validate_every", job.train.validate_every
    elif not job.evaluate.every or any(metric.startswith(name) for name in scores):
        key, every = "evaluate.every", job.evaluate.every
    else:
        rule = "is not a score of the job's [evaluate]"
        known = ("loss", "validation_loss", *scores)
        yield problem("metric", f'"{metric}"', rule, did_you_mean(metric, known))
        return
    if not every:
        rule = f"no trial reports it: {key} is 0"
        known = ("loss", "validation_loss", *scores)
        fix = (
            did_you_mean(metric, known) if key == "evaluate.every" and not scores else f"set {key}"
        )
        yield problem("metric", f'"{metric}"', rule, fix)
        return
    rungs = plan.shape.steps if plan.shape is not None else (plan.steps_of(0, 0),)
    for steps in rungs:
        if steps % every:
            rule = f"is reported every {every} steps ({key}), and a trial is judged after {steps}"
            divisor = math.gcd(*rungs)
            yield problem("metric", f'"{metric}"', rule, f"set {key} to {divisor}")
            return


def _step_budget(plan: SweepPlan) -> Iterator[ConfigProblem]:
    budget = plan.sweep.budget.steps
    if budget is not None and plan.total_steps > budget:
        share = budget / plan.total_steps
        rule = f"the sweep takes {plan.arithmetic}"
        fix = f"try about {max(1, int(plan.trials * share))} trials, or raise it"
        yield problem("budget.steps", f"{budget:g}", rule, fix)


def resolved_trial(plan: SweepPlan, trial: int) -> Job:
    """The resolved job of a trial's last rung."""
    return plan.job_of(trial, len(plan.shape.steps) - 1 if plan.shape is not None else 0)
