"""Starts the ranks of a job on this machine, shows how they do, and ends them together.

torch is imported once, here, and each rank is forked from the process that has it: four ranks
are up in the time that one import takes.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import io
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from phalanx.train.rank.threads import keep_single_threaded, require_single_thread

keep_single_threaded()

# ruff: noqa: E402 - these load numpy and torch, whose pools must not exist when ranks are forked
from phalanx.config import ConfigError, Job
from phalanx.hardware import available_memory, count_cuda
from phalanx.train.callback import Callback
from phalanx.train.exits import ExitCode
from phalanx.train.rank.gang import ForkedRanks, die_with_parent
from phalanx.train.rank.local_orders import LocalOrders
from phalanx.train.rank.rank import Rank
from phalanx.train.rank.stop import STOP_SIGNALS
from phalanx.train.report import run_folder
from phalanx.train.report.progress import (
    LosableDisplay,
    Output,
    PipeSink,
    WaitClock,
    open_display,
    output_may_be_gone,
    print_exit,
    print_refusal,
)
from phalanx.train.report.run_folder import RunFolder
from phalanx.train.resume.refusal import refuse

RANK_BYTES = 256 << 20  # of its own that a rank takes before it has a model


def launch(
    job: Job,
    world_size: int,
    folder: RunFolder | None = None,
    json: bool = False,
    waited_seconds: float = 0.0,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Run a resolved job on ``world_size`` ranks of this machine; returns the exit code.

    ``waited_seconds`` is what a person has waited already; it counts for the first step. Each rank
    has its own copies of ``callbacks``, forked with all that they hold.
    """
    clock = WaitClock(waited_seconds)
    output: Output = "json" if json else "auto"
    try:
        gang, folder = prepare_launch(job, world_size, folder)
    except ConfigError as error:
        print_refusal(error, output)
        return ExitCode.CONFIG
    reader = start_ranks(job, world_size, folder, gang, callbacks)
    display = LosableDisplay(partial(open_display, output, job, folder, clock), folder)
    try:
        gang.watch(reader, display.write)
    finally:
        display.close()
    info = gang.verdict()
    with output_may_be_gone():
        print_exit(output, info, folder)
    return info.code


def prepare_launch(
    job: Job, world_size: int, folder: RunFolder | None = None
) -> tuple[ForkedRanks, RunFolder]:
    """A gang without ranks, and its folder; ``ConfigError`` where the job cannot run here."""
    refuse(job)
    refuse_ranks(job, world_size)
    require_single_thread()
    folder = folder or run_folder.create(job)
    return ForkedRanks(folder), folder


def refuse_ranks(job: Job, world_size: int) -> None:
    """Raise ``ConfigError`` where this machine cannot hold so many ranks."""
    if job.train.device == "cuda" and (found := count_cuda()) < world_size:
        rule = f"needs one CUDA device a rank, and this machine shows {found} for {world_size}"
        fix = f"start at most {found} ranks here" if found else 'set it to "cpu", or to "auto"'
        raise ConfigError("train.device", "cuda", rule, fix)
    most = max(1, available_memory() // RANK_BYTES)
    if world_size > most:
        rule = f"every rank takes {RANK_BYTES >> 20} MiB before its share of the model"
        fix = f"at most {most} ranks fit into the memory left here"
        raise ConfigError("world size", world_size, rule, fix)


def start_ranks(
    job: Job,
    world_size: int,
    folder: RunFolder,
    gang: ForkedRanks,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Fork the ranks; returns the pipe on which rank 0 reports."""
    # Bound here and listening already: the port cannot be taken, and no rank comes too early.
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(world_size, 128))
    reader, writer = os.pipe()
    gc.freeze()  # what is shared stays shared: collection in a rank would copy the pages
    atexit.register(gc.unfreeze)  # in this process alone: libraries call what is left then leaks
    # Held back until each process has its own handlers: no signal falls between.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    launcher = os.getpid()
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _be_rank(job, rank, world_size, folder, listener, writer, launcher, callbacks)
        gang.add(rank, pid)
    os.close(writer)
    listener.close()
    gang.forward_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    return reader


def _be_rank(
    job: Job,
    rank: int,
    world_size: int,
    folder: RunFolder,
    listener: socket.socket,
    reports: int,
    launcher: int,
    callbacks: Sequence[Callback],
) -> NoReturn:
    """The life of a forked child; it never returns into the launcher's code."""
    code: int = ExitCode.OTHER
    try:
        die_with_parent(launcher)
        os.setsid()  # Ctrl-C reaches the ranks through the launcher, once
        redirect_output(folder.log(rank))
        _set_environment(job, rank, world_size, listener)
        watcher = PipeSink(reports) if rank == 0 else None
        if rank != 0:
            os.close(reports)
        orders = LocalOrders(listener=listener)
        orders.stop.install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        code = Rank(job, orders, folder, watcher=watcher, callbacks=callbacks).run()
    except BaseException:
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        # Whatever fails here, a full disk included, the child must not go on as its launcher.
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: exit handlers belong to the launcher, and teardown of a group that
        # lost a peer may wait for it for minutes.
        os._exit(code)


def redirect_output(log: Path) -> None:
    """Have everything that this process prints go to the end of a file."""
    redirect_to(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644))


def redirect_to(output: int) -> None:
    """Have everything that this process prints go to a descriptor, which is closed."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, output), (2, output)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
    sys.stdout, sys.stderr = _open_log(1), _open_log(2)
    faulthandler.enable(file=2)


class _LossyFile(io.FileIO):
    """A full disk costs lines of the log, never the run or the reason why it ended."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def _open_log(descriptor: int) -> io.TextIOWrapper:
    raw = _LossyFile(descriptor, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", line_buffering=True)


def _set_environment(job: Job, rank: int, world_size: int, listener: socket.socket) -> None:
    host, port = listener.getsockname()
    os.environ |= job.backend.environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }
