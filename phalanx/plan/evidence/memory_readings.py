"""Memory of published runs: readings beside predictions, and who should not have fitted.

A reading is of what tensors take, of what the allocator holds, or of what is gone from the device;
each is compared with its own prediction. A run without a reading says one thing still: it ran, so
it fitted. One that failed for want of memory says the opposite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct, structs

from phalanx.plan.cost.constants import Constants, calibrated
from phalanx.plan.evidence.published import PublishedRun
from phalanx.plan.grid import Floats, grid_of
from phalanx.plan.memory.peak import PeakMemory, memory
from phalanx.plan.workload import RECOMPUTES

SHARES: Floats = np.exp(np.linspace(-0.3, 0.3, 61))  # that activations may be of what is counted
SHARE_WIDTH = 0.1  # of its logarithm, before any run is seen
READING_NOISE = 0.08
LIMIT_NOISE = 0.04  # of the one-sided constraints
HUBER = 2.0
Z95 = 1.96


class MemoryRow(Struct, frozen=True, kw_only=True):
    """What a run needs of its device, and its reading where there is one."""

    row: int
    project: str
    needed_bytes: float  # by the least recompute that it may have had
    device_bytes: float  # there are
    out_of_memory: bool
    predicted_bytes: float | None  # of what was read
    measured_bytes: float | None
    error: float | None  # predicted over measured, less 1

    @property
    def misjudged(self) -> bool:
        """It ran and is predicted not to fit, or it failed and is predicted to."""
        return (self.needed_bytes > self.device_bytes) != self.out_of_memory


class MemoryErrors(Struct, frozen=True, kw_only=True):
    """How well memory is predicted."""

    n: int  # readings
    within_10: float  # share of them
    within_15: float
    ran: int
    false_oom: int  # of these, predicted not to fit
    failed: int
    false_fit: int  # of these, predicted to fit
    false_oom_between: tuple[float, float]  # 95 % interval of the rate
    false_fit_between: tuple[float, float]


def rate_interval(hits: int, tries: int) -> tuple[float, float]:
    """The 95 % interval of a rate that was seen in so many tries, by Wilson's score."""
    if not tries:
        return 0.0, 1.0
    share, z2 = hits / tries, Z95**2
    middle = (share + z2 / (2 * tries)) / (1 + z2 / tries)
    half = Z95 / (1 + z2 / tries) * math.sqrt(share * (1 - share) / tries + z2 / (4 * tries**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def memory_row(run: PublishedRun, constants: Constants) -> MemoryRow:
    """One run beside its prediction; recompute that nobody stated is what lets it fit."""
    run = structs.replace(run, software=calibrated(run.software, constants))
    held = _held(run)
    predicted = None
    if run.memory_bytes is not None and run.recompute_known:
        predicted = float(_read(run, held)[0])
    return MemoryRow(
        row=run.row,
        project=run.project,
        needed_bytes=float(held.needed[0]),
        device_bytes=float(run.cluster.gpu.memory_bytes),
        out_of_memory=run.out_of_memory,
        predicted_bytes=predicted,
        measured_bytes=run.memory_bytes,
        error=predicted / run.memory_bytes - 1 if predicted and run.memory_bytes else None,
    )


def memory_errors(rows: Sequence[MemoryRow]) -> MemoryErrors:
    """Errors of the readings, and how many runs are misjudged either way."""
    errors = np.abs([row.error for row in rows if row.error is not None])
    ran = [row for row in rows if not row.out_of_memory]
    failed = [row for row in rows if row.out_of_memory]
    nothing = float("nan")
    false_oom, false_fit = (sum(row.misjudged for row in some) for some in (ran, failed))
    return MemoryErrors(
        n=len(errors),
        within_10=float(np.mean(errors <= 0.10)) if len(errors) else nothing,
        within_15=float(np.mean(errors <= 0.15)) if len(errors) else nothing,
        ran=len(ran),
        false_oom=false_oom,
        failed=len(failed),
        false_fit=false_fit,
        false_oom_between=rate_interval(false_oom, len(ran)),
        false_fit_between=rate_interval(false_fit, len(failed)),
    )


def with_activation_shares(constants: Constants, runs: Sequence[PublishedRun]) -> Constants:
    """Constants with what activations of each stack are, over what the terms count.

    Readings pull either way; a run that ran only down to what fits, a failed one only up.
    """
    stacks = sorted({run.software.name for run in runs if run.software.name})
    shares = {}
    for name in stacks:
        own = [_RunMemory.of(run) for run in runs if run.software.name == name]
        loss = sum((one.loss(SHARES) for one in own), (np.log(SHARES) / SHARE_WIDTH) ** 2)
        shares[name] = float(SHARES[int(np.argmin(loss))])
    return structs.replace(constants, activation_share=shares)


@dataclass(frozen=True)
class _RunMemory:
    """A run's bytes as a line over the share of its activations."""

    run: PublishedRun
    without: PeakMemory  # activations and buffers
    counted: PeakMemory

    @classmethod
    def of(cls, run: PublishedRun) -> _RunMemory:
        nothing, all_of_it = (
            _held(structs.replace(run, software=structs.replace(run.software, activation_share=s)))
            for s in (0.0, 1.0)
        )
        return cls(run, nothing, all_of_it)

    def loss(self, shares: Floats) -> Floats:
        """Squared deviations from what is known of the run, for each share."""
        device = float(self.run.cluster.gpu.memory_bytes)
        needed = self._line(self.without.needed, self.counted.needed, shares)
        over = np.log(needed / device) / LIMIT_NOISE
        limit = np.minimum(0.0, over) if self.run.out_of_memory else np.maximum(0.0, over)
        loss = _huber(limit)
        if self.run.memory_bytes is not None and self.run.recompute_known:
            least, most = (_read(self.run, held) for held in (self.without, self.counted))
            read = self._line(least, most, shares)
            loss = loss + _huber(np.log(read / self.run.memory_bytes) / READING_NOISE)
        return loss

    @staticmethod
    def _line(least: Floats, most: Floats, shares: Floats) -> Floats:
        return least + shares * (most - least)


def _huber(deviations: Floats) -> Floats:
    """Squares of deviations, beyond some of which they count linearly."""
    near = np.minimum(np.abs(deviations), HUBER)
    loss: Floats = near * (2 * np.abs(deviations) - near)
    return loss


def _held(run: PublishedRun) -> PeakMemory:
    levels = (run.mapping.recompute,) if run.recompute_known else RECOMPUTES
    held = [
        memory(
            run.workload,
            grid_of([structs.replace(run.mapping, recompute=level)]),
            run.software,
        )
        for level in levels
    ]
    return min(held, key=lambda one: float(one.needed[0]))


def _read(run: PublishedRun, held: PeakMemory) -> Floats:
    """The total that the run's figure is of; a full device reads full."""
    totals = {"allocated": held.allocated, "reserved": held.reserved, "device": held.total}
    return np.minimum(totals[run.memory_kind], float(run.cluster.gpu.memory_bytes))
