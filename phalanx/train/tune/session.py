"""A search for a job's fastest settings on this machine: trials, their journal, what they come to.

The folder has the question (``tune.json``) and a line for each trial (``trials.jsonl``); the same
command goes on where it was killed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from phalanx.config import ConfigError, Job, check, resolve, to_toml
from phalanx.data.durable_files import write_atomically, write_synced
from phalanx.data.errors import DataError
from phalanx.data.folder_lock import alone_in
from phalanx.hardware import Cluster, ClusterFile, count_cuda, lookup, make_cluster
from phalanx.hardware.probe.nvidia_smi import QUERY, parse_query
from phalanx.hardware.probe.reader import ReadError
from phalanx.plan.cost.constants import constants_toml, shipped
from phalanx.plan.tune.predictions import MeasuredJob, Refit, predictor, refit
from phalanx.plan.tune.search import SettingSearch
from phalanx.plan.tune.settings import (
    Setting,
    TunedMachine,
    Value,
    changed,
    settings_of,
    value_of,
)
from phalanx.plan.tune.trials import NextTrial, Phase, Trial, TuningBudget, TuningOutcome
from phalanx.train.resume.refusal import refuse
from phalanx.train.tune.trial import TrialLimits, TrialResult, run_trial, trial_job

HOPELESS = 2.0  # times the best step known: who is slower need not be measured well
MEASURED_SHARE = 0.01  # of the budget, that the steps of a trial are measured for
LEAST_MEASURED, MOST_MEASURED = 1.0, 8.0  # seconds
LONGEST_SHARE = 0.3  # of the budget, that one trial may take


class TuneRequest(Struct, frozen=True, kw_only=True):
    """What is to be tuned, and what that may take."""

    job: Job
    ranks: int
    folder: Path
    budget: TuningBudget = TuningBudget()
    fresh: bool = False  # trials that are in the folder are discarded


class TuneReport(Struct, frozen=True, kw_only=True):
    """What a search came to, with its evidence."""

    job: str
    folder: str
    outcome: TuningOutcome
    before: dict[str, Value]
    changes: dict[str, Value]  # settings that are to change
    step_seconds_before: float | None
    step_seconds_after: float | None
    trials: tuple[Trial, ...]
    spent_seconds: float
    error_before: float | None = None  # of the planner's predictions of these trials
    error_after: float | None = None  # and with its constants fitted to them
    constants: str = ""  # where those are


Runner = Callable[[Job, TrialLimits], TrialResult]


def tune(
    request: TuneRequest,
    shown: Callable[[Trial], None] = lambda trial: None,
    runner: Runner | None = None,
) -> TuneReport:
    """Search until the budget is spent or nothing better is to be expected."""
    check(request.job, request.ranks)
    refuse(resolve(trial_job(request.job, request.folder), request.ranks))
    with _alone(request.folder):
        if request.fresh:
            forget(request.folder)
        return _searched(request, shown, runner)


def _searched(
    request: TuneRequest, shown: Callable[[Trial], None], runner: Runner | None
) -> TuneReport:
    machine = _machine(request)
    on = _devices(machine)
    constants = shipped(on.gpu.family if on is not None else "")
    settings = settings_of(request.job, machine)
    original = tuple(value_of(request.job, setting.key) for setting in settings)
    predicts = predictor(request.job, settings, request.ranks, on, constants)
    search = SettingSearch(settings, original, predicts, request.budget)
    journal = TrialJournal(request.folder, _question(request, machine, settings, on))
    for trial in journal.trials():
        search.add(trial)
    run = runner or partial(_run, request)
    while (asked := search.next()) is not None:
        trial = _trial(request, search, asked, run)
        journal.append(trial)
        search.add(trial)
        shown(trial)
    report = _report(request, search)
    if on is None or (fitted := _refitted(request, search, on)) is None:
        return report
    # Under the name that a server's state folder has it.
    cpu = on.gpu.family == "cpu"
    path = request.folder / ("constants-cpu.toml" if cpu else "constants.toml")
    write_synced(path, constants_toml(fitted.constants).encode())
    return structs.replace(
        report,
        error_before=fitted.error_before,
        error_after=fitted.error_after,
        constants=str(path),
    )


class TrialJournal:
    """The trials of a search, as lines of a file."""

    def __init__(self, folder: Path, question: bytes) -> None:
        self._path = folder / "trials.jsonl"
        asked = folder / "tune.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not asked.exists():
                write_atomically(asked, question)
            elif asked.read_bytes() != question:
                rule = "holds a search of another job, machine or budget"
                raise ConfigError("--folder", str(folder), rule, "give another, or --fresh")
        except OSError as error:
            raise _unusable(folder, error) from None

    def trials(self) -> list[Trial]:
        """Those that are complete; a last line that was being written is none."""
        if not self._path.exists():
            return []
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            os.truncate(self._path, len(whole))  # never a moment without the others
        return [self._trial(number, line) for number, line in enumerate(whole.splitlines(), 1)]

    def _trial(self, number: int, line: bytes) -> Trial:
        try:
            return msgspec.json.decode(line, type=Trial)
        except msgspec.MsgspecError as error:
            rule = f"line {number} is no trial ({error})"
            fix = "take it out, or begin anew with --fresh"
            raise ConfigError("--folder", str(self._path), rule, fix) from None

    def append(self, trial: Trial) -> None:
        """One more."""
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(trial) + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _alone(folder: Path) -> ExitStack:
    """Two searches at once would slow each other's steps, and mix their trials."""
    held_folder = ExitStack()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held_folder.enter_context(alone_in(folder))
    except DataError:
        rule = "holds another search, which runs just now"
        raise ConfigError("--folder", str(folder), rule, "wait for it, or give another") from None
    except OSError as error:
        raise _unusable(folder, error) from None
    return held_folder


