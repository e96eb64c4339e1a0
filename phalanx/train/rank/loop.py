"""The training loop."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from phalanx.checkpoint import Checkpointer, CheckpointError, LostPlaceError
from phalanx.checkpoint.format.describe import world_size as current_world_size
from phalanx.checkpoint.keeper.client import SaveOutcome
from phalanx.data import DataExhausted
from phalanx.train.measure.meter import Meter
from phalanx.train.measure.profile import ProfileAsk, StepProfiler
from phalanx.train.rank.exits import CHECKPOINT_INTERVAL, ExitCode, ExitInfo, now
from phalanx.train.rank.stop import StopFlag
from phalanx.train.report.records import CheckpointRecord, ValidationRecord
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.report.sinks import Sinks
from phalanx.train.resume.interval import SaveSchedule
from phalanx.train.resume.saving import prepare_saves

if TYPE_CHECKING:
    from phalanx.train.trainer import StepOutcome, Trainer

log = logging.getLogger(__name__)

Stepped = Callable[[int, int, float, float], None]
Compare = Callable[[int], None]
Busy = Callable[[str, int], None]


class WriteLease(Protocol):
    """Whoever shares out the storage's time: see ``Orders``."""

    def ask_lease(self) -> None: ...

    def may_write(self) -> int | None: ...

    def used_lease(self) -> None: ...


SAVING, VALIDATING = "a checkpoint is being written", "a validation is under way"


def train(
    trainer: Trainer,
    run_folder: RunFolder,
    sinks: Sinks,
    stop: StopFlag,
    checkpointer: Checkpointer,
    stepped: Stepped = lambda step, durable, stall_seconds, data_seconds: None,
    compare: Compare = lambda step: None,
    ask: ProfileAsk | None = None,
    lease: WriteLease | None = None,
    busy: Busy = lambda what, step: None,
) -> ExitInfo:
    """Make steps until the job's last one, or until somebody asks the run to stop.

    ``stepped`` is told of every step: its number, the newest checkpoint that is complete, and
    how long saving held it up and data let it wait. ``compare`` looks at a step before it is
    handed over, and raises where it must not be. ``lease``: whom to ask before a checkpoint is
    written, where several jobs share the storage. ``busy`` is told of what is no step and may take
    long, before it begins.
    """
    run = _Run(trainer, sinks, checkpointer, stepped, busy, lease)
    trainer.timer.restart()  # building and loading are not part of the first step
    try:
        log_settings, first = trainer.job.log, run.first_step
        with StepProfiler(log_settings, run_folder, trainer.timer, first, ask) as profiler:
            while trainer.step < trainer.job.train.steps:
                with profiler.step(trainer.step + 1):
                    outcome = trainer.train_step(stop.requested)
                stop.started()  # from here on there is something to save
                compare(trainer.step)
                last = outcome.stop or trainer.step == trainer.job.train.steps
                run.save_if_due(outcome, last)
                run.report_checkpoints(checkpointer.poll())
                waited = trainer.timer.so_far("data")
                stepped(trainer.step, run.durable, run.stall_seconds, waited)
                run.meter.add(trainer.step, trainer.tokens, outcome, profiler.exposed_seconds)
                if last or run.log_is_due():
                    run.report_steps()
                if run.validation_is_due():
                    run.validate()
                run.plan_checkpoints()
                if outcome.stop:
                    run.finish_saves()
                    return run.ended(stop.reason or "stopped", "stopped on request")
            run.finish_saves(missing=run.ended_before())
    except CheckpointError:
        run.report_steps()
        run.report_checkpoints(checkpointer.poll())
        raise
    except DataExhausted:
        run.report_steps()
        if run.keeps_the_end():
            run.save()
        run.report_checkpoints(checkpointer.finish())
        raise
    except Exception:
        run.tell_what_was_made()
        raise
    return run.ended("done", "all steps are done")


def save_only(
    trainer: Trainer, sinks: Sinks, checkpointer: Checkpointer, stepped: Stepped, busy: Busy
) -> ExitInfo:
    """Write what was restored from memory, and make no step: the run is about to be ended."""
    run = _Run(trainer, sinks, checkpointer, stepped, busy)
    run.finish_saves(missing=trainer.unsaved)
    return run.ended("drain", "saved before the end")


