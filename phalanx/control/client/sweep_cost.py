"""What a sweep takes, before it starts: its steps, priced by the server's planner."""

from __future__ import annotations

from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.control.client.client import Client
from phalanx.control.client.sweep_run import trial_submission
from phalanx.control.wire.api_types import JobEstimate
from phalanx.plan.sweeps.description import Settings
from phalanx.plan.sweeps.machine import RungStart
from phalanx.plan.sweeps.planned import SweepPlan

MOST_ASKED = 200  # different shapes that the planner is asked for
ROUNDING = 1e-9  # of sums
# Settings that change no step's time, but for those of the optimizer that do.
FREE, NOT_FREE = (
    ("optimizer.", "schedule.", "train.seed", "data.seed"),
    (
        "optimizer.kind",
        "optimizer.state",
        "optimizer.module",
    ),
)


class SweepCost(Struct, frozen=True, kw_only=True):
    """What all trials take together."""

    steps: int
    gpus: int  # of one trial, the largest
    gpu_hours: float | None  # None: nobody can say, or there are no GPUs
    dollars: float | None


def sweep_cost(client: Client, plan: SweepPlan) -> SweepCost:
    """As planned; ConfigError with the arithmetic where it is above the sweep's budget."""
    budget = plan.sweep.budget
    node_gpus = client.node_gpus()
    hours: float | None = 0.0
    gpus, price = 0, 0.0
    for trial, steps in _shapes(plan).items():
        made = trial_submission(plan, _last(plan, trial), node_gpus, confirmed=True)
        own_gpus = made.spec.gang.gpus(made.spec.gang.replicas)
        gpus = max(gpus, own_gpus)
        quote = client.post("/v1/estimates", made, JobEstimate)
        price = quote.dollars_per_gpu_hour
        own = plan.steps_of(trial, _last(plan, trial).rung)
        if budget.step_seconds is not None:
            each = budget.step_seconds * own_gpus / 3600
        elif quote.estimate is not None and not quote.estimate.by_limit:
            each = quote.estimate.gpu_hours / own
        else:
            hours = None
            break
        assert hours is not None
        hours += each * steps
    known = hours if gpus else None
    dollars = known * price if known is not None else None
    cost = SweepCost(steps=plan.total_steps, gpus=gpus, gpu_hours=known, dollars=dollars)
    _refuse(plan, cost)
    return cost


def _last(plan: SweepPlan, trial: int) -> RungStart:
    return RungStart(trial, len(plan.shape.steps) - 1 if plan.shape is not None else 0)


def _shapes(plan: SweepPlan) -> dict[int, float]:
    """A trial for each shape that has a price of its own, and the steps of all that have it."""
    first: dict[tuple[tuple[str, object], ...], int] = {}
    steps: dict[int, float] = {}
    for trial, settings in enumerate(plan.settings):
        stands_for = first.setdefault(_priced(settings), trial)
        own = plan.steps_of(trial, 0) if plan.shape is None else plan.total_steps / plan.trials
        steps[stands_for] = steps.get(stands_for, 0.0) + own
    if len(steps) > MOST_ASKED:
        rule = f"trials have {len(steps):,} shapes, and the planner is asked for {MOST_ASKED}"
        raise ConfigError("budget", "", rule, "give budget.step_seconds, or a budget of steps")
    return steps


def _priced(settings: Settings) -> tuple[tuple[str, object], ...]:
    return tuple(
        (key, value)
        for key, value in settings.items()
        if key in NOT_FREE or not key.startswith(FREE)
    )


def _refuse(plan: SweepPlan, cost: SweepCost) -> None:
    budget = plan.sweep.budget
    for name, limit, needed in (
        ("gpu_hours", budget.gpu_hours, cost.gpu_hours),
        ("dollars", budget.dollars, cost.dollars),
    ):
        if limit is None:
            continue
        key = f"budget.{name}"
        if needed is None:
            rule = (
                "the planner cannot price a trial here"
                if cost.gpus
                else "trials use no GPUs here, so it has no effect"
            )
            fix = "give budget.step_seconds" if cost.gpus else "give budget.steps"
            raise ConfigError(key, f"{limit:g}", rule, fix)
        if needed > limit * (1 + ROUNDING):
            each = needed / cost.steps
            unit = "GPU-hours" if name == "gpu_hours" else "dollars"
            rule = f"the sweep takes {plan.arithmetic}, x {each:.3g} {unit} a step = {needed:,.4g}"
            most = max(1, int(plan.trials * limit / needed))
            raise ConfigError(key, f"{limit:g}", rule, f"try about {most} trials, or raise it")
