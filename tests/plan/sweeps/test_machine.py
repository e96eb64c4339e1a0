"""Successive halving: who goes on, in what order, at what cost, whatever was lost on the way."""

from __future__ import annotations

import random

import pytest

from phalanx.plan.sweeps.machine import RungStart, SweepMachine, rung_shape


def played(
    machine: SweepMachine, losses: dict[int, float | None], seed: int, kill: float = 0.0
) -> tuple[SweepMachine, list[RungStart]]:
    """Runs a sweep; trials end in any order, and whoever drives it is lost now and then."""
    draws, started = random.Random(seed), list[RungStart]()
    jobs: dict[RungStart, float | str | None] = {}
    while not machine.done:
        while (start := machine.next_start()) is not None:
            started.append(start)
            jobs[start] = "live"
            machine.began(start.trial, start.rung)
        live = [start for start, state in jobs.items() if state == "live"]
        assert len(live) <= machine.at_once
        ends = draws.choice(live)
        jobs[ends] = losses[ends.trial]
        machine.ended(ends.trial, ends.rung, losses[ends.trial])
        if draws.random() < kill:
            machine = SweepMachine(
                machine.trials, len(machine.rungs), machine.reduction, machine.at_once
            )
            known = list(jobs.items())
            draws.shuffle(known)  # the order that jobs are listed in says nothing
            for start, state in sorted(known, key=lambda each: each[0].rung):
                if state == "live":
                    machine.began(start.trial, start.rung)
                else:
                    machine.ended(start.trial, start.rung, losses[start.trial])
    return machine, started


@pytest.mark.parametrize(("trials", "kill"), [(27, 0.0), (27, 0.3), (28, 0.3), (10, 0.0), (2, 0.5)])
@pytest.mark.parametrize("seed", range(6))
def test_the_best_trial_comes_to_the_last_rung_at_the_known_cost(
    trials: int, kill: float, seed: int
) -> None:
    losses: dict[int, float | None] = dict(
        enumerate(random.Random(seed).sample(range(1000), trials))
    )
    shape = rung_shape(trials, 10, 90, 3)
    machine, started = played(SweepMachine(trials, 3, 3, at_once=4), losses, seed, kill)
    assert len(started) == len(set(started)), "none was begun twice"
    counts = [len(rung.values) for rung in machine.rungs]
    assert tuple(counts) == shape.trials
    best = min(losses, key=lambda trial: losses[trial] or 0.0)
    assert best in machine.rungs[-1].values


def test_rungs_and_their_cost() -> None:
    shape = rung_shape(27, 10, 90, 3)
    assert (shape.steps, shape.trials) == ((10, 30, 90), (27, 9, 3))
    assert shape.total_steps == 27 * 10 + 9 * 20 + 3 * 60
    assert rung_shape(5, 10, 95, 3).steps == (10, 31, 95)
    assert rung_shape(5, 95, 95, 3).steps == (95,)


def test_trials_that_fail_do_not_go_on_and_hold_nobody_up() -> None:
    losses: dict[int, float | None] = {n: None if n % 2 else float(n) for n in range(9)}
    losses[4] = float("nan")
    machine, _ = played(SweepMachine(9, 2, 3, at_once=9), losses, 0)
    assert sorted(machine.rungs[1].values) == [0, 2, 6]
    machine, _ = played(SweepMachine(3, 2, 3, at_once=3), dict.fromkeys(range(3)), 0)
    assert machine.done and not machine.rungs[1].values


def test_those_that_go_on_come_before_new_ones_and_higher_may_be_better() -> None:
    machine = SweepMachine(9, 2, 3, at_once=3, better="higher")
    for trial, score in enumerate([0.1, 0.9, 0.5]):
        machine.ended(trial, 0, score)
    assert machine.next_start() == RungStart(1, 1)


def test_a_cancelled_trial_is_begun_again() -> None:
    machine = SweepMachine(3, 2, 3, at_once=3)
    machine.began(0, 0)
    machine.withdrawn(0, 0)
    assert machine.next_start() == RungStart(0, 0)
    for trial in range(3):
        machine.ended(trial, 0, float(trial))
    machine.began(0, 1)
    machine.withdrawn(0, 1)
    assert machine.next_start() == RungStart(0, 1)


def test_what_ended_is_told_twice_without_harm() -> None:
    machine = SweepMachine(6, 2, 3, at_once=3)
    for _ in range(2):
        for trial in range(3):
            machine.ended(trial, 0, float(trial))
        machine.ended(0, 1, 0.0)
    assert machine.rungs[0].went_on == 1 and machine.next_start() == RungStart(3, 0)
