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


def explained(status: int, *, ours: bool = False) -> tuple[str, str]:
    """Cause and words for the exit status of a worker that said nothing.

    ``ours``: it was our own trainer, whose codes have a meaning.
    """
    if status < 0:
        name = signal.Signals(-status).name
        return "worker_killed" if -status in OUTSIDE else "software_bug", f"ended by {name}"
    if not status:
        return "", ""
    if not ours and status - SHELL in OUTSIDE:
        name = signal.Signals(status - SHELL).name
        return "worker_killed", f"exit code {status}: its program was ended by {name}"
    return cause_of_exit(status) if ours else "user_error", f"exit code {status}"
