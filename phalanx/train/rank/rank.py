"""One rank of a run, from its first formation to its exit report.

It is told what to do by ``Orders`` and decides nothing itself: which rank it has, when to restore
what, when to go. Those of an agent have it outlive its peers: it leaves a broken group and joins
the next generation. It keeps its process, its imports and its data feed; the group, the mesh and
the model are made anew around them. Local orders have one formation, and the rank ends with it.
"""

from __future__ import annotations

import gc
import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from phalanx.checkpoint import Checkpointer, CheckpointError, latest
from phalanx.config import Job, verification_interval
from phalanx.config.own_code import import_code
from phalanx.parallel.mesh import build_mesh
from phalanx.train.callback import Callback
from phalanx.train.exits import ExitCode, ExitInfo, now
from phalanx.train.measure.memory import device_memory_error
from phalanx.train.measure.profile import ProfileAsk
from phalanx.train.optim.fingerprint import Fingerprints, ReplicaDivergence
from phalanx.train.optim.verification import GradientVerification
from phalanx.train.rank import loop
from phalanx.train.rank.diagnose import classify
from phalanx.train.rank.drill import ordered_drill
from phalanx.train.rank.formation import (
    FormationTimes,
    choose_device,
    prepare,
    set_environment,
    spare_keeper,
    with_replicas,
)
from phalanx.train.rank.orders import Formation, GenerationOver, Orders
from phalanx.train.rank.own_code import own_callbacks, refuse_other_code
from phalanx.train.rank.stop import StoppedEarly
from phalanx.train.report.gaps import RecentRecords, missing_records
from phalanx.train.report.progress import Plain, WaitClock
from phalanx.train.report.provenance import Provenance, write_provenance
from phalanx.train.report.records import StartRecord
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.report.sinks import Sink, Sinks, open_sinks
from phalanx.train.resume.ordered import RestorePoint, durable_steps, enter_folder, load_snapshot
from phalanx.train.resume.parent import fallback_note, find_parents
from phalanx.train.resume.saving import open_checkpointer, prepare_saves, seal
from phalanx.train.resume.start import load_start
from phalanx.train.stages import TrainFeed
from phalanx.train.trainer import Trainer

log = logging.getLogger(__name__)


