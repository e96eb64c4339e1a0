"""One rank of a run, from joining the group to its exit report.

Runs forked by ``phalanx train`` or, on several nodes, as ``torchrun -m phalanx.train.rank.worker``.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from phalanx.checkpoint import latest
from phalanx.config import ConfigError, Job, check, load_job, resolve
from phalanx.parallel.mesh import build_mesh
from phalanx.train.callback import Callback
from phalanx.train.measure.memory import device_memory_error
from phalanx.train.rank import loop
from phalanx.train.rank.diagnose import classify
from phalanx.train.rank.exits import ExitCode, ExitInfo, now
from phalanx.train.rank.orders import LocalOrders
from phalanx.train.rank.stop import StopFlag, StoppedEarly
from phalanx.train.report import run_folder
from phalanx.train.report.progress import (
    Plain,
    WaitClock,
    print_exit,
    print_refusal,
    process_age_seconds,
)
from phalanx.train.report.provenance import write_provenance
from phalanx.train.report.records import StartRecord
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.report.sinks import Sink, Sinks, open_sinks
from phalanx.train.resume.parent import fallback_note, find_parents
from phalanx.train.resume.refusal import refuse
from phalanx.train.resume.saving import open_checkpointer, prepare_saves
from phalanx.train.resume.start import load_start
from phalanx.train.trainer import Trainer

REFUSAL_SECONDS = 30.0  # ample for a rank that only reads a file; usually cut short by torchrun
T = TypeVar("T")
log = logging.getLogger(__name__)


class Worker:
    """A rank's life; ``run`` never raises, it reports."""

    def __init__(
        self,
        job: Job,
        folder: RunFolder | None = None,
        listener: socket.socket | None = None,
        watcher: Sink | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.job = job
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.stop = StopFlag()
        self._folder = folder
        self._listener = listener
        self._watcher = watcher
        self._callbacks = callbacks
        self._device = torch.device("cpu")
        self._trainer: Trainer | None = None

    def run(self) -> int:
        """Train; the exit code says how it went and ``exit_info.json`` says why."""
        try:
            info = self._attempt()
        except StoppedEarly:
            info = self._stopped_early()
        if self.rank == 0 or info.early or info.code != ExitCode.DONE:
            self._report(info)
        return info.code

    def say_ended(self) -> None:
        """Under torchrun nobody else says the last word; failures are in the rank's output."""
        info = self._folder.read_exit() if self.rank == 0 and self._folder is not None else None
        if info is not None and info.code == ExitCode.DONE:
            assert self._folder is not None
            print_exit("plain", info, self._folder)

    def _attempt(self) -> ExitInfo:
        try:
            self.stop.starting()
            return self._train()
        except StoppedEarly:
            raise
        except BaseException as error:
            self.stop.started()
            return self._failure(error)

    def _stopped_early(self) -> ExitInfo:
        """Nothing was made, so nothing is saved; what the run started from is untouched."""
        return ExitInfo(
            code=ExitCode.DONE,
            reason=self.stop.reason,
            message="stopped on request before the first step",
            step=self._trainer.step if self._trainer is not None else None,
            finished=now(),
            early=True,
        )

    def _train(self) -> ExitInfo:
        self._device = choose_device(self.job, self.local_rank)
        self._join_group()
        folder = self._agree_on_folder()
        parents = self._agree(find_parents(self.job) if self.rank == 0 else [])
        self._write_provenance(folder, parents)

        mesh = build_mesh(self.job, self._device)
        self._trainer = trainer = Trainer(self.job, mesh, self._device)
        checkpointer = open_checkpointer(self.job, folder)
        start = load_start(self.job, trainer, checkpointer, parents)
        notes = fallback_note(trainer.step, parents)
        if self.job.checkpoint.every or self.job.checkpoint.memory_every:
            prepare_saves(self.job, trainer, checkpointer)
        sinks = Sinks(self._sinks(folder, start))
        try:
            orders = LocalOrders(self.stop)
            run = loop.attach(
                trainer, folder, sinks, checkpointer, orders, callbacks=self._callbacks
            )
            info = loop.train(run)
        finally:
            sinks.close()
            trainer.close()
            checkpointer.close()
        dist.destroy_process_group()
        lost = {f"{sink} failed": error for sink, error in sinks.failures.items()}
        return msgspec.structs.replace(info, details={**info.details, **notes, **lost})

    def _join_group(self) -> None:
        job, cuda = self.job, self._device.type == "cuda"
        backend = "nccl" if cuda else "gloo"
        if cuda and job.memory.offload != "none":
            backend = "cpu:gloo,cuda:nccl"  # norms of offloaded gradients are reduced on the host
        dist.init_process_group(
            backend,
            store=self._store(),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=job.train.collective_timeout_seconds),
            device_id=self._device if cuda else None,
        )

    def _store(self) -> Store | None:
        """Where the ranks find each other; None under torchrun, which has one of its own."""
        if self._listener is None:
            return None
        host, port = self._listener.getsockname()
        if self.rank != 0:
            self._listener.close()
            return TCPStore(host, port, self.world_size, is_master=False)
        return TCPStore(
            host,
            port,
            self.world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )

    def _agree_on_folder(self) -> RunFolder:
        """The launcher made the folder; under torchrun rank 0 makes it and tells the others."""
        if self._folder is None:
            made = run_folder.create(self.job).path if self.rank == 0 else None
            path = self._agree(made)
            assert path is not None
            self._folder = RunFolder(path)
        return self._folder

    def _agree(self, value: T) -> T:
        shared = [value]
        dist.broadcast_object_list(shared, src=0, device=self._device)
        return shared[0]

    def _write_provenance(self, folder: RunFolder, parents: list[Path | str]) -> None:
        cuda = self._device.type == "cuda"
        name = torch.cuda.get_device_name(self._device) if cuda else "cpu"
        names = [name] * self.world_size
        dist.all_gather_object(names, name)
        if self.rank == 0:
            write_provenance(self.job, folder, names, str(parents[0] if parents else ""))

    def _sinks(self, folder: RunFolder, start: StartRecord) -> list[Sink]:
        if self.rank != 0:
            return []
        watcher = self._watcher or Plain(self.job, folder, WaitClock(process_age_seconds()))
        if self.job.checkpoint.resume or start.tier:
            watcher.write(start)
        return [*open_sinks(self.job, folder), watcher]

    def _failure(self, error: BaseException) -> ExitInfo:
        traceback.print_exception(error)
        standing = self._folder.read_exit() if self._folder is not None else None
        if standing is not None and standing.early:
            return standing  # this rank noticed that another one left on request
        step = self._trainer.step if self._trainer is not None else None
        if isinstance(error, torch.OutOfMemoryError) and self._device.type == "cuda":
            error = device_memory_error(error, self.job, self._trainer, self._device)
        info = classify(error, self.rank, step)
        newest = latest(self._folder.checkpoints) if self._folder is not None else None
        return msgspec.structs.replace(info, checkpoint=str(newest or ""))

    def _report(self, info: ExitInfo) -> None:
        if info.code != ExitCode.DONE:
            log.error("%s\n%s", info.message, info.advice)
        try:
            if self._folder is not None:
                self._folder.write_exit(info)
        except OSError as error:  # a full disk must not hide why the run ended
            log.error("cannot write exit_info.json: %s", error)


