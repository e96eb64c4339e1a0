"""The machine that figures are measured on: what it is, what it has, whether it is quiet."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from proof.claim import Need

QUIET_SHARE = 0.15  # of all cores' time that others may use
SAMPLE_SECONDS = 1.5
PACE_ROUNDS = 9
MOST_WAIT_SECONDS = 90.0  # for the cores to become quiet


@functools.cache
def machine_name() -> str:
    """Processor, cores and GPU: figures are compared with history of the same machine alone."""
    name = f"{_processor()} × {os.cpu_count()}"
    gpu = gpu_name()
    return f"{name}, {gpu}" if gpu else name


@functools.cache
def gpu_name() -> str:
    """The first GPU's name, or nothing; asked of the driver, which is quicker than torch."""
    if shutil.which("nvidia-smi") is None:
        return ""
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def busy_share(seconds: float = SAMPLE_SECONDS) -> float:
    """The part of all cores' time that is in use just now."""
    idle, total = _jiffies()
    time.sleep(seconds)
    idle_after, total_after = _jiffies()
    return 1.0 - (idle_after - idle) / max(1, total_after - total)


def _jiffies() -> tuple[int, int]:
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)  # idle and waiting for I/O, all


def wait_until_quiet(most_seconds: float) -> float:
    """The busy share when the cores became quiet, or after the longest wait."""
    until = time.monotonic() + most_seconds
    while (share := busy_share()) > QUIET_SHARE and time.monotonic() < until:
        time.sleep(2.0)
    return share


def pace_seconds() -> float:
    """How long a fixed piece of work takes just now: neighbours slow a shared machine unseen."""
    return statistics.median(_fixed_work() for _ in range(PACE_ROUNDS))


def _fixed_work() -> float:
    began = time.perf_counter()
    counts: dict[int, int] = {}
    for number in range(200_000):
        key = number * 7919 % 4093
        counts[key] = counts.get(key, 0) + 1
    return time.perf_counter() - began


def missing(needs: tuple[Need, ...]) -> list[Need]:
    """Those that this machine does not have; quiet cores are waited for, not had."""
    return [need for need in needs if need in _HAS and not _HAS[need]()]


def _has_titan() -> bool:
    return "PHALANX_TITAN" in os.environ or importlib.util.find_spec("torchtitan") is not None


def _has_chromium() -> bool:
    return any(shutil.which(name) for name in ("chromium", "chromium-browser"))


def _has_slurm() -> bool:
    path = os.environ.get("PATH", "") + ":/usr/sbin"
    return all(shutil.which(name, path=path) for name in ("slurmctld", "slurmd", "munged"))


_HAS: dict[Need, Callable[[], bool]] = {
    Need.ROOT: lambda: os.geteuid() == 0,
    Need.CHROMIUM: _has_chromium,
    Need.SLURM: _has_slurm,
    Need.RAY: lambda: importlib.util.find_spec("ray") is not None,
    Need.S3: lambda: shutil.which("weed") is not None or _beside_python("weed"),
    Need.FILES: lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 13_000,
    Need.CUDA: lambda: bool(gpu_name()),
    Need.TITAN: _has_titan,
    Need.PEFT: lambda: importlib.util.find_spec("peft") is not None,
    Need.DATATROVE: lambda: "PHALANX_DATATROVE" in os.environ,
    Need.TRACE: lambda: Path(os.environ.get("PHALANX_TRACE", "")).is_file(),
}


def _beside_python(name: str) -> bool:
    return (Path(sys.executable).parent / name).exists()