def _unusable(folder: Path, error: OSError) -> ConfigError:
    rule = f"cannot hold the search: {error.strerror}"
    return ConfigError("--folder", str(folder), rule, "give a folder you may write")


def forget(folder: Path) -> None:
    """Have a search in this folder begin anew."""
    for name in ("tune.json", "trials.jsonl"):
        (folder / name).unlink(missing_ok=True)


def _question(
    request: TuneRequest,
    machine: TunedMachine,
    settings: Sequence[Setting],
    on: Cluster | None = None,
) -> bytes:
    """What trials answer: those of another machine, or of other values, say nothing of this one."""
    asked = {
        "job": to_toml(request.job),
        "ranks": request.ranks,
        "budget": request.budget,
        "machine": machine,
        "device": on.name if on is not None else "",
        "settings": {setting.key: setting.values for setting in settings},
    }
    return msgspec.json.encode(asked) + b"\n"


def _run(request: TuneRequest, job: Job, limits: TrialLimits) -> TrialResult:
    return run_trial(job, request.ranks, request.folder, limits)


def _trial(request: TuneRequest, search: SettingSearch, asked: NextTrial, run: Runner) -> Trial:
    values, budget = search.values_of(asked.choice), request.budget
    known = [trial.seconds for trial in search.trials if not trial.failure]
    hopeless = HOPELESS * min(known) if known and asked.phase is Phase.EXPLORE else float("inf")
    measured = min(max(MEASURED_SHARE * budget.seconds, LEAST_MEASURED), MOST_MEASURED)
    left = max(1.0, budget.seconds - search.spent_seconds)
    limits = TrialLimits(
        measure_seconds=measured,
        most_seconds=left if not known else min(left, LONGEST_SHARE * budget.seconds),
        hopeless_seconds=hopeless,
    )
    result = run(changed(request.job, values), limits)
    predicted = search.predicted(asked.choice)
    return Trial(
        number=len(search.trials),
        phase=asked.phase,
        values=values,
        step_seconds=result.step_seconds,
        failure=result.failure,
        reason=result.reason,
        predicted_seconds=predicted.seconds or None if predicted else None,
        took_seconds=result.took_seconds,
    )


def _machine(request: TuneRequest) -> TunedMachine:
    wanted = request.job.train.device
    cuda = wanted == "cuda" or (wanted == "auto" and count_cuda() > 0)
    return TunedMachine(cuda=cuda, cores=len(os.sched_getaffinity(0)), ranks=request.ranks)


def _devices(machine: TunedMachine) -> Cluster | None:
    """This machine as the planner knows it; None: its device is not in the catalogue.

    Asked of the driver's tool, since a process that has used CUDA cannot fork ranks.
    """
    key = "cpu"
    if machine.cuda:
        try:
            done = subprocess.run(QUERY, capture_output=True, text=True, timeout=60, check=True)
            found = lookup(parse_query(done.stdout).gpus[0].product)
        except (OSError, subprocess.SubprocessError, ReadError, IndexError):
            return None
        if found is None:
            return None
        key = found.key
    count = machine.ranks
    nodes = count if machine.cuda else 1
    described = ClusterFile(gpu=key, gpus=count, gpus_per_node=nodes, domain_gpus=count)
    return make_cluster(f"{key}-{count}", described)


def _refitted(request: TuneRequest, search: SettingSearch, on: Cluster) -> Refit | None:
    measured = [
        MeasuredJob(resolve(changed(request.job, trial.values), request.ranks), trial.seconds)
        for trial in search.trials
        if not trial.failure
    ]
    return refit(measured, on, shipped(on.gpu.family))


def _report(request: TuneRequest, search: SettingSearch) -> TuneReport:
    outcome = search.outcome()
    before = search.values_of(search.original)
    changes = {key: value for key, value in outcome.values.items() if value != before[key]}
    return TuneReport(
        job=request.job.name,
        folder=str(request.folder),
        outcome=outcome,
        before=before,
        changes=changes,
        step_seconds_before=search.usual_seconds(before),
        step_seconds_after=search.usual_seconds(outcome.values),
        trials=tuple(search.trials),
        spent_seconds=search.spent_seconds,
    )
