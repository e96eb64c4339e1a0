"""What holds a job's processes in: no way to more rights, and bounds of memory and processes."""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress
from pathlib import Path

from phalanx.control.wire.zygote_messages import Containment

PR_SET_NO_NEW_PRIVS = 38  # linux/prctl.h
JOB_OOM_SCORE, KEEPER_OOM_SCORE = 500, 200  # a worker ends first, then what keeps its snapshots
UMASK = 0o022
LEFT_BYTES = 1 << 30  # of a node's memory, for the agent and the system
CONTROLLERS = ("memory", "pids", "cpu")


def contain(bounds: Containment, role: str) -> None:
    """Bound this process, which is about to become a job's."""
    os.umask(UMASK)
    score = KEEPER_OOM_SCORE if role == "keeper" else JOB_OOM_SCORE
    with suppress(OSError):  # the kernel lets anybody raise it
        Path("/proc/self/oom_score_adj").write_text(str(score))
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    most = bounds.core_bytes if hard == resource.RLIM_INFINITY else min(bounds.core_bytes, hard)
    resource.setrlimit(resource.RLIMIT_CORE, (most, hard))
    if bounds.no_new_privileges:
        forbid_new_privileges()


def forbid_new_privileges() -> None:
    """Neither this process nor what it executes gains rights: set-user-ID programs do not work."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")


def enable_controllers(folder: Path) -> None:
    """Have the groups below one bounded; those that the kernel does not offer there are left."""
    with suppress(OSError):
        offered = (folder / "cgroup.controllers").read_text().split()
        for name in CONTROLLERS:
            if name in offered:
                with suppress(OSError):
                    (folder / "cgroup.subtree_control").write_text(f"+{name}")


def bound_group(group: Path, bounds: Containment) -> None:
    """Bound all processes of a control group; OSError where the kernel cannot do that there."""
    wanted = {"memory.max": bounds.memory_bytes, "pids.max": bounds.processes}
    wanted["cpu.weight"] = bounds.cpu_weight
    for name in (name for name, value in wanted.items() if value):
        (group / name).write_text(str(wanted[name]))
    if bounds.memory_bytes:
        with suppress(OSError):  # where the kernel accounts for it
            (group / "memory.swap.max").write_text("0")
        with suppress(OSError):  # a rank without its others is lost
            (group / "memory.oom.group").write_text("1")


def memory_share(total_bytes: int, held: int, gpus: int) -> int:
    """What a job that holds some of a node's GPUs may take of its memory."""
    usable = max(total_bytes - LEFT_BYTES, total_bytes // 2)
    return usable * held // gpus if gpus and 0 < held < gpus else usable
