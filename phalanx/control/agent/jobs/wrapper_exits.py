"""What a program that starts others (torchrun, mp.spawn, a Python script) prints of their end.

Such a wrapper ends with exit code 1 whatever happened to its children, and nobody else can ask the
kernel how they ended. Its last lines say it.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from phalanx.control.agent.safe_files import open_regular
from phalanx.control.worker.exit_causes import OUTSIDE

TAIL_BYTES = 1 << 14
TOLD = (*OUTSIDE, signal.SIGBUS)
NAMES = "|".join(number.name for number in TOLD)
NUMBERS = "|".join(str(int(number)) for number in TOLD)
DESCRIBED = {signal.strsignal(number) or "": number for number in TOLD}
# Of several children that torchrun lists only the first is the cause: it ends the others itself.
TORCHRUN = re.compile(
    r"Root Cause \(first observed failure\):(?:(?!Root Cause).)*?"
    rf"exitcode\s*: -(?P<number>{NUMBERS}) \(pid: (?P<pid>\d+)\)(?!.*Root Cause)",
    re.DOTALL,
)
SPAWN = re.compile(rf"ProcessExitedException: process \d+ terminated with signal (?P<name>{NAMES})")
SUBPROCESS = re.compile(rf"CalledProcessError: Command .* died with <Signals\.(?P<name>{NAMES}): ")
DATA_LOADER = re.compile(
    rf"DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: (?P<what>{'|'.join(DESCRIBED)})"
)


class KilledChild(NamedTuple):
    """A child of a wrapper that a signal ended; ``pid`` 0: it did not say which."""

    number: signal.Signals
    pid: int


def killed_child(output: str) -> KilledChild | None:
    """The child whose end by a signal ended a wrapper, by its last lines; None: no such thing.

    Only of signals that are not the program's own fault.
    """
    if match := TORCHRUN.search(output):
        return KilledChild(signal.Signals(int(match["number"])), int(match["pid"]))
    lines = output.rstrip().splitlines()
    last = lines[-1] if lines else ""
    if match := SPAWN.search(last) or SUBPROCESS.search(last):
        return KilledChild(signal.Signals[match["name"]], 0)
    if match := DATA_LOADER.search(last):
        return KilledChild(DESCRIBED[match["what"]], int(match["pid"]))
    return None


def last_output(path: Path, start: int) -> str:
    """The end of what a process printed; ``start``: where its output begins in the file."""
    with suppress(OSError):
        file = open_regular(path)
        try:
            size = os.fstat(file).st_size
            first = start if start <= size else 0  # it was cut meanwhile
            first = max(first, size - TAIL_BYTES)
            return os.pread(file, TAIL_BYTES, first).decode(errors="replace")
        finally:
            os.close(file)
    return ""