class Rank:
    """A rank's life through generations; ``run`` never raises, it reports.

    ``sinks`` take the records of every rank, beside those of the run's folder; ``watcher`` those of
    rank 0, in place of lines on stdout. ``described`` is told by rank 0 where the run comes from.
    """

    def __init__(
        self,
        job: Job,
        orders: Orders,
        folder: RunFolder | None = None,
        *,
        sinks: Sequence[Sink] = (),
        watcher: Sink | None = None,
        callbacks: Sequence[Callback] = (),
        ask: ProfileAsk | None = None,
        described: Callable[[Provenance], None] = lambda provenance: None,
    ) -> None:
        self._unresolved, self._orders = job, orders
        self._sinks, self._watcher, self._callbacks = sinks, watcher, callbacks
        self._ask, self._described = ask, described
        self.job = job
        self.folder = folder
        self.info: ExitInfo | None = None  # how it ended
        self._device = torch.device("cpu")
        self._trainer: Trainer | None = None
        self._feed: tuple[tuple[int, int], TrainFeed] | None = None  # and what it is for
        self._rank = -1
        self._clock = WaitClock()  # since the generation began
        self._start: StartRecord | None = None  # where the job had it start from
        self._notes: dict[str, str] = {}  # on that, for the exit report
        self._drill = ordered_drill()
        self._recent = RecentRecords()

    def run(self) -> int:
        """Serve generation after generation; the exit code says how it ended."""
        try:
            while (formation := self._orders.formation()) is not None:
                self.info = self._serve(formation)
                if self.info is not None:
                    return self.info.code
        except StoppedEarly:
            self.info = self._report(self._stopped_early())
        return ExitCode.DONE

    def _serve(self, formation: Formation) -> ExitInfo | None:
        """One generation; None when another one is to follow."""
        self._rank = formation.rank
        noticed = ""
        try:
            return self._report(self._train(formation))
        except GenerationOver:
            pass
        except StoppedEarly:
            raise
        except ReplicaDivergence as finding:
            log.error("%s: %s", finding, finding.copies)
            self._orders.diverged(finding)
        except BaseException as error:
            self._orders.stop.started()
            if not self._orders.over():
                info = self._failure(error, formation)
                # A CUDA context that lost a peer may be broken for good: leave it to a new process.
                if not info.is_symptom or not self._orders.keeps_process:
                    return self._report(info)
                noticed = info.message
        self._leave_group()
        self._orders.left(noticed)
        return None

    def _train(self, formation: Formation) -> ExitInfo:
        laps, self._clock = FormationTimes(), WaitClock(formation.waited_seconds)
        self._prepare(formation)
        laps.end("check")
        self.folder = self._orders.meet(formation, self.job, self._device, self.folder)
        laps.end("meet")
        self._mesh = build_mesh(self.job, self._device)
        laps.end("mesh")
        self._trainer = self._make_trainer()
        # Where an agent supervises, it fences off other writers.
        exclusive = not formation.supervised
        checkpointer = open_checkpointer(self.job, self.folder, exclusive=exclusive)
        checkpointer.leaving = self._orders.stop.overdue
        laps.end("build")
        try:
            refuse_other_code(self.job, checkpointer)
            if not formation.supervised or formation.generation == 1:
                checkpointer.try_archive()
            point = self._restore(formation, self.folder, checkpointer, laps)
            left_out = self._resume(formation, self.folder, point)
            self._keep(formation, checkpointer)
            laps.end("seal")
            words = "generation %d: rank %d of %d at step %d (%s); seconds: %s"
            log.info(words, *formation[:3], self._trainer.step, point.source, laps)
            self._orders.restored(point, skipped=left_out)
            self._orders.go()
            info = self._loop(formation, self.folder, point, checkpointer)
        except BaseException:
            self._drop(formation, checkpointer)
            raise
        self._trainer.close()
        checkpointer.close()
        dist.destroy_process_group()
        return info

    def _prepare(self, formation: Formation) -> None:
        """The job as this generation runs it, and the device."""
        if formation.supervised:
            set_environment(formation)
            job, begins = with_replicas(self._unresolved, formation), formation.generation == 1
            self.job = prepare(job, formation.world_size, begins=begins)
        import_code(self.job.code)
        self._device = choose_device(self.job, formation.local_rank)
        if formation.supervised:
            cuda = self._device.type == "cuda"
            self._orders.keeps_process = not cuda or self.job.train.in_process_restart

    def _make_trainer(self) -> Trainer:
        """The feed outlives the trainer: its place in the data is an argument, not a state."""
        wanted = (self._mesh.data_index, self.job.parallel.data)
        kept = self._feed[1] if self._feed is not None and self._feed[0] == wanted else None
        trainer = Trainer(self.job, self._mesh, self._device, kept)
        self._feed = (wanted, trainer.feed)
        return trainer

    def _restore(
        self,
        formation: Formation,
        folder: RunFolder,
        checkpointer: Checkpointer,
        laps: FormationTimes,
    ) -> RestorePoint:
        """Load what is ordered; a source that is no good is refused, and another one ordered."""
        clean = True
        while True:
            point = self._orders.restore_point()
            laps.end("order")
            assert self._trainer is not None
            if formation.supervised:
                enter_folder(folder, point, self._trainer)
            if not clean:
                self._trainer = self._make_trainer()
            clean = False
            try:
                problem = self._load(point, folder, self._trainer, checkpointer)
            except CheckpointError as error:
                if not formation.supervised:
                    raise  # nobody could order another one
                problem = "; ".join(error.problems)
            laps.end("load")
            if not problem:
                return point
            there = None if point.source == "peer" else durable_steps(folder, point.step)
            self._orders.restored(point, problem, there=there)

    def _load(
        self, point: RestorePoint, folder: RunFolder, trainer: Trainer, checkpointer: Checkpointer
    ) -> str:
        self._start, self._notes = None, {}
        if point.source != "none":
            return load_snapshot(folder, point, trainer, checkpointer)
        if point.parents is None:
            parents = checkpointer.agreed(find_parents(self.job) if self._rank == 0 else [])
        else:
            parents = list(point.parents)
        self._start = load_start(self.job, trainer, checkpointer, parents)
        self._notes = fallback_note(trainer.step, parents)
        return ""

    def _resume(
        self, formation: Formation, folder: RunFolder, point: RestorePoint
    ) -> tuple[int, int]:
        """What holds from here on, beside the state that was restored.

        Returns the samples of the batch that is left out, if one is to be.
        """
        trainer = self._trainer
        assert trainer is not None
        if formation.supervised:
            trainer.generation = formation.generation
            if self._rank == 0:
                self._describe(formation, folder)
        left_out = trainer.leave_out(point.skipped, point.skip_step)
        if left_out[1]:
            words = "samples %d to %d are left out: the batch of step %d"
            log.warning(words, left_out[0], left_out[1] - 1, point.skip_step)
        trainer.rebalance(formation.micro_batches)
        return left_out

    def _describe(self, formation: Formation, folder: RunFolder) -> None:
        """Where the run comes from, written asynchronously: git takes its time."""
        devices = [str(self._device)] * formation.world_size
        args = (self.job, folder, devices, "", formation.generation)
        threading.Thread(target=self._write_provenance, args=args, daemon=True).start()

    def _write_provenance(self, *args: Any) -> None:
        try:
            provenance = write_provenance(*args)
        except OSError as error:
            log.warning("cannot write where the run comes from: %s", error)
            return
        self._described(provenance)

    def _keep(self, formation: Formation, checkpointer: Checkpointer) -> None:
        """Keepers hold every step where somebody restores from them; else what the job says."""
        assert self._trainer is not None
        if formation.supervised:
            spare = checkpointer.agreed(spare_keeper(formation))
            seal(self.job, self._trainer, checkpointer, formation.buddy_shift, spare)
        elif self.job.checkpoint.every or self.job.checkpoint.memory_every:
            prepare_saves(self.job, self._trainer, checkpointer)

    def _loop(
        self,
        formation: Formation,
        folder: RunFolder,
        point: RestorePoint,
        checkpointer: Checkpointer,
    ) -> ExitInfo:
        trainer = self._trainer
        assert trainer is not None
        sinks = Sinks(self._open_sinks(formation, folder))
        try:
            run = loop.attach(
                trainer,
                folder,
                sinks,
                checkpointer,
                self._orders,
                callbacks=[
                    *self._comparisons(formation, trainer, point),
                    *own_callbacks(self.job),
                    *self._callbacks,
                ],
                innermost=[] if self._drill is None else [self._drill],
                ask=self._ask,
                lease=self._orders.write_lease(),
                saves_only=point.saves,
            )
            info = loop.train(run)
        except BaseException as error:
            sinks.fail(error)
            raise
        finally:
            sinks.close()
        lost = {f"{sink} failed": error for sink, error in sinks.failures.items()}
        info = msgspec.structs.replace(info, details={**info.details, **self._notes, **lost})
        # A gang is not started again for a copy: its keepers may still make it.
        return info if formation.supervised else loop.judged_by_archive(info)

    def _comparisons(
        self, formation: Formation, trainer: Trainer, point: RestorePoint
    ) -> list[Callback]:
        """Ranks that come to different numbers are for somebody else to judge."""
        if not formation.supervised:
            return []
        prints = Fingerprints(trainer, self.job.train.compare_every, point.told)
        told = (0, 0) if prints.active else point.told  # else it is weights that they disagreed on
        every = verification_interval(self.job, self._device.type)
        return [prints, GradientVerification(trainer, every, told)]

    def _open_sinks(self, formation: Formation, folder: RunFolder) -> list[Sink]:
        own = open_sinks(self.job, folder) if self._rank == 0 else []
        if formation.generation > 1:
            assert self._trainer is not None
            Sinks(own).write(missing_records(folder.steps, self._recent, self._trainer.step))
        if self._rank == 0:  # under an agent its log is what `phalanx logs -f` shows
            watcher = self._watcher or Plain(self.job, folder, self._clock)
            start = self._start
            if not formation.supervised and start and (self.job.checkpoint.resume or start.tier):
                watcher.write(start)
            own.append(watcher)
        return [*own, *self._sinks, self._recent]

    def _drop(self, formation: Formation, checkpointer: Checkpointer) -> None:
        """It failed: keepers hold on to what they have for whoever is ordered to restore it."""
        if formation.supervised:
            checkpointer.abandon()
            return
        assert self._trainer is not None
        self._trainer.close()
        checkpointer.close()

    def _failure(self, error: BaseException, formation: Formation) -> ExitInfo:
        traceback.print_exception(error)
        if isinstance(error, torch.OutOfMemoryError) and self._device.type == "cuda":
            error = device_memory_error(error, self.job, self._trainer, self._device)
        step = self._trainer.step if self._trainer is not None else None
        if formation.supervised:
            return classify(error, self._rank, step, self._own_folders())
        standing = self.folder.read_exit() if self.folder is not None else None
        if standing is not None and standing.early:
            return standing  # this rank noticed that another one left on request
        newest = latest(self.folder.checkpoints) if self.folder is not None else None
        info = classify(error, self._rank, step)
        return msgspec.structs.replace(info, checkpoint=str(newest or ""))

    def _own_folders(self) -> list[Path]:
        """They were there when the run began: what is missing in them is away."""
        own = [self.folder.path] if self.folder is not None else []
        if (data := self.job.data.path) and "://" not in data:
            own.append(Path(data).absolute())
        return own

    def _stopped_early(self) -> ExitInfo:
        """Nothing was made, so nothing is saved; what the run started from is untouched."""
        return ExitInfo(
            code=ExitCode.DONE,
            reason=self._orders.stop.reason,
            message="stopped on request before the first step",
            step=self._trainer.step if self._trainer is not None else None,
            finished=now(),
            early=True,
        )

    def _leave_group(self) -> None:
        """Drop the group and what was built on it; whoever waits in it has been woken."""
        self._trainer = None
        gc.collect()  # modules and hooks refer to each other, and hold the group's sockets
        if dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception as error:  # it was broken: there is nothing to save of it
                log.debug("the broken group: %s", error)

    def _report(self, info: ExitInfo) -> ExitInfo:
        if info.code != ExitCode.DONE:
            log.error("%s\n%s", info.message, info.advice)
        if self.folder is not None and (
            self._rank == 0 or info.early or info.code != ExitCode.DONE
        ):
            try:
                self.folder.write_exit(info)
            except OSError as error:  # a full disk must not hide why the run ended
                log.error("cannot write exit_info.json: %s", error)
        return info
