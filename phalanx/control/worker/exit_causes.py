"""Which cause the end of a worker process means: by its own last word, or by its exit status."""

from __future__ import annotations

import signal

from phalanx.cluster.causes import Cause
from phalanx.train.exits import EndReason, ExitCode

OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SHELL = 128  # a shell says so, plus the signal, how its program was ended
BY_CODE: dict[int, str] = {
    ExitCode.DONE: "",
    ExitCode.CONFIG: Cause.CONFIGURATION,
    ExitCode.GPU_MEMORY: Cause.GPU_OUT_OF_MEMORY,
    ExitCode.HOST_MEMORY: Cause.HOST_OUT_OF_MEMORY,
    ExitCode.DATA_EXHAUSTED: Cause.DATA_EXHAUSTED,
    ExitCode.NON_FINITE: Cause.NON_FINITE,
    ExitCode.LOST_PEER: Cause.LOST_PEER,
    ExitCode.CHECKPOINT: Cause.CHECKPOINT,
    ExitCode.STORAGE: Cause.STORAGE,
}
# Causes that share an exit code with others.
BY_REASON: dict[str, Cause] = {
    EndReason.KEEPER_LOST: Cause.KEEPER_LOST,
    EndReason.DISK_FULL: Cause.DISK_FULL,
}


def cause_of_exit(code: int, reason: str = "") -> str:
    """What an exit of our own trainer means."""
    return BY_REASON.get(reason) or BY_CODE.get(code, Cause.USER_ERROR)


def cause_of_signal(number: int) -> str:
    """What a signal that ended a process means."""
    if number in OUTSIDE:
        return Cause.WORKER_KILLED
    # Memory behind a mapping could not be had: a full /dev/shm, a disk, or a faulty module.
    return Cause.BUS_ERROR if number == signal.SIGBUS else Cause.SOFTWARE_BUG


def explained(status: int, *, ours: bool = False) -> tuple[str, str]:
    """Cause and words for the exit status of a worker that said nothing.

    ``ours``: it was our own trainer, whose codes have a meaning.
    """
    if status < 0:
        return cause_of_signal(-status), f"ended by {signal.Signals(-status).name}"
    if not status:
        return "", ""
    if not ours and status - SHELL in (*OUTSIDE, signal.SIGBUS):
        name = signal.Signals(status - SHELL).name
        why = f"exit code {status}: its program was ended by {name}"
        return cause_of_signal(status - SHELL), why
    return cause_of_exit(status) if ours else Cause.USER_ERROR, f"exit code {status}"
