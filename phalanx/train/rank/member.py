"""A rank that outlives its peers: it leaves a broken group and joins the next generation.

It is told what to do by ``Orders`` (an agent's, in practice) and decides nothing itself: which
rank it has, when to restore what, when to go. Between two generations it keeps its process, its
imports and its data feed; the group, the mesh and the model are made anew around them.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from phalanx.checkpoint import Checkpointer, CheckpointError, Manifest, list_checkpoints
from phalanx.config import Job
from phalanx.data import Feed
from phalanx.parallel.mesh import build_mesh
from phalanx.train.measure.memory import device_memory_error
from phalanx.train.measure.profile import ProfileAsk
from phalanx.train.optim.fingerprint import Fingerprints, ReplicaDivergence
from phalanx.train.rank import loop
from phalanx.train.rank.diagnose import classify
from phalanx.train.rank.drill import ordered_drill
from phalanx.train.rank.exits import ExitCode, ExitInfo
from phalanx.train.rank.orders import Formation, GenerationOver, Orders, RestorePoint
from phalanx.train.rank.worker import choose_device, prepare
from phalanx.train.report import run_folder
from phalanx.train.report.gaps import RecentRecords, missing_records
from phalanx.train.report.progress import Plain, WaitClock
from phalanx.train.report.provenance import Provenance, write_provenance
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.report.sinks import Sink, Sinks, open_sinks
from phalanx.train.resume.parent import find_parents
from phalanx.train.resume.saving import keepers_home, local_root, open_checkpointer, seal
from phalanx.train.resume.start import load_start
from phalanx.train.trainer import Trainer

log = logging.getLogger(__name__)
STEPS_TOLD = 256  # checkpoints that are named when one could not be restored


class Member:
    """A rank's life through generations; ``run`` never raises, it reports."""

    def __init__(self, job: Job, folder: Path, orders: Orders, sinks: Sequence[Sink] = ()) -> None:
        self._unresolved, self._orders = job, orders
        self.ask = ProfileAsk()
        self._sinks = sinks  # of every rank, beside those of the run's folder
        self.described: Callable[[Provenance], None] = lambda found: None  # told by rank 0
        self.job = job
        self.folder = RunFolder(folder)
        self.info: ExitInfo | None = None  # how it ended
        self._device = torch.device("cpu")
        self._trainer: Trainer | None = None
        self._feed: tuple[tuple[int, int], Feed] | None = None  # and what it is for
        self._rank = -1
        self._clock = WaitClock()  # since the generation began
        self._asks_leave = False
        self._told, self._saves = (0, 0), False  # see RestorePoint
        self._drill = ordered_drill()
        self._recent = RecentRecords()

    @property
    def step(self) -> int:
        """The last complete one."""
        return self._trainer.step if self._trainer is not None else 0

    def run(self) -> int:
        """Serve generation after generation; the exit code says how it ended."""
        while (formation := self._orders.formation()) is not None:
            self.info = self._serve(formation)
            if self.info is not None:
                return self.info.code
        return ExitCode.DONE

    def _serve(self, formation: Formation) -> ExitInfo | None:
        """One generation; None when another one is to follow."""
        self._rank = formation.rank
        noticed = ""
        try:
            return self._report(self._train(formation))
        except GenerationOver:
            pass
        except ReplicaDivergence as finding:
            log.error("%s: %s", finding, finding.copies)
            self._orders.diverged(finding)
        except BaseException as error:
            if not self._orders.over():
                info = self._failure(error)
                # A CUDA context that lost a peer may be broken for good: leave it to a new process.
                if not info.is_symptom or not self._orders.keeps_process:
                    return self._report(info)
                noticed = info.message
        self._leave_group()
        self._orders.left(noticed)
        return None

    def _train(self, formation: Formation) -> ExitInfo:
        laps, self._clock = FormationTimes(), WaitClock()
        set_environment(formation)
        job, begins = _with_replicas(self._unresolved, formation), formation.generation == 1
        self.job = prepare(job, formation.world_size, begins=begins)
        self._device = choose_device(self.job, formation.local_rank)
        cuda = self._device.type == "cuda"
        self._orders.keeps_process = not cuda or self.job.train.in_process_restart
        laps.end("check")
        join_group(formation, self.job, self._device)
        laps.end("meet")
        self._mesh = build_mesh(self.job, self._device)
        laps.end("mesh")
        self._trainer = self._make_trainer()
        checkpointer = open_checkpointer(self.job, self.folder, exclusive=False)
        laps.end("build")
        try:
            point = self._restore(checkpointer, laps)
            if self._rank == 0:
                self._describe(formation)
            trainer = self._trainer
            trainer.generation = formation.generation
            left_out = self._resume(trainer, formation, point)
            seal(self.job, trainer, checkpointer, formation.buddy_shift)
            laps.end("seal")
            words = "generation %d: rank %d of %d at step %d (%s); seconds: %s"
            log.info(words, *formation[:3], trainer.step, point.source, laps)
            self._orders.restored(point, skipped=left_out)
            self._orders.go()
            laps.end("go")
            return self._loop(trainer, checkpointer)
        except BaseException:
            checkpointer.abandon()
            raise

    def _describe(self, formation: Formation) -> None:
        """Where the run comes from, written asynchronously: git takes its time."""
        devices = [str(self._device)] * formation.world_size
        args = (self.job, self.folder, devices, "", formation.generation)
        threading.Thread(target=self._write_provenance, args=args, daemon=True).start()

    def _write_provenance(self, *args: Any) -> None:
        try:
            provenance = write_provenance(*args)
        except OSError as error:
            log.warning("cannot write where the run comes from: %s", error)
            return
        self.described(provenance)

    def _make_trainer(self) -> Trainer:
        """The feed outlives the trainer: its place in the data is an argument, not a state."""
        wanted = (self._mesh.data_index, self.job.parallel.data)
        kept = self._feed[1] if self._feed is not None and self._feed[0] == wanted else None
        trainer = Trainer(self.job, self._mesh, self._device, kept)
        self._feed = (wanted, trainer.feed)
        return trainer

    def _resume(
        self, trainer: Trainer, formation: Formation, point: RestorePoint
    ) -> tuple[int, int]:
        """What holds from here on, beside the state that was restored.

        Returns the samples of the batch that is left out, if one is to be.
        """
        left_out = trainer.leave_out(point.skipped, point.skip_step)
        if left_out[1]:
            words = "samples %d to %d are left out: the batch of step %d"
            log.warning(words, left_out[0], left_out[1] - 1, point.skip_step)
        self._asks_leave, self._told = formation.asks_leave, point.told
        self._saves = point.saves
        trainer.rebalance(formation.shares)
        return left_out

    def _restore(self, checkpointer: Checkpointer, laps: FormationTimes) -> RestorePoint:
        """Load what is ordered; a source that is no good is refused, and another one ordered."""
        clean = True
        while True:
            point = self._orders.restore_point()
            laps.end("order")
            self._enter_folder(point)
            assert self._trainer is not None
            if not clean:
                self._trainer = self._make_trainer()
            clean = False
            try:
                problem = self._load(point, self._trainer, checkpointer)
            except CheckpointError as error:
                problem = "; ".join(error.problems)
            laps.end("load")
            if not problem:
                return point
            there = None if point.source == "peer" else self._durable_steps(point.step)
            self._orders.restored(point, problem, there=there)

    def _enter_folder(self, point: RestorePoint) -> None:
        """The run's folder is made by whoever begins; later it is there, or its storage is away.

        Looked at before anything is loaded: an empty folder in its place would be taken for a run
        without checkpoints, and all of it made again.
        """
        if point.step and not self.folder.path.is_dir():
            words = "the folder of the run was there, and is away"
            raise FileNotFoundError(errno.ENOENT, words, str(self.folder.path))
        if self._rank == 0:
            run_folder.make(self.job, self.folder)

    def _load(self, point: RestorePoint, trainer: Trainer, checkpointer: Checkpointer) -> str:
        if point.source == "none":
            parents = checkpointer.agreed(find_parents(self.job) if self._rank == 0 else [])
            load_start(self.job, trainer, checkpointer, parents)
            return ""
        manifest: Manifest | None
        if point.source == "peer":
            home = keepers_home(self.job)
            manifest = checkpointer.load_memory(home, trainer.tensors(), step=point.step)
        else:
            manifest = self._load_durable(point.step, trainer, checkpointer)
        if manifest is None:
            return "; ".join([f"step {point.step} is nowhere whole", *checkpointer.passed_over])
        trainer.restore(manifest)
        trainer.unsaved = point.source == "peer"
        return ""

    def _durable_steps(self, most: int) -> tuple[int, ...]:
        """The newest checkpoints up to a step, so that none is ordered that retention removed."""
        steps = sorted(_step(path) for path in list_checkpoints(self.folder.checkpoints))
        return tuple(step for step in steps if step <= most)[-STEPS_TOLD:]

    def _load_durable(
        self, step: int, trainer: Trainer, checkpointer: Checkpointer
    ) -> Manifest | None:
        """From the nodes' own disks where they have this step, else from the shared folder."""
        if (disks := local_root(self.job)) is not None:
            manifest = checkpointer.load_memory(
                keepers_home(self.job),
                trainer.tensors(),
                step=step,
                local=disks,
                local_run=self.folder.id,
            )
            if manifest is not None:
                log.warning("step %d comes from the nodes' own disks", step)
                return manifest
        found = [path for path in list_checkpoints(self.folder.checkpoints) if _step(path) == step]
        path = checkpointer.agreed(found[-1] if found else None)
        return None if path is None else checkpointer.load(path, trainer.tensors())

    def _loop(self, trainer: Trainer, checkpointer: Checkpointer) -> ExitInfo:
        own = open_sinks(self.job, self.folder) if self._rank == 0 else []
        if trainer.generation > 1:
            Sinks(own).write(missing_records(self.folder.steps, self._recent, trainer.step))
        if self._rank == 0:  # its log is what `phalanx logs -f` shows
            own.append(Plain(self.job, self.folder, self._clock))
        sinks = Sinks([*own, *self._sinks, self._recent])
        try:
            run = loop.attach(
                trainer,
                self.folder,
                sinks,
                checkpointer,
                self._orders,
                callbacks=[Fingerprints(trainer, self.job.train.compare_every, self._told)],
                innermost=[] if self._drill is None else [self._drill],
                ask=self.ask,
                lease=self._orders if self._asks_leave else None,
                saves_only=self._saves,
            )
            info = loop.train(run)
        finally:
            sinks.close()
        trainer.close()
        checkpointer.close()
        dist.destroy_process_group()
        lost = {f"{sink} failed": error for sink, error in sinks.failures.items()}
        return msgspec.structs.replace(info, details={**info.details, **lost})

    def _failure(self, error: BaseException) -> ExitInfo:
        traceback.print_exception(error)
        if isinstance(error, torch.OutOfMemoryError) and self._device.type == "cuda":
            error = device_memory_error(error, self.job, self._trainer, self._device)
        own = [self.folder.path]
        if (data := self.job.data.path) and "://" not in data:
            own.append(Path(data).absolute())
        return classify(error, self._rank, self.step, own)

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
        if self._rank == 0 or info.code != ExitCode.DONE:
            try:
                self.folder.write_exit(info)
            except OSError as error:  # a full disk must not hide why the run ended
                log.error("cannot write exit_info.json: %s", error)
        return info


