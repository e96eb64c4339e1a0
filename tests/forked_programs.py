"""Python programs of jobs, run by the process that the zygote has forked: torch is imported there.

A program that is executed imports torch for two seconds of CPU at every start. The zygotes of
`python -m tests.run` run those that are submitted with `python()` where they would execute others:
same process, parent, group, folder, streams and environment, without the start of an interpreter.
Where that start belongs to what is tested, or where the test finds a program by its environment as
the kernel shows it (`worker_pids`, `kill_node`, `orphans`), submit ``sys.executable``.
"""

from __future__ import annotations

import atexit
import importlib
import os
import runpy
import signal
import sys
import threading
import traceback
import weakref
from typing import NoReturn

from phalanx.control.agent.spawn import child
from phalanx.control.agent.spawn.not_started import execute
from phalanx.testing.fork_server import VARIABLE

FORKED_PYTHON = "/forked/python"  # no such file: a zygote that does not know it says so


def python() -> str:
    """What a test submits to have a program run by Python."""
    return FORKED_PYTHON if VARIABLE in os.environ else sys.executable


def let_zygotes_run_programs() -> None:
    """Of the fork server that is opened after this, and that is the only one."""
    for module in ("phalanx.control.worker.client", "torch.distributed.run", "torch._dynamo"):
        importlib.import_module(module)
    child.execute = execute_or_run  # type: ignore[attr-defined]


def execute_or_run(argv: tuple[str, ...]) -> NoReturn:
    """Become another program, or be Python for one."""
    if argv[0] != FORKED_PYTHON:
        execute(argv)
    code = 1
    try:
        _as_started()
        _run(list(argv[1:]))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        _end(code)


def _as_started() -> None:
    """Signals, search path and what is done at the end are those of a new interpreter."""
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # temporary folders of others
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in given if folder and folder not in sys.path]


def _run(words: list[str]) -> None:
    """What ``python WORDS`` runs: a file or, after -m, a module."""
    if words[0] == "-m":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))  # noqa: PTH100, PTH120
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def _end(code: int) -> NoReturn:
    """As an interpreter does: threads are waited for, then what was left for the end is done."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
