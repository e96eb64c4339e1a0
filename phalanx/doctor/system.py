"""The clock and the limits of the operating system."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

from msgspec import Struct

from phalanx.cluster.causes import Cause
from phalanx.doctor.finding import Finding, Measured

LEAST_FILES, WANTED_FILES = 1024, 65_536
WANTED_SHARED_BYTES = 1 << 30
WARN_OFFSET_SECONDS = 0.5
UNSYNCHRONIZED = 0x40  # STA_UNSYNC of adjtimex


class KernelClock(Struct, frozen=True):
    """What the kernel knows of its clock."""

    synchronized: bool
    offset_seconds: float  # to its source, as it estimates it


class _Timex(ctypes.Structure):
    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


def read_clock() -> KernelClock | None:
    """Ask the kernel; None where it does not say."""
    timex = _Timex()
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "adjtimex") or library.adjtimex(ctypes.byref(timex)) < 0:
        return None
    nanoseconds = bool(timex.status & 0x2000)  # STA_NANO
    offset = timex.offset / (1e9 if nanoseconds else 1e6)
    return KernelClock(not timex.status & UNSYNCHRONIZED, offset)


def check_clock(clock: KernelClock | None, server_skew_seconds: float | None = None) -> Finding:
    """Whether the clock is kept right. Wrong clocks do no harm to jobs, only to people."""
    if clock is None:
        return Finding(check="clock", verdict="skip", expected="(the kernel does not say)")
    measured: Measured = {
        "synchronized": "yes" if clock.synchronized else "no",
        "offset_seconds": clock.offset_seconds,
    }
    off = abs(clock.offset_seconds)
    if server_skew_seconds is not None:
        measured["ahead_of_server_seconds"] = server_skew_seconds
        off = max(off, abs(server_skew_seconds))
    good = clock.synchronized and off < WARN_OFFSET_SECONDS
    return Finding(
        check="clock",
        verdict="pass" if good else "warn",
        measured=measured,
        expected=f"synchronized, within {WARN_OFFSET_SECONDS} s",
        suggestion="" if good else "run chrony or systemd-timesyncd (`timedatectl`)",
    )


def check_limits(shared: Path = Path("/dev/shm"), rdma: Path = Path("/dev/infiniband")) -> Finding:
    """Open files, locked memory where the network needs it, shared memory, processes."""
    soft, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    shared_bytes = _size_of(shared)
    advice = []
    if _below(files, WANTED_FILES):
        advice.append(f"raise nofile to {WANTED_FILES} (limits.conf, or LimitNOFILE= of the unit)")
    if rdma.exists() and locked != resource.RLIM_INFINITY:
        advice.append("set memlock to unlimited: RDMA locks its buffers")
    if shared_bytes < WANTED_SHARED_BYTES:
        advice.append(f"give {shared} at least 1 GiB (--shm-size of a container)")
    if _below(processes, 4096):
        advice.append("raise nproc to 4096")
    return Finding(
        check="limits",
        verdict="fail" if _below(files, LEAST_FILES) else "warn" if advice else "pass",
        measured={
            "nofile": f"{_limit(soft)} (at most {_limit(files)})",
            "memlock": _limit(locked),
            "shm_gib": shared_bytes / 2**30,
            "nproc": _limit(processes),
        },
        expected=f"nofile {WANTED_FILES}, shm 1 GiB, memlock unlimited where there is RDMA",
        suggestion="; ".join(advice),
        cause=Cause.SYSTEM_SERVICE if _below(files, LEAST_FILES) else "",
    )


def _below(limit: int, wanted: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < wanted


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _size_of(folder: Path) -> int:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0
    return disk.f_blocks * disk.f_frsize