def choose_device(job: Job, local_rank: int) -> torch.device:
    """The device of this rank, made current."""
    wanted = job.train.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        torch.set_num_threads(job.train.cpu_threads)
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if local_rank >= visible:
        rule = f"needs one CUDA device a rank, {visible} are visible"
        raise ConfigError("train.device", wanted, rule, 'start fewer ranks or use "cpu"')
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def main(arguments: Sequence[str] | None = None, callbacks: Sequence[Callback] = ()) -> int:
    """Entry point under ``torchrun``: reads the job and runs this process's rank of it."""
    parser = argparse.ArgumentParser(prog="torchrun -m phalanx.train.rank.worker")
    parser.add_argument("job", help="the job's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("RANK is not set: start it with torchrun, or use: phalanx train JOB.toml")
    try:
        job = prepare(load_job(options.job, options.set), int(os.environ["WORLD_SIZE"]))
    except ConfigError as error:
        return _refused(error)
    worker = Worker(job, callbacks=callbacks)
    worker.stop.install()
    code = worker.run()
    worker.say_ended()
    return code


def _refused(error: ConfigError) -> int:
    """One rank of each node, whose files may differ from other nodes', says what is wrong."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print_refusal(error)
    else:
        # torchrun ends all ranks of a node with the first: that must be the one that speaks.
        time.sleep(REFUSAL_SECONDS)
    return ExitCode.CONFIG


def prepare(job: Job, world_size: int, *, begins: bool = True) -> Job:
    """The job made explicit for a world size and refused if anything about it cannot work."""
    check(job, world_size)
    job = resolve(job, world_size)
    refuse(job, begins=begins)
    return job


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: teardown of a group that lost a peer may wait for it for minutes.
    os._exit(code)