class FormationTimes:
    """What a formation spends its time on."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        """A part is over."""
        now = time.monotonic()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f}" for name, seconds in self._seconds.items())


def join_group(formation: Formation, job: Job, device: torch.device) -> None:
    """Meet the other ranks of the generation at its store."""
    cuda = device.type == "cuda"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    timeout = timedelta(seconds=job.train.collective_timeout_seconds)
    meeting = TCPStore(formation.host, formation.port, is_master=False, timeout=timeout)
    # torch names groups by a counter that only a complete group sets back: ranks that failed to
    # form the last generation would look for each other under another name than new ones.
    distributed_c10d._world.group_count = 0
    dist.init_process_group(
        backend,
        store=PrefixStore(formation.prefix, meeting),
        rank=formation.rank,
        world_size=formation.world_size,
        timeout=timeout,
        device_id=device if cuda else None,
    )


def set_environment(formation: Formation) -> None:
    """What scripts and libraries expect of a launcher, and our own rooms ask."""
    os.environ |= {
        "RANK": str(formation.rank),
        "LOCAL_RANK": str(formation.local_rank),
        "WORLD_SIZE": str(formation.world_size),
        "MASTER_ADDR": formation.host,
        "MASTER_PORT": str(formation.port),
    }


def _with_replicas(job: Job, formation: Formation) -> Job:
    if not formation.replicas or job.parallel.data == formation.replicas:
        return job
    parallel = msgspec.structs.replace(job.parallel, data=formation.replicas)
    return msgspec.structs.replace(job, parallel=parallel)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])
