"""All checks of settings, by the part of the machine that they look at."""

from __future__ import annotations

from phalanx.doctor.checks import (
    gpu_links,
    gpu_state,
    network,
    os_cpu,
    os_limits,
    os_memory,
    sockets,
    storage,
)
from phalanx.doctor.checks.check import SettingCheck

SETTINGS: dict[str, SettingCheck] = {
    check.id: check
    for module in (
        *(os_cpu, os_memory, os_limits, gpu_state, gpu_links),
        *(network, sockets, storage),
    )
    for check in module.CHECKS.checks
}

__all__ = ["SETTINGS"]
