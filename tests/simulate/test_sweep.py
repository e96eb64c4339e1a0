"""A sweep through the real core on a fleet that fails: its rungs, its best trial, its rules."""

from __future__ import annotations

import random

from phalanx.plan.sweeps.machine import rung_shape
from phalanx.simulate.scenario.scenario import FleetPart, Scenario
from phalanx.simulate.sweep import PlayedSweep, play_sweep


def test_a_sweep_runs_through_the_core_and_finds_the_best() -> None:
    draws = random.Random(5)
    losses = [draws.random() for _ in range(200)]
    shape = rung_shape(200, 100, 900, 3)
    sweep = PlayedSweep(trials=200, shape=shape, at_once=32, step_seconds=10.0)
    scenario = Scenario(fleet=FleetPart(gpus=32), days=3.0)
    made = play_sweep(scenario, 1, sweep, lambda trial, steps: losses[trial] + 1 / steps)
    assert made.counts == shape.trials and made.jobs == sum(shape.trials)
    assert made.best == losses.index(min(losses))
    assert made.violations == ()
    assert made.gpu_hours >= shape.total_steps * 10 / 3600
