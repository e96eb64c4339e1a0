"""Commands of the command line in a process of their own, which need not import Phalanx again."""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO, NoReturn

from phalanx.cli import main
from phalanx.cli.app import COMMANDS

for _command in COMMANDS.values():
    importlib.import_module(_command.module)


def run_phalanx(
    *words: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    seconds: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """What ``phalanx WORDS`` does and says, in a process that is forked from this one.

    It has its own exit code, streams, environment and folder, and starts in milliseconds. Where the
    start of the interpreter belongs to what is tested, start ``python -m phalanx``.
    """
    return run_forked(main, ["phalanx", *words], environment, folder, seconds)


def run_module(
    name: str, *words: str, environment: Mapping[str, str], folder: Path, seconds: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """The same for ``python -m NAME WORDS``."""
    call = partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    return run_forked(call, [name, *words], environment, folder, seconds)


def run_forked(
    call: Callable[[], object],
    words: list[str],
    environment: Mapping[str, str] | None,
    folder: Path | None,
    seconds: float,
) -> subprocess.CompletedProcess[str]:
    """A call that reads its arguments as a program does, in a process of its own."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            _child(call, words, environment, folder, out, err)
        code = _wait(pid, words, seconds)
        streams = []
        for stream in (out, err):
            stream.seek(0)
            streams.append(stream.read().decode())
    return subprocess.CompletedProcess(words, code, *streams)


def _child(
    call: Callable[[], object],
    words: list[str],
    environment: Mapping[str, str] | None,
    folder: Path | None,
    out: BinaryIO,
    err: BinaryIO,
) -> NoReturn:
    code = 1
    try:
        for number, file in enumerate(
            (os.open(os.devnull, os.O_RDONLY), out.fileno(), err.fileno())
        ):
            os.dup2(file, number)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
        os.chdir(folder or Path.cwd())
        sys.argv = words
        call()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:  # whatever happened: a child that returned would go on running the tests
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, words: list[str], seconds: float) -> int:
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.005)
        raise subprocess.TimeoutExpired(words, seconds)
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
