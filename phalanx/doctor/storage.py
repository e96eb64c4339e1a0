"""Disks and mounts, measured: free room, bytes that come back, how fast, and whether they hang."""

from __future__ import annotations

import errno
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from phalanx.cluster.causes import Cause
from phalanx.doctor.finding import Finding, Measured

QUICK_BYTES, FULL_BYTES = 1 << 20, 64 << 20
WARN_FREE_SHARE, FAIL_FREE_BYTES = 0.05, 256 << 20
WARN_FSYNC_SECONDS = 1.0
PROBE_SECONDS = 5.0
NETWORK_KINDS = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "wekafs",
    "9p",
    "glusterfs",
)


def check_disk(folder: Path, *, quick: bool) -> Finding:
    """Write, sync, read back and compare; and how much room is left."""
    size = QUICK_BYTES if quick else FULL_BYTES
    name = f"disk {folder}"
    try:
        measured, same = round_trip(folder, size)
        disk = os.statvfs(folder)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return Finding(
            check=name,
            verdict="fail",
            measured={"problem": error.strerror or str(error)},
            expected="bytes that were written come back",
            suggestion="make room" if full else "see the kernel's log (`dmesg -T`)",
            cause=Cause.DEPENDENCY if full else Cause.SSD,
        )
    free, share = disk.f_bavail * disk.f_frsize, disk.f_bavail / max(1, disk.f_blocks)
    measured |= {"free_gib": free / 2**30, "free_share": share}
    cause: str
    if not same:
        suggestion, verdict, cause = "replace the disk", "fail", Cause.SSD
    elif free < FAIL_FREE_BYTES:
        suggestion, verdict, cause = "make room", "fail", Cause.DEPENDENCY
    elif share < WARN_FREE_SHARE or float(measured["fsync_seconds"]) > WARN_FSYNC_SECONDS:
        suggestion, verdict, cause = "make room, or see what else writes there", "warn", ""
    else:
        suggestion, verdict, cause = "", "pass", ""
    if not same:
        measured["problem"] = "other bytes came back than were written"
    return Finding(
        check=name,
        verdict=verdict,  # type: ignore[arg-type]
        measured=measured,
        expected=f"the same bytes, fsync below {WARN_FSYNC_SECONDS:.0f} s, "
        f"{WARN_FREE_SHARE:.0%} and {FAIL_FREE_BYTES >> 20} MiB free",
        suggestion=suggestion,
        cause=cause,
    )


def round_trip(folder: Path, size: int) -> tuple[Measured, bool]:
    """Rates of writing and reading a file, and whether the same bytes came back."""
    data = secrets.token_bytes(1 << 20) * (size >> 20)
    path = folder / f".doctor-{os.getpid()}"
    try:
        began = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            file.write(data)
            written = time.perf_counter()
            os.fsync(file.fileno())
            synced = time.perf_counter()
            # Read from the disk, not from the memory that still has it.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_from = time.perf_counter()
        same = path.read_bytes() == data
        ended = time.perf_counter()
    finally:
        path.unlink(missing_ok=True)
    return {
        "write_mb_per_second": size / (synced - began) / 1e6,
        "read_mb_per_second": size / (ended - read_from) / 1e6,
        "fsync_seconds": synced - written,
    }, same


def network_mounts(table: str) -> list[Path]:
    """Mount points of network file systems in a table such as /proc/self/mounts."""
    mounts = []
    for line in table.splitlines():
        fields = line.split()
        if len(fields) >= 3 and fields[2].split(".")[-1].startswith(NETWORK_KINDS):
            mounts.append(Path(unescape(fields[1])))
    return mounts


def read_table(path: Path = Path("/proc/self/mounts")) -> str:
    """The kernel's table of mounts, whatever bytes their names have; "" where there is none."""
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""


def unescape(name: str) -> str:
    """A name as it is: the kernel's tables have spaces and the like in it as "\\040"."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)


def probe(path: Path, seconds: float = PROBE_SECONDS) -> str:
    """What is wrong with a mount; "" when it answers in time."""
    return probe_all([path], seconds)[path]


def probe_all(paths: Iterable[Path], seconds: float = PROBE_SECONDS) -> dict[Path, str]:
    """What is wrong with each of some mounts, which are asked together.

    A hanging mount never gives the thread back, so it is left behind.
    """
    answers: dict[Path, str] = {}

    def look(path: Path) -> None:
        try:
            os.statvfs(path)
            next(os.scandir(path), None)
            answers[path] = ""
        except PermissionError:  # it answers, and lets only its users in
            answers[path] = ""
        except OSError as error:
            answers[path] = error.strerror or str(error)

    asked = [*dict.fromkeys(paths)]
    threads = [threading.Thread(target=look, args=(path,), daemon=True) for path in asked]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"no answer within {seconds:.0f} s"
    return {path: answers.get(path, late) for path in asked}


def check_mounts(wanted: tuple[Path, ...], table: str) -> Finding:
    """All network mounts, and the folders that a site names, answer."""
    paths = [*dict.fromkeys([*wanted, *network_mounts(table)])]
    problems = {str(path): problem for path, problem in probe_all(paths).items() if problem}
    if not paths:
        return Finding(check="mounts", verdict="skip", expected="(no network mount, none named)")
    return Finding(
        check="mounts",
        verdict="fail" if problems else "pass",
        measured={"mounts": len(paths), **problems},
        expected=f"each answers within {PROBE_SECONDS:.0f} s",
        suggestion="mount it again, or see its server" if problems else "",
        cause=Cause.FILESYSTEM_MOUNT if problems else "",
    )
