"""Which cause the end of a worker process means: by its own last word, or by its exit status."""

from __future__ import annotations

import signal

from phalanx.train.exits import ExitCode

OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SHELL = 128  # a shell says so, plus the signal, how its program was ended
BY_CODE = {
    ExitCode.DONE: "",
    ExitCode.CONFIG: "configuration",
    ExitCode.GPU_MEMORY: "gpu_out_of_memory",
    ExitCode.HOST_MEMORY: "host_out_of_memory",
    ExitCode.DATA_EXHAUSTED: "data_exhausted",
    ExitCode.NON_FINITE: "non_finite",
    ExitCode.LOST_PEER: "lost_peer",
    ExitCode.CHECKPOINT: "checkpoint",
    ExitCode.STORAGE: "storage",
}
BY_REASON = ("keeper_lost", "disk_full")  # causes that share a code with others


def cause_of_exit(code: int, reason: str = "") -> str:
    """What an exit of our own trainer means."""
    if reason in BY_REASON:
        return reason
    known = {int(each): cause for each, cause in BY_CODE.items()}
    return known.get(code, "user_error")


def cause_of_signal(number: int) -> str:
    """What a signal that ended a process means."""
    if number in OUTSIDE:
        return "worker_killed"
    # Memory behind a mapping could not be had: a full /dev/shm, a disk, or a faulty module.
    return "bus_error" if number == signal.SIGBUS else "software_bug"


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
    return cause_of_exit(status) if ours else "user_error", f"exit code {status}"
