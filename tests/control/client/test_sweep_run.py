"""Whoever drives a sweep keeps nothing: killed at any request, the next one goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from phalanx.cluster.jobs.job import JobState
from phalanx.config import ConfigError
from phalanx.control.client import sweep_run
from phalanx.control.client.client import ClientError
from phalanx.control.client.sweep_cost import sweep_cost
from phalanx.control.client.sweep_run import (
    SweepError,
    SweepRun,
    SweepStopped,
    cancel_sweep,
    gpu_hours,
    ranked,
)
from phalanx.control.wire.api_types import (
    CostEstimate,
    Done,
    JobEstimate,
    JobsSubmitted,
    Submission,
    SweepOut,
    TrialOut,
)
from phalanx.plan.sweeps.planned import SweepPlan
from phalanx.plan.sweeps.rules import check_sweep

JOB = """
name = "base"
[model]
preset = "tiny"
[train]
steps = 90
device = "cpu"
"""
SWEEP = """
name = "rates"
job = "job.toml"
ranks = 1
at_once = 3
[method]
kind = "asha"
draw = "grid"
first_steps = 10
[parameters."optimizer.learning_rate"]
log_range = [1e-4, 1e-2]
points = 9
"""


class KilledError(Exception):
    """The driver is lost here."""


class PlayedServer:
    """Jobs by number, some of which end at each look; stands in for a ``Client``."""

    def __init__(self, seed: int = 0, gpus: int = 1) -> None:
        self.jobs: dict[int, TrialOut] = {}
        self.draws, self.gpus = random.Random(seed), gpus
        self.kill_at = 0  # requests until the driver is lost; 0: never
        self.value = lambda trial: abs(trial.trial - 5) + 1.0 / trial.steps
        self.away, self.stands_still = 0, False

    def node_gpus(self) -> int:
        return self.gpus

    def _lose(self) -> None:
        self.kill_at -= 1
        if self.kill_at == 0:
            raise KilledError

    def get(self, path: str, kind: Any, after: int = 0) -> Any:
        self._lose()
        if self.away:
            self.away -= 1
            raise ClientError("no server answers")
        live = [each for each in self.jobs.values() if each.state is JobState.RUNNING]
        moves = not self.stands_still and self.draws.random() < 0.7
        for each in live[:2] if moves else ():
            value = self.value(each)
            made = structs.replace(each, state=JobState.DONE, value=value, ran_seconds=3600.0)
            self.jobs[each.job] = made
        found = [each for each in self.jobs.values() if each.job > after]
        if not self.jobs:
            raise ClientError("none", 404, "no_such_sweep")
        page, more = found[:4], len(found) > 4
        rest = page[-1].job if more else 0
        return SweepOut(sweep="", metric="loss", better="lower", trials=page, next_after=rest)

    def post(self, path: str, body: Any, kind: Any) -> Any:
        self._lose()
        if path.endswith("/cancel"):
            number = int(path.split("/")[3])
            self.jobs[number] = structs.replace(self.jobs[number], state=JobState.CANCELLED)
            return Done(accepted=True, message="", sequence=1)
        if path == "/v1/estimates":
            cost = CostEstimate(gpu_hours=9.0, dollars=18.0)
            return JobEstimate(plan=None, estimate=cost, dollars_per_gpu_hour=2.0)
        number = self._submitted(body)
        self._lose()  # it was submitted, and nobody hears of it
        return JobsSubmitted(accepted=True, message="", sequence=1, jobs=(number,))

    def _submitted(self, body: Submission) -> int:
        trial = body.spec.trial
        assert trial is not None
        for each in self.jobs.values():  # as the core does
            same = (each.trial, each.rung) == (trial.number, trial.rung)
            if same and each.state is not JobState.CANCELLED:
                return each.job
        number = len(self.jobs) + 1
        self.jobs[number] = TrialOut(
            job=number,
            trial=trial.number,
            rung=trial.rung,
            steps=trial.steps,
            settings=trial.settings,
            state=JobState.RUNNING,
            why="",
            step=0,
            value=None,
            value_unknown=False,
            ran_seconds=0.0,
            gpus=self.gpus,
            ranks=1,
            dollars_per_gpu_hour=2.0,
        )
        return number


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_run.time, "sleep", lambda seconds: None)


def planned(folder: Path, more: str = "", text: str = SWEEP) -> SweepPlan:
    (folder / "job.toml").write_text(JOB)
    (folder / "sweep.toml").write_text(text + more)
    return check_sweep(folder / "sweep.toml")


def driver(server: PlayedServer, plan: SweepPlan, **options: Any) -> SweepRun:
    return SweepRun(server, plan, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
def test_killed_at_any_request_every_trial_is_still_one_job(tmp_path: Path, seed: int) -> None:
    plan, server = planned(tmp_path), PlayedServer(seed)
    kills = 0
    while True:
        server.kill_at = server.draws.randrange(2, 12)
        try:
            end = driver(server, plan).run()
            break
        except KilledError:
            kills += 1
    seen = [(each.trial, each.rung) for each in server.jobs.values()]
    assert len(seen) == len(set(seen)) == 9 + 3 + 1 and kills > 1
    (best, *_) = ranked(end.trials, "lower")
    assert (best.trial, best.rung, best.steps) == (5, 2, 90)


def test_a_cancelled_sweep_stops_its_driver_and_goes_on_when_it_is_run_again(
    tmp_path: Path,
) -> None:
    plan, server, cancelled = planned(tmp_path), PlayedServer(1), list[int]()

    def cancels(trial: TrialOut) -> None:
        server.stands_still = True
        cancelled.extend(cancel_sweep(server, plan.key))  # type: ignore[arg-type]
        server.stands_still = False

    with pytest.raises(SweepStopped, match="was cancelled"):
        driver(server, plan, said=cancels).run()
    assert cancelled
    end = driver(server, plan).run()
    done = [each for each in end.trials if each.state is JobState.DONE]
    assert len(done) == 13 and not end.spent_up


def test_a_metric_that_no_trial_reports_ends_the_sweep_early(tmp_path: Path) -> None:
    server = PlayedServer()
    server.value = lambda trial: None  # type: ignore[assignment, return-value]
    with pytest.raises(SweepError, match="none reported loss at step 10"):
        driver(server, planned(tmp_path)).run()
    assert len(server.jobs) < 9


def test_a_server_that_is_away_for_a_while_is_waited_for(tmp_path: Path) -> None:
    server = PlayedServer()

    def leaves(trial: TrialOut) -> None:
        server.away = 2

    end = driver(server, planned(tmp_path), said=leaves).run()
    assert len(end.trials) == 13


def test_a_budget_is_refused_with_its_arithmetic_and_kept_while_it_runs(tmp_path: Path) -> None:
    server = PlayedServer()
    cost = sweep_cost(server, planned(tmp_path, "[budget]\ngpu_hours = 21\n"))  # type: ignore[arg-type]
    assert cost.gpu_hours == pytest.approx(21.0) and cost.dollars == pytest.approx(42.0)
    wanted = r"9 x 10 \+ 3 x 20 \+ 1 x 60 = 210 steps, x 0.1 GPU-hours a step = 21; try about 8"
    with pytest.raises(ConfigError, match=wanted):
        sweep_cost(server, planned(tmp_path, "[budget]\ngpu_hours = 20\n"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"dollars a step = 42"):
        sweep_cost(server, planned(tmp_path, "[budget]\ndollars = 40\n"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"use no GPUs here.*give budget.steps"):
        sweep_cost(PlayedServer(gpus=0), planned(tmp_path, "[budget]\ngpu_hours = 9\n"))  # type: ignore[arg-type]
    end = driver(server, planned(tmp_path, "[budget]\ngpu_hours = 5\n")).run()
    assert end.spent_up and 5 <= gpu_hours(end.trials) < 9


def test_a_trial_whose_settings_make_no_job_fails_alone(tmp_path: Path) -> None:
    text = SWEEP.replace('[method]\nkind = "asha"\ndraw = "grid"\nfirst_steps = 10\n', "")
    plan = planned(tmp_path, text=text)
    plan.settings[4]["model.heads"] = 7
    told: list[TrialOut] = []
    end = driver(PlayedServer(), plan, said=told.append).run()
    (refused,) = [each for each in told if not each.job]
    assert refused.trial == 4 and "heads" in refused.why and len(end.trials) == 8
