"""What ``phalanx sweep`` shows: the plan, trials, the best of them, a fitted law."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence

from phalanx.cli.tables import add_row, plain, print_table, span, table, when
from phalanx.control.client.sweep_cost import SweepCost
from phalanx.control.wire.api_types import SweepLine, TrialOut
from phalanx.plan.sweeps.planned import SweepPlan
from phalanx.plan.sweeps.scaling_law import ConfidenceInterval, ScalingFit


def describe_plan(plan: SweepPlan) -> list[str]:
    """What would be tried, a line each."""
    sweep, method = plan.sweep, plan.sweep.method
    lines = [f"{plan.key}: {plan.trials} trials ({method.kind}), {sweep.at_once} at once"]
    for rung, (steps, count) in enumerate(
        zip(plan.shape.steps, plan.shape.trials, strict=True) if plan.shape is not None else ()
    ):
        lines.append(f"rung {rung}: {count} trials up to step {steps}")
    lines.append(f"at most {plan.arithmetic}, by {sweep.metric} ({sweep.better} is better)")
    return lines


def describe_cost(cost: SweepCost) -> list[str]:
    """What it takes."""
    if cost.gpu_hours is None or cost.dollars is None:
        return []
    return [f"planned: {cost.gpu_hours:,.3g} GPU-hours, {cost.dollars:,.2f} dollars"]


def print_trials(trials: Sequence[TrialOut], plan: SweepPlan, count: int) -> None:
    """The best trials, with the settings that vary in columns of their own."""
    keys = dict.fromkeys(key for each in trials for key in each.settings)
    made = table("TRIAL", "JOB", "STATE", "STEPS", plan.sweep.metric.upper(), "TIME", *keys)
    for each in trials:
        value = f"{each.value:.6g}" if each.value is not None else "-"
        cells = [each.settings.get(key, "-") for key in keys]
        ran = span(each.ran_seconds)
        add_row(made, each.trial, each.job, each.state, each.steps, value, ran, *cells)
    print_table(made)
    if count > len(trials):
        print(f"{len(trials)} of {count} trials; --top 0 shows all")


def print_sweeps(sweeps: Sequence[SweepLine]) -> None:
    """A sweep a line."""
    made = table("SWEEP", "USER", "TRIALS", "LIVE", "FAILED", "METRIC", "BEST", "BEGAN")
    for each in sweeps:
        best = f"{each.best:.6g}" if each.best is not None else "-"
        counts = (each.trials, each.live, each.failed)
        add_row(made, each.sweep, each.user, *counts, each.metric, best, when(each.began_ns))
    print_table(made)


def write_csv(trials: Sequence[TrialOut], metric: str) -> None:
    """All trials, for a sheet."""
    keys = dict.fromkeys(key for each in trials for key in each.settings)
    write = csv.writer(sys.stdout).writerow
    write(["trial", "job", "state", "steps", metric, "seconds", "gpus", *keys])
    for each in trials:
        value = "" if each.value is None else each.value
        facts = [each.trial, each.job, each.state, each.steps, value, each.ran_seconds, each.gpus]
        write([plain(cell) for cell in [*facts, *(each.settings.get(key, "") for key in keys)]])


def fit_lines(fit: ScalingFit, plan: SweepPlan) -> list[str]:
    """A report of a fitted law, as Markdown."""
    constants = fit.constants
    formula = f"{constants.floor:.4g} + {constants.size_factor:.4g} / "
    if fit.law == "compute":
        formula += f"C^{constants.size_exponent:.3g}"
    else:
        formula += f"N^{constants.size_exponent:.3g} + {constants.token_factor:.4g} / "
        formula += f"D^{constants.token_exponent:.3g}"
    lines = [
        f"# Scaling law of {plan.key}",
        "",
        f"loss = {formula}",
        "",
        "N: parameters that a token computes with, without the embedding; D: tokens; C: FLOPs.",
        f"{fit.points} trials, typical error {fit.error:.2%}; intervals hold 90 % of refits.",
    ]
    if fit.why_compute_alone:
        lines += ["", f"Loss against compute alone: {fit.why_compute_alone}."]
    lines += ["", "| constant | value | interval |", "|---|---|---|"]
    for name, found in fit.intervals.items():
        lines.append(f"| {name} | {found.value:.4g} | {found.low:.4g} to {found.high:.4g} |")
    lines += ["", "| FLOPs | loss | parameters | tokens |", "|---|---|---|---|"]
    for choice in fit.choices:
        size, tokens = _interval(choice.parameters), _interval(choice.tokens)
        lines.append(f"| {choice.flops:.3g} | {_interval(choice.loss, 4)} | {size} | {tokens} |")
    beyond = [each for each in fit.choices if each.flops > 1.01 * fit.largest_flops]
    if beyond:
        times = max(each.flops for each in beyond) / fit.largest_flops
        lines += ["", f"Extrapolated up to {times:.3g} times the compute of the largest trial."]
    return lines


def _interval(interval: ConfidenceInterval | None, digits: int = 3) -> str:
    if interval is None:
        return "not known"
    return f"{interval.value:.{digits}g} ({interval.low:.{digits}g} to {interval.high:.{digits}g})"
