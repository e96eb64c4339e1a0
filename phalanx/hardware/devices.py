"""Which accelerators this machine has, found without loading a driver or torch."""

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
