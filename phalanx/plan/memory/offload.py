"""State and activations that wait in host memory or on local NVMe: their room and their time.

    optimizer    masters and moments live away and pass through the device for their update, in
                 both directions at once; on NVMe they are read and written each step
    parameters   ZeRO 3's shards as well, updated by the host: fetched for forward and for backward,
                 gradients brought back, in every micro-batch; FSDP fetches ahead, so compute hides
                 a part
    activations  what a block keeps goes out in forward and comes back in backward

Traffic to the host crosses PCIe (or NVLink-C2C), traffic to NVMe both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.grid import Bools, Floats, Grid, Ints
from phalanx.plan.machine import Machine
from phalanx.plan.workload import OFFLOADS

OPTIMIZER_AWAY = np.array([("optimizer" in name or "parameters" in name) for name in OFFLOADS])
PARAMETERS_AWAY = np.array(["parameters" in name for name in OFFLOADS])
ACTIVATIONS_AWAY = np.array(["activations" in name for name in OFFLOADS])
STATE_ON_NVME = np.array(
    [name.startswith(("optimizer-nvme", "parameters-nvme")) for name in OFFLOADS]
)
ACTIVATIONS_ON_NVME = np.array([name.endswith("activations-nvme") for name in OFFLOADS])

MASTER_BYTES, GRADIENT_BYTES = 4, 4
UPDATE_BYTES = 12.0  # AdamW on the host: master read and written, gradient read; and the moments
HOST_UPDATE_SHARE = 0.6  # of the host memory's bandwidth that the update reaches
ROOM_SHARE = 0.8  # of host memory, and of the drives, that a job may take


@dataclass(frozen=True)
class OffloadedBytes:
    """Bytes of one rank that are not on the device."""

    host: Floats
    nvme: Floats


def bytes_away(grid: Grid, own: Ints, activations: Floats, moment_bytes: float) -> OffloadedBytes:
    """Room that a rank takes in host memory and on NVMe."""
    state = (MASTER_BYTES + moment_bytes) * own * OPTIMIZER_AWAY[grid.offload]
    gradients = GRADIENT_BYTES * own * PARAMETERS_AWAY[grid.offload]  # the host's, to update from
    moved = np.where(ACTIVATIONS_AWAY[grid.offload], activations, 0.0)
    on_nvme, moved_on_nvme = STATE_ON_NVME[grid.offload], ACTIVATIONS_ON_NVME[grid.offload]
    return OffloadedBytes(
        np.where(on_nvme, 0, state) + gradients + np.where(moved_on_nvme, 0.0, moved),
        np.where(on_nvme, state, 0) + np.where(moved_on_nvme, moved, 0.0),
    )


def fits_host(away: OffloadedBytes, machine: Machine) -> Bools:
    """Whether a GPU's share of host memory and of the drives holds it."""
    found: Bools = (away.host <= ROOM_SHARE * machine.host_memory_bytes) & (
        away.nvme <= ROOM_SHARE * machine.nvme_bytes
    )
    return found


def update_seconds(grid: Grid, own: Floats, machine: Machine, moment_bytes: float) -> Floats:
    """Once a step: state through the device and back, or updated by the host where it stays."""
    state = (MASTER_BYTES + moment_bytes) * own
    touched = (UPDATE_BYTES + 2 * moment_bytes) * own
    there = touched / (machine.host_memory_bandwidth * HOST_UPDATE_SHARE)
    host = np.where(PARAMETERS_AWAY[grid.offload], there, state / machine.host_bandwidth)
    # State on NVMe streams through host memory while the update runs.
    streamed = state / _rate(machine.nvme_read) + state / _rate(machine.nvme_write)
    seconds = np.where(STATE_ON_NVME[grid.offload], np.maximum(host, streamed), host)
    return np.where(OPTIMIZER_AWAY[grid.offload], seconds, 0.0)


def fetch_seconds(grid: Grid, own: Floats, machine: Machine) -> Floats:
    """Every micro-batch: shards to the device twice, their gradients to the host."""
    weights = 2 * MASTER_BYTES * own
    link = (weights + GRADIENT_BYTES * own) / machine.host_bandwidth
    read = weights / _rate(machine.nvme_read)
    seconds = np.where(STATE_ON_NVME[grid.offload], np.maximum(link, read), link)
    return np.where(PARAMETERS_AWAY[grid.offload], seconds, 0.0)


def activation_seconds(grid: Grid, kept: Floats, machine: Machine) -> Floats:
    """Every micro-batch: what a rank's blocks keep, out and back."""
    host = machine.host_bandwidth
    out = np.where(ACTIVATIONS_ON_NVME[grid.offload], min(host, _rate(machine.nvme_write)), host)
    back = np.where(ACTIVATIONS_ON_NVME[grid.offload], min(host, _rate(machine.nvme_read)), host)
    return np.where(ACTIVATIONS_AWAY[grid.offload], kept / out + kept / back, 0.0)


def _rate(bandwidth: float) -> float:
    return bandwidth or 1.0  # a server without drives has no room on them either
