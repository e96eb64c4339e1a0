"""Saves of a run: when one is due, its hand-over, and how far the run is safe."""

from __future__ import annotations

import logging
import statistics
import time
from typing import TYPE_CHECKING

from phalanx.checkpoint import Checkpointer, CheckpointError, LostPlaceError
from phalanx.checkpoint.format.describe import world_size as current_world_size
from phalanx.checkpoint.keeper.messages import SaveOutcome
from phalanx.data import DataExhausted
from phalanx.train.callback import SAVING, Callback, TrainingRun
from phalanx.train.exits import CHECKPOINT_INTERVAL, NOT_ARCHIVED
from phalanx.train.report.records import CheckpointRecord, StepWaits
from phalanx.train.resume.interval import SaveSchedule
from phalanx.train.resume.pace import SnapshotPace
from phalanx.train.resume.saving import prepare_saves

if TYPE_CHECKING:
    from phalanx.train.trainer import StepOutcome, Trainer

log = logging.getLogger(__name__)

IS_SAVING = "a checkpoint is being written"


class Checkpoints(Callback):
    """Saves what is due, and says after each step how far the run is safe."""

    claims = frozenset({SAVING})

    def __init__(self, trainer: Trainer, checkpointer: Checkpointer) -> None:
        self.job = trainer.job
        self.trainer, self.checkpointer = trainer, checkpointer
        self.ranks = current_world_size()
        self.first_step = trainer.step + 1
        self.schedule = SaveSchedule(self.job, self.ranks, self.first_step, checkpointer.agreed)
        self.began = time.perf_counter()
        self.measured: list[float] = []  # stalls
        self.stalls: dict[int, float] = {}  # seconds that a save took from training, by step
        self.stall_seconds = 0.0  # of the last step
        self.saves = 0
        self.saved_step = -1
        self.durable = 0  # newest step whose checkpoint is complete
        self.pace: SnapshotPace | None = None  # where their number follows from their cost
        self._overdue = False
        self._usual_rate = checkpointer.bytes_per_second
        self._step_began = self.began

    def begin(self, run: TrainingRun) -> None:
        """Snapshots of every step where somebody restores from them, as long as they are cheap."""
        settings = self.job.checkpoint
        free = self.checkpointer.prompt and not settings.memory_every and settings.memory_share > 0
        if free and self.trainer.device.type == "cuda":
            self.pace = SnapshotPace(self.job, self.first_step, self.checkpointer.largest)

    def before_step(self, run: TrainingRun) -> None:
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
        if self.pace is not None and self.pace.renews(step) and (said := self.pace.renew(step)):
            log.info("snapshots %s", said)

    def before_update(self, run: TrainingRun) -> None:
        """A copy of the state that still runs comes first."""
        self.checkpointer.before_update()

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        if (rate := run.orders.failure_rate()) and outcome.failure_rate:
            self.schedule.follow(rate, self.trainer.step)
        durable, snapshot_stall = self.durable, self.stall_seconds
        self.stall_seconds = 0.0
        self._save_if_due(run, outcome)
        self._report(run, self.checkpointer.poll())
        update_waited = self.checkpointer.take_waited()
        self._count_cost(update_waited + snapshot_stall if update_waited else 0.0)
        waited = self.trainer.timer.so_far("data")
        flush = self.checkpointer.flush_seconds if self.durable > durable else 0.0
        seconds = StepWaits(self.stall_seconds + update_waited, waited, flush)
        run.snapshot_every = self.snapshot_every
        run.orders.stepped(self.trainer.step, self.durable, seconds)

    def _count_cost(self, seconds: float) -> None:
        """Of a snapshot of an earlier step, for the number of those to come."""
        began, self._step_began = self._step_began, time.perf_counter()
        if self.pace is not None:
            self.pace.stepped(self.trainer.step, self._step_began - began, seconds)

    def end(self, run: TrainingRun, error: BaseException | None) -> None:
        """Waits for what is being written, and keeps the last state where that is wanted."""
        if self.schedule.estimate is not None:
            run.details[CHECKPOINT_INTERVAL] = self.schedule.estimate.reason
        match error:
            case None:
                try:
                    self._finish(run)
                except CheckpointError:
                    self._report(run, self.checkpointer.poll())
                    raise
            case DataExhausted():
                if self._keeps_the_end():
                    self._save(run)
                self._report(run, self.checkpointer.finish())
                self._note_unarchived(run)
            case CheckpointError():
                self._report(run, self.checkpointer.poll())

    def _finish(self, run: TrainingRun) -> None:
        """The last state is saved, and the newest checkpoint told of."""
        run.orders.busy(IS_SAVING, self.trainer.step)
        if self._missing(run):
            self._save(run)
        self._report(run, self.checkpointer.finish())
        self._note_unarchived(run)
        run.orders.stepped(self.trainer.step, self.durable, StepWaits())

    def _note_unarchived(self, run: TrainingRun) -> None:
        """Say which checkpoints the archive does not have; collective."""
        if self.checkpointer.archive is None:
            return
        if missing := self.checkpointer.not_archived():
            steps = ", ".join(map(str, sorted(missing)))
            run.details[NOT_ARCHIVED] = f"steps {steps}: {missing[max(missing)]}"

    def _missing(self, run: TrainingRun) -> bool:
        """All steps were made by those before us, who could not save the last one."""
        wanted = run.saves_only or self._keeps_the_end()
        return self.trainer.unsaved and self.saved_step < 0 and wanted

    def _keeps_the_end(self, stopped: bool = False) -> bool:
        """Whether the last state is saved: always when the run is to be continued later."""
        return (stopped or self.job.checkpoint.at_end) and self.saved_step != self.trainer.step

    def _save_if_due(self, run: TrainingRun, outcome: StepOutcome) -> None:
        """After a step: the checkpoint of the last one, a periodic one, or one that stays here."""
        if run.is_last(outcome) and self._keeps_the_end(outcome.stop):
            run.orders.busy(IS_SAVING, self.trainer.step)
            self._save(run)
        elif self._is_due() and self._may_hand_over(run, outcome):
            run.orders.busy(IS_SAVING, self.trainer.step)
            self._save_or_go_on(run)
        elif not outcome.keepers_late and (self._memory_is_due() or self._local_is_due()):
            self._save(run, write=False, patient=False)

    def _is_due(self) -> bool:
        """A checkpoint is, or was and still waits for leave."""
        self._overdue = self.schedule.is_due(self.trainer.step) or self._overdue
        return self._overdue

    def _may_hand_over(self, run: TrainingRun, outcome: StepOutcome) -> bool:
        """Whether the checkpoint that is due is handed over now; all ranks say the same.

        While some keeper is late nobody hands over: what all of them hold must not be overwritten.
        """
        if outcome.keepers_late:
            return False
        if run.lease is not None:
            if not outcome.may_write:
                if run.rank == 0:
                    run.lease.ask_lease()
                return False
            rate = (run.lease.may_write() or 0) / self.ranks
            limits = [limit for limit in (self._usual_rate, rate) if limit]
            self.checkpointer.bytes_per_second = min(limits, default=0.0)
            run.lease.used_lease()
        self._overdue = False
        return True

    def _memory_is_due(self) -> bool:
        """Between two checkpoints, a snapshot that keepers hold; only where there are keepers."""
        every = self.snapshot_every
        return every > 0 and self.trainer.step % every == 0

    @property
    def snapshot_every(self) -> int:
        """Steps between snapshots in memory as they are made now; 0: none but those written."""
        if not self.checkpointer.in_background:
            return 0
        if self.pace is not None:
            return self.pace.every
        return self.job.checkpoint.memory_every or int(self.checkpointer.prompt)

    def _local_is_due(self) -> bool:
        """Between two checkpoints, one on the nodes' own disks; only where there are keepers."""
        settings = self.job.checkpoint.local
        held = self.checkpointer.in_background and bool(settings.path)
        return held and settings.every > 0 and self.trainer.step % settings.every == 0

    def _save(self, run: TrainingRun, *, write: bool = True, patient: bool = True) -> None:
        began = time.perf_counter()
        trainer = self.trainer
        copied = self.saves % self.job.checkpoint.archive.every == 0
        local = self._local_is_due() or (write and self.job.checkpoint.local.every == 0)
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
            self._report(run, [SaveOutcome(step=trainer.step, path=str(path))])

    def _save_or_go_on(self, run: TrainingRun) -> None:
        """A periodic save: where it fails that is told, and training goes on."""
        began = time.perf_counter()
        try:
            self._save(run, patient=False)
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
            self._report(run, [failed])

    def _report(self, run: TrainingRun, outcomes: list[SaveOutcome]) -> None:
        """Saves that are complete, or that failed while training went on."""
        for outcome in outcomes:
            if not outcome.problem and outcome.step >= self.durable:  # told in any order
                run.checkpoint, self.durable = outcome.path, outcome.step
            record = CheckpointRecord(
                job=self.job.name,
                generation=self.trainer.generation,
                step=outcome.step,
                path=outcome.path,
                seconds=self.stalls.pop(outcome.step, 0.0),
                problem="; ".join(each for each in (outcome.problem, outcome.fix) if each),
                interval="" if self.schedule.estimate is None else self.schedule.estimate.reason,
            )
            run.callbacks.save(run, record)
