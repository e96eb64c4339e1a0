"""A sweep in virtual time, by the same state machine and core as a live one.

Both are those of a live site; played are the fleet with its faults, and the metric.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from phalanx.cluster.job_relations import SweepTrial
from phalanx.cluster.jobs.job import Expected, GangShape, JobSpec, JobState
from phalanx.cluster.protocol.events import Submit
from phalanx.plan.sweeps.machine import RungShape, RungStart, SweepMachine
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.shape import ns
from phalanx.simulate.world.world import World

LOOK_NS = 10 * 10**9  # between two looks at the trials

PlayedLoss = Callable[[int, int], float | None]  # of a trial after so many steps; None: it fails


class PlayedSweep(Struct, frozen=True, kw_only=True):
    """The sweep to simulate."""

    trials: int
    shape: RungShape
    reduction: int = 3
    at_once: int = 64
    step_seconds: float = 1.0
    gpus: int = 1  # of a trial


class SweepOutcome(Struct, frozen=True, kw_only=True):
    """The result of a simulated sweep."""

    hours: float  # until the last trial had ended
    gpu_hours: float  # that its jobs held
    jobs: int
    events: int  # that the core handled
    best: int  # the trial with the least loss at the last rung; -1: there is none
    best_loss: float
    counts: tuple[int, ...]  # trials that came to each rung
    violations: tuple[str, ...]  # rules of the core that were broken


def play_sweep(scenario: Scenario, seed: int, sweep: PlayedSweep, loss: PlayedLoss) -> SweepOutcome:
    """Simulate a sweep on a fleet with the scenario's faults, repairs and queue."""
    return _SweepPlayer(World(scenario, seed), sweep, loss).outcome()


class _SweepPlayer:
    """The simulated driver: polls jobs and submits the next trials."""

    def __init__(self, world: World, sweep: PlayedSweep, loss: PlayedLoss) -> None:
        self._world, self._sweep, self._loss = world, sweep, loss
        shape = sweep.shape
        self._machine = SweepMachine(sweep.trials, len(shape.steps), sweep.reduction, sweep.at_once)
        self._live: dict[int, RungStart] = {}
        self._jobs = self._ended_ns = 0

    def outcome(self) -> SweepOutcome:
        world = self._world
        world.agenda.at(0, self._look)
        world.run([])
        last = self._machine.rungs[-1].values
        reported = {trial: value for trial, value in last.items() if value is not None}
        best = min(reported, key=lambda trial: (reported[trial], trial), default=-1)
        ran_ns = sum(job.ran_ns for job in world.view.jobs.values())
        return SweepOutcome(
            hours=self._ended_ns / 3600e9,
            gpu_hours=ran_ns * self._sweep.gpus / 3600e9,
            jobs=self._jobs,
            events=world.driver.events,
            best=best,
            best_loss=reported.get(best, 0.0),
            counts=tuple(len(rung.values) for rung in self._machine.rungs),
            violations=tuple(map(str, world.checks.found)),
        )

    def _look(self) -> None:
        jobs = self._world.view.jobs
        for number, start in list(self._live.items()):
            job = jobs[number]
            if job.ended:
                del self._live[number]
                steps = self._sweep.shape.steps[start.rung]
                value = self._loss(start.trial, steps) if job.state is JobState.DONE else None
                self._machine.ended(start.trial, start.rung, value)
                self._ended_ns = max(self._ended_ns, job.ended_ns)
        while (following := self._machine.next_start()) is not None:
            self._submit(following)
        if not self._machine.done:
            self._world.agenda.after(LOOK_NS, self._look)

    def _submit(self, start: RungStart) -> None:
        sweep, shape = self._sweep, self._sweep.shape
        before = shape.steps[start.rung - 1] if start.rung else 0
        spec = JobSpec(
            name=f"sweep.{start.trial:05d}",
            gang=GangShape(replicas=sweep.gpus, slot_gpus=sweep.gpus),
            expected=Expected(
                steps=shape.steps[start.rung] - before,
                step_ns=ns(sweep.step_seconds),
                start_ns=ns(self._world.scenario.restart.start_seconds),
            ),
            trial=SweepTrial(
                sweep="sweep", number=start.trial, rung=start.rung, steps=shape.steps[start.rung]
            ),
        )
        newest = next(reversed(self._world.view.jobs), 0)
        self._world.tell(Submit(spec=spec))
        number = next(reversed(self._world.view.jobs), 0)
        assert number == newest + 1, "a trial is one job"
        self._jobs += 1
        self._machine.began(start.trial, start.rung)
        self._live[number] = start
