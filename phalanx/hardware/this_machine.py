"""What this machine has, found without loading a driver or torch: accelerators, free memory."""

from __future__ import annotations

import os
import re
from pathlib import Path


def count_cuda(device_folder: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that a process started now would see."""
    present = sum(
        1 for node in device_folder.glob("nvidia*") if re.fullmatch(r"nvidia\d+", node.name)
    )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # The driver reads the list up to the first entry that names no device.
    chosen = 0
    for entry in visible.split(","):
        if not entry.strip() or entry.strip() == "-1":
            break
        chosen += 1
    return min(present, chosen)


def available_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that new processes can have: the kernel's word, or a control group's limit if less.

    Raises ``OSError`` where nobody says it.
    """
    lines = (proc / "meminfo").read_text().splitlines()
    (free,) = (int(text.split()[1]) << 10 for text in lines if text.startswith("MemAvailable:"))
    try:
        path = (proc / "self/cgroup").read_text().rpartition("::")[2].strip()
        group = groups / path.lstrip("/")
        limit = int((group / "memory.max").read_text())  # "max" is no number: no limit
        used = int((group / "memory.current").read_text())
        stat = dict(text.split() for text in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    return max(0, min(free, limit - used + int(stat.get("inactive_file", 0))))