class _Run:
    """What the loop does beside making steps."""

    def __init__(
        self,
        trainer: Trainer,
        sinks: Sinks,
        checkpointer: Checkpointer,
        stepped: Stepped,
        busy: Busy,
        lease: WriteLease | None = None,
    ) -> None:
        self.trainer = trainer
        self._stepped, self._busy = stepped, busy
        self._lease, self._overdue = lease, False
        self._usual_rate = checkpointer.bytes_per_second
        self.job = trainer.job
        self.sinks = sinks
        self.checkpointer = checkpointer
        self.meter = Meter(trainer.job, trainer.device, trainer.timer, trainer.generation)
        self.first_step = trainer.step + 1
        self.ranks = current_world_size()
        self.schedule = SaveSchedule(trainer.job, self.ranks, self.first_step, checkpointer.agreed)
        self.began = time.perf_counter()
        self.measured: list[float] = []  # stalls
        self.saves = 0
        self.stall_seconds = 0.0  # of the last step
        self.durable = 0  # newest step whose checkpoint is complete
        self.saved_step = -1
        self.saved_path = ""
        self.stalls: dict[int, float] = {}  # seconds that a save took from training, by step

    def is_due(self) -> bool:
        """A checkpoint is, or was and still waits for leave."""
        self._overdue = self.schedule.is_due(self.trainer.step) or self._overdue
        return self._overdue

    def may_hand_over(self, outcome: StepOutcome) -> bool:
        """Whether the checkpoint that is due is handed over now; all ranks say the same.

        While some keeper is late nobody hands over: what all of them hold must not be overwritten.
        """
        if outcome.keepers_late:
            return False
        if self._lease is not None:
            if not outcome.may_write:
                if self.trainer.mesh.rank == 0:
                    self._lease.ask_lease()
                return False
            rate = (self._lease.may_write() or 0) / self.ranks
            limits = [limit for limit in (self._usual_rate, rate) if limit]
            self.checkpointer.bytes_per_second = min(limits, default=0.0)
            self._lease.used_lease()
        self._overdue = False
        return True

    def log_is_due(self) -> bool:
        """At the interval, and at the first step, which a person is waiting for."""
        step = self.trainer.step
        return step == self.first_step or step % self.job.log.every == 0

    def validation_is_due(self) -> bool:
        every = self.job.train.validate_every
        return every > 0 and self.trainer.step % every == 0

    def memory_is_due(self) -> bool:
        """Between two checkpoints, a snapshot that keepers hold; only where there are keepers."""
        every = self.job.checkpoint.memory_every or int(self.checkpointer.prompt)
        held = self.checkpointer.in_background
        return held and every > 0 and self.trainer.step % every == 0

    def local_is_due(self) -> bool:
        """Between two checkpoints, one on the nodes' own disks; only where there are keepers."""
        settings = self.job.checkpoint.local
        held = self.checkpointer.in_background and bool(settings.path)
        return held and settings.every > 0 and self.trainer.step % settings.every == 0

    def plan_checkpoints(self) -> None:
        """Renew the interval now and then, and make ready for the first save."""
        step, schedule = self.trainer.step, self.schedule
        if schedule.renews(step):
            seconds = (time.perf_counter() - self.began) / max(1, step - self.first_step + 1)
            stall = statistics.median(self.measured) if self.measured else 0.0
            stall += self.checkpointer.waited_seconds
            found = schedule.renew(step, seconds, stall, self.checkpointer.flush_seconds)
            log.info("checkpoints %s", found.reason)
        if schedule.prepares(step):
            prepare_saves(self.job, self.trainer, self.checkpointer)
            self.trainer.timer.restart()

    def keeps_the_end(self, stopped: bool = False) -> bool:
        """Whether the last state is saved: always when the run is to be continued later."""
        return (stopped or self.job.checkpoint.at_end) and self.saved_step != self.trainer.step

    def ended_before(self) -> bool:
        """All steps were made by those before us, who could not save the last one."""
        return self.trainer.unsaved and self.saved_step < 0 and self.keeps_the_end()

    def report_steps(self) -> None:
        records = self.meter.records()
        with self.trainer.timer.phase("report"):
            self.sinks.write(records)
        self.meter.check_finite(records)

    def tell_what_was_made(self) -> None:
        """A peer was lost: the steps before that count. A broken device cannot be asked."""
        if self.trainer.device.type == "cpu":
            self.sinks.write(self.meter.records())

    def validate(self) -> None:
        self._busy(VALIDATING, self.trainer.step)
        began = time.perf_counter()
        loss = self.trainer.validate()
        record = ValidationRecord(
            job=self.job.name,
            generation=self.trainer.generation,
            step=self.trainer.step,
            loss=loss if math.isfinite(loss) else None,
            seconds=time.perf_counter() - began,
        )
        self.sinks.write([record])
        if self.job.checkpoint.keep_best or self.job.checkpoint.archive.keep_best:
            self.checkpointer.add_score(self.trainer.step, loss)
        self.trainer.timer.restart()

    def save_if_due(self, outcome: StepOutcome, last: bool) -> None:
        """After a step: the checkpoint of the last one, a periodic one, or one that stays here."""
        if last and self.keeps_the_end(outcome.stop):
            self._busy(SAVING, self.trainer.step)
            self.save()
        elif self.is_due() and self.may_hand_over(outcome):
            self._busy(SAVING, self.trainer.step)
            self.save_or_go_on()
        elif not outcome.keepers_late and (self.memory_is_due() or self.local_is_due()):
            self.save(write=False, patient=False)

    def finish_saves(self, *, missing: bool = False) -> None:
        """Waits for checkpoints that are being written, and tells of the newest.

        ``missing``: the last state is not among them, and is saved first.
        """
        self._busy(SAVING, self.trainer.step)
        if missing:
            self.save()
        self.report_checkpoints(self.checkpointer.finish())
        self._stepped(self.trainer.step, self.durable, 0.0, 0.0)

    def save(self, *, write: bool = True, patient: bool = True) -> None:
        began = time.perf_counter()
        trainer = self.trainer
        copied = self.saves % self.job.checkpoint.archive.every == 0
        local = self.local_is_due() or (write and self.job.checkpoint.local.every == 0)
        with trainer.timer.phase("snapshot"):
            path = self.checkpointer.save(
                trainer.step,
                trainer.tensors(),
                trainer.extra(),
                write=write,
                archive=copied,
                local=local,
                patient=patient,
            )
        self.stall_seconds = time.perf_counter() - began
        if not write:
            return
        self.saves += 1
        self.saved_step = trainer.step
        self.schedule.saved(trainer.step)
        self.stalls[trainer.step] = self.stall_seconds
        self.measured.append(self.stall_seconds)
        if not self.checkpointer.in_background:
            self.report_checkpoints([SaveOutcome(step=trainer.step, path=str(path))])

    def save_or_go_on(self) -> None:
        """A periodic save: where it fails that is told, and training goes on."""
        began = time.perf_counter()
        try:
            self.save(patient=False)
        except LostPlaceError:
            raise
        except CheckpointError as error:
            if self.checkpointer.in_background:  # its keeper is gone: no later save would do better
                raise
            log.error("%s", error)
            self.stall_seconds = time.perf_counter() - began
            self.schedule.saved(self.trainer.step)
            failed = SaveOutcome(
                step=self.trainer.step,
                path=str(error.path),
                problem="; ".join(error.problems),
                fix=error.fix,
                errno=error.errno,
            )
            self.report_checkpoints([failed])

    def report_checkpoints(self, outcomes: list[SaveOutcome]) -> None:
        """Records of saves that are complete, or that failed while training went on."""
        for outcome in outcomes:
            if not outcome.problem and outcome.step >= self.durable:  # told in any order
                self.saved_path, self.durable = outcome.path, outcome.step
            record = CheckpointRecord(
                job=self.job.name,
                generation=self.trainer.generation,
                step=outcome.step,
                path=outcome.path,
                seconds=self.stalls.pop(outcome.step, 0.0),
                problem="; ".join(each for each in (outcome.problem, outcome.fix) if each),
                interval="" if self.schedule.estimate is None else self.schedule.estimate.reason,
            )
            self.sinks.write([record])

    def ended(self, reason: str, message: str) -> ExitInfo:
        how = self.meter.waiting_text()
        if self.trainer.step < self.first_step:
            how = "where it started: raise train.steps to go on"
        return ExitInfo(
            code=ExitCode.DONE,
            reason=reason,
            message=f"{message} at step {self.trainer.step}, {how}",
            step=self.trainer.step,
            checkpoint=self.saved_path,
            details=self.details(),
            finished=now(),
        )

    def details(self) -> dict[str, Any]:
        """What else the exit report says."""
        found: dict[str, Any] = {n: count for n, count in self.meter.oddities.items() if count}
        if self.schedule.estimate is not None:
            found[CHECKPOINT_INTERVAL] = self.schedule.estimate.reason
        return found
