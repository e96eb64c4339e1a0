"""Servers and agents of tests, forked from the test's own process, which has imported Phalanx.

Where the start of the interpreter belongs to what is tested, start ``python -m phalanx``.
"""

from __future__ import annotations

import gc
import importlib
import logging
import multiprocessing.process
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn, cast

import torch

import phalanx.__main__
from phalanx.cli import main

for _module in (
    "cli.cluster.up",
    "control.server.main",
    "cli.cluster.agent",
    "control.agent.process",
):
    importlib.import_module(f"phalanx.{_module}")

PHALANX = [sys.executable, "-m", "phalanx"]
POLL_SECONDS = 0.01
_forks = True  # not in what was forked: a server has threads


def start_in_background(
    command: Sequence[str], log: Path, environment: Mapping[str, str], new_session: bool = True
) -> subprocess.Popen[bytes]:
    """Start a command of Phalanx by a fork, any other as it is; its output goes to ``log``."""
    given = {**os.environ, **environment}
    with log.open("ab") as output:
        if list(command[:3]) == PHALANX and can_fork():
            words = ["phalanx", *command[3:]]
            forked = ForkedProcess(words, output.fileno(), given, new_session)
            return cast("subprocess.Popen[bytes]", forked)
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=new_session,
            env=given,
        )


def can_fork() -> bool:
    """Not where there are threads of a server, or where CUDA was used, which bears no fork."""
    return _forks and not torch.cuda.is_initialized()


class ForkedProcess:
    """A child that was forked, with those methods of ``subprocess.Popen`` that tests use."""

    def __init__(
        self, words: list[str], output: int, environment: Mapping[str, str], new_session: bool
    ) -> None:
        self.args, self.returncode = words, cast(int | None, None)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            _be_command(words, output, environment, new_session)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None:
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for any child
                ended, status = self.pid, 0
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended; subprocess.TimeoutExpired where it does not."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _be_command(
    words: list[str], output: int, environment: Mapping[str, str], new_session: bool
) -> NoReturn:
    code = 1
    try:
        if new_session:
            os.setsid()
        _forget_the_test(output)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = words
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:  # whatever happened: a child that returned would go on running the tests
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _forget_the_test(output: int) -> None:
    """Streams, files, signals and logging are those of a process that has just been started."""
    global _forks
    _forks = False
    gc.freeze()  # a collection would copy the pages that are shared with the test
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # a test's connections end when it closes them
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", 1)  # noqa: SIM115
    random.seed()
    logging.getLogger().handlers.clear()  # pytest's
    logging.getLogger().setLevel(logging.WARNING)
    multiprocessing.process._children.clear()  # type: ignore[attr-defined]
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None  # type: ignore[attr-defined]
    sys.modules["__main__"] = phalanx.__main__  # what processes that are spawned import first
