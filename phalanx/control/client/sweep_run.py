"""The driver of a sweep: submits trials as jobs to a server and reads their results there.

Nothing is kept here. A sweep's state is the list of its jobs, each of which says which trial it is:
whoever is killed is replaced by running the same file again, and of two that run at a time both
find the same jobs, since the core makes one job of a trial's rung.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct, structs

from phalanx.cluster.job_relations import SweepTrial
from phalanx.cluster.jobs.job import ENDED, JobState
from phalanx.config import ConfigError, check, default_world_size, resolve
from phalanx.control.client.client import Client, ClientError
from phalanx.control.server.http.submission import RequestedWork, submission
from phalanx.control.wire.api_types import (
    Done,
    JobsSubmitted,
    RefusalCode,
    Submission,
    SweepOut,
    TrialOut,
)
from phalanx.plan.sweeps.machine import RungStart, SweepMachine
from phalanx.plan.sweeps.planned import SweepPlan
from phalanx.plan.sweeps.space import texts_of

LOOK_SECONDS = 0.5  # between two looks at the trials
AWAY_SECONDS = 300.0  # that a server may be away meanwhile
UNREPORTED = 3  # trials that end without the metric, before any has it, end the sweep


class SweepError(Exception):
    """The sweep cannot continue; the message says why."""


class SweepStopped(Exception):  # noqa: N818  (no error: somebody wanted it)
    """A trial was cancelled by a person."""


class SweepEnd(Struct, frozen=True, kw_only=True):
    """The result of a sweep."""

    trials: list[TrialOut]
    spent_up: bool = False  # its budget ended it


Said = Callable[[TrialOut], None]


def sweep_trials(client: Client, key: str, after: int = 0) -> list[TrialOut]:
    """All jobs of a sweep on the server, in order."""
    trials: list[TrialOut] = []
    try:
        while True:
            page = client.get(f"/v1/sweeps/{key}", SweepOut, after=after)
            trials += page.trials
            if not page.next_after:
                return trials
            after = page.next_after
    except ClientError as error:
        if error.code == RefusalCode.NO_SUCH_SWEEP:
            return []
        raise


def cancel_sweep(client: Client, key: str) -> list[int]:
    """Cancel all waiting and running trials, which stops the driver; return their numbers."""
    live = [each.job for each in sweep_trials(client, key) if each.state not in ENDED]
    for number in live:
        client.post(f"/v1/jobs/{number}/cancel", None, Done)
    return live


def gpu_hours(trials: list[TrialOut]) -> float:
    """GPU-hours used by the jobs so far."""
    return sum(each.ran_seconds * each.gpus for each in trials) / 3600


class SweepRun:
    """One sweep on one server."""

    def __init__(
        self,
        client: Client,
        plan: SweepPlan,
        *,
        at_once: int = 0,
        confirmed: bool = False,
        said: Said = lambda trial: None,
    ) -> None:
        self._client, self._plan, self._confirmed, self._said = client, plan, confirmed, said
        self.machine: SweepMachine = plan.machine(at_once)
        self._node_gpus = client.node_gpus()
        self._jobs: dict[int, TrialOut] = {}  # by number, as last seen
        self._live: dict[int, RungStart] = {}  # by number: those that have not ended
        self._reported = self._unreported = 0

    def run(self) -> SweepEnd:
        """Run until every trial has ended; SweepStopped if one is cancelled."""
        for trial in sweep_trials(self._client, self._plan.key):
            self._take_in(trial, at_start=True)
        while not self.machine.done:
            spent_up = self._spent_up()
            while not spent_up and (start := self.machine.next_start()) is not None:
                self._start(start)
            if not self._live and (spent_up or self.machine.done):
                break
            time.sleep(LOOK_SECONDS)
            self._look()
        return SweepEnd(trials=list(self._jobs.values()), spent_up=not self.machine.done)

    def _spent_up(self) -> bool:
        budget, trials = self._plan.sweep.budget, list(self._jobs.values())
        if budget.gpu_hours is not None:
            return gpu_hours(trials) >= budget.gpu_hours
        if budget.dollars is not None and trials:
            return gpu_hours(trials) * trials[-1].dollars_per_gpu_hour >= budget.dollars
        return False

    def _look(self) -> None:
        """Poll live trials; wait while the server does not answer."""
        away_since = time.monotonic()
        while True:
            try:
                trials = sweep_trials(self._client, self._plan.key, min(self._live) - 1)
                break
            except ClientError as error:
                if error.status or time.monotonic() - away_since > AWAY_SECONDS:
                    raise
            time.sleep(LOOK_SECONDS)
        for trial in trials:
            if trial.job in self._live:
                self._take_in(trial)

    def _take_in(self, trial: TrialOut, *, at_start: bool = False) -> None:
        """Update the machine from one job's state."""
        start = RungStart(trial.trial, trial.rung)
        self._jobs[trial.job] = trial
        if trial.state is JobState.CANCELLED:
            self.machine.withdrawn(start.trial, start.rung)
            self._live.pop(trial.job, None)
            if not at_start:
                raise SweepStopped(f"trial {trial.trial} (job {trial.job}) was cancelled")
            return
        if trial.state not in ENDED or trial.value_unknown:
            self.machine.began(start.trial, start.rung)
            self._live[trial.job] = start
            return
        self._live.pop(trial.job, None)
        self.machine.ended(start.trial, start.rung, trial.value)
        if not at_start:
            self._said(trial)
        self._count(trial)

    def _count(self, trial: TrialOut) -> None:
        """Count a value; stop the sweep early if trials do not report the metric."""
        if trial.state is not JobState.DONE:
            return
        self._reported += trial.value is not None
        self._unreported += trial.value is None
        if not self._reported and self._unreported >= min(UNREPORTED, self._plan.trials):
            metric = self._plan.sweep.metric
            raise SweepError(
                f"{self._unreported} trials ended, and none reported {metric} at step "
                f"{trial.steps}, e.g. job {trial.job}: if a folder of runs has trials of an older "
                "server, rename the sweep; otherwise name another metric"
            )

    def _start(self, start: RungStart) -> None:
        """Submit a trial's next rung; invalid settings count as a failure."""
        try:
            made = self._submission(start)
            number = self._post(start, made)
        except ConfigError as error:
            self.machine.ended(start.trial, start.rung, None)
            self._said(_refused(self._plan, start, str(error)))
            return
        self.machine.began(start.trial, start.rung)
        self._live[number] = start

    def _post(self, start: RungStart, made: Submission) -> int:
        try:
            return self._client.post("/v1/jobs", made, JobsSubmitted).jobs[0]
        except ClientError as error:
            if error.code == RefusalCode.BAD_WORK:
                raise ConfigError(f"trial {start.trial}", "", str(error), "") from None
            raise

    def _submission(self, start: RungStart) -> Submission:
        return trial_submission(self._plan, start, self._node_gpus, confirmed=self._confirmed)


def trial_submission(
    plan: SweepPlan, start: RungStart, node_gpus: int, *, confirmed: bool
) -> Submission:
    """The submission of a trial's rung; ConfigError if its settings are invalid."""
    sweep = plan.sweep
    job = plan.job_of(start.trial, start.rung)
    ranks = sweep.ranks or default_world_size(job, node_gpus)
    check(job, ranks)
    work = RequestedWork(
        job=resolve(job, ranks),
        ranks=ranks,
        folder=str(Path.cwd()),
        name=plan.name_of(start.trial),
        team=sweep.team,
        qos=sweep.qos,
        minutes=sweep.minutes,
    )
    made = submission(work, node_gpus)
    trial = SweepTrial(
        sweep=plan.key,
        number=start.trial,
        rung=start.rung,
        steps=plan.steps_of(start.trial, start.rung),
        settings=texts_of(plan.settings[start.trial]),
        metric=sweep.metric,
        better=sweep.better,
    )
    return structs.replace(made, spec=structs.replace(made.spec, trial=trial), confirmed=confirmed)


def unfinished(plan: SweepPlan, trials: list[TrialOut]) -> bool:
    """Whether a sweep still needs its driver."""
    machine = plan.machine()
    for each in trials:
        if each.state is JobState.CANCELLED:
            continue
        if each.state not in ENDED or each.value_unknown:
            machine.began(each.trial, each.rung)
        else:
            machine.ended(each.trial, each.rung, each.value)
    return not machine.done


def settings_text(settings: dict[str, str]) -> str:
    """Settings on one line."""
    return " ".join(f"{key}={value}" for key, value in settings.items())


def trial_line(trial: TrialOut, metric: str) -> str:
    """A trial that has ended."""
    became = f"{metric} {trial.value:.6g}" if trial.value is not None else trial.state
    why = f": {trial.why}" if trial.value is None else ""
    where = f"job {trial.job}" if trial.job else "not submitted"
    settings = settings_text(trial.settings)
    return f"trial {trial.trial} at step {trial.steps} ({where}): {became}{why}  {settings}"


def _refused(plan: SweepPlan, start: RungStart, why: str) -> TrialOut:
    """The result of a trial whose settings were refused."""
    return TrialOut(
        job=0,
        trial=start.trial,
        rung=start.rung,
        steps=plan.steps_of(start.trial, start.rung),
        settings=texts_of(plan.settings[start.trial]),
        state=JobState.FAILED,
        why=why,
        step=0,
        value=None,
        value_unknown=False,
        ran_seconds=0.0,
        gpus=0,
        ranks=0,
        dollars_per_gpu_hour=0.0,
    )


def ranked(trials: list[TrialOut], better: str) -> Iterator[TrialOut]:
    """The newest job of each trial's furthest rung, the best first; without a value at the end."""
    newest: dict[int, TrialOut] = {}
    for each in trials:
        known = newest.get(each.trial)
        if known is None or (each.rung, each.job) > (known.rung, known.job):
            newest[each.trial] = each
    sign = 1.0 if better == "lower" else -1.0
    yield from sorted(
        newest.values(),
        key=lambda each: (
            each.value is None,
            -each.rung,
            sign * (each.value or 0.0),
            each.trial,
        ),
    )
