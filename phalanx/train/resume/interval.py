"""When the next checkpoint is due: at fixed steps, or at the interval that loses least.

Every rank decides alike: what enters a decision is either the same everywhere or rank 0's word,
which is asked for rarely.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from phalanx.config import Job
from phalanx.plan.cost.failures import (
    AUTOMATIC_RATE,
    best_interval,
    mtbf_seconds,
    rate_named,
    young_interval,
)
from phalanx.plan.question.quantities import duration
from phalanx.train.exits import ExitCode, ExitInfo

FIRST_ESTIMATE_STEPS = 8  # measured before the first decision
LEAST_STALL_SECONDS = 0.01  # a clock on a busy machine proves nothing shorter
ASSUMED_STALL_SECONDS = 0.2  # until a save has been measured
PREPARE_SECONDS = 60.0  # before the first save: memory is allocated and a keeper started
CRASHES = (ExitCode.LOST_PEER, ExitCode.HOST_MEMORY, ExitCode.GPU_MEMORY, ExitCode.OTHER)


class History(NamedTuple):
    """What happened to earlier runs of the same name."""

    seconds: float = 0.0
    failures: int = 0


class FleetRate(NamedTuple):
    """How often nodes of eight GPUs fail where the gang runs, and what that is known from."""

    per_million_node_days: int
    failures: int
    node_days: int


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """An interval and what it follows from."""

    seconds: float
    steps: int
    young_seconds: float
    stall_seconds: float
    mtbf_seconds: float
    step_seconds: float
    basis: str  # of the failure rate

    @property
    def reason(self) -> str:
        """In words."""
        return (
            f"every {duration(self.seconds)} ({self.steps:,} steps): loses least with a stall of "
            f"{self.stall_seconds:.2f} s and a failure every {duration(self.mtbf_seconds)} "
            f"({self.basis}); Young's rule says {duration(self.young_seconds)}"
        )


def estimate(
    *,
    world_size: int,
    failure_rate: str,
    history: History,
    stall_seconds: float,
    flush_seconds: float,
    step_seconds: float,
    fleet: FleetRate | None = None,
) -> Estimate:
    """The interval of most goodput under exponential failures, at least a flush and a step.

    What the fleet's controller counted says how often something fails. Where there is none, the
    planned rate counts as one failure seen, and what was observed outweighs it in time.
    """
    mtbf, basis = _between_failures(world_size, failure_rate, history, fleet)
    stall = max(LEAST_STALL_SECONDS, stall_seconds)
    seconds = max(best_interval(mtbf, stall), flush_seconds, step_seconds)
    return Estimate(
        seconds=seconds,
        steps=max(1, math.ceil(seconds / step_seconds)),
        young_seconds=young_interval(mtbf, stall),
        stall_seconds=stall,
        mtbf_seconds=mtbf,
        step_seconds=step_seconds,
        basis=basis,
    )


def _between_failures(
    world_size: int, failure_rate: str, history: History, fleet: FleetRate | None
) -> tuple[float, str]:
    """Mean seconds between two, and what they follow from."""
    if fleet is not None:
        known = f"{fleet.failures} in {fleet.node_days} node-days of this fleet"
        return mtbf_seconds(world_size, fleet.per_million_node_days / 1000), known
    rate = rate_named(failure_rate)
    planned = mtbf_seconds(world_size, rate.per_1000_node_days)
    mtbf = (planned + history.seconds) / (1 + history.failures)
    if history.failures:
        seen = f"{history.failures} seen in {duration(history.seconds)}"
        return mtbf, f"{seen}, {rate.name} before"
    return mtbf, f"planned: {rate.name}"


class SaveSchedule:
    """Says at every step whether state is to be saved."""

    def __init__(
        self, job: Job, world_size: int, first_step: int, agreed: Callable[[object], object]
    ) -> None:
        settings = job.checkpoint
        self.every = settings.every
        self.automatic = settings.every == 0 and settings.interval == "auto"
        self.estimate: Estimate | None = None
        self._job, self._world_size, self._agreed = job, world_size, agreed
        self._estimate_at = first_step + FIRST_ESTIMATE_STEPS
        self._due_at = self._prepare_at = -1
        self._saves = 0
        self._counts_from = first_step  # the interval does: the last save, or the first estimate
        self._history: History | None = None
        self._fleet: FleetRate | None = None

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is saved."""
        if self.every:
            return step % self.every == 0
        return self.automatic and step == self._due_at

    def prepares(self, step: int) -> bool:
        """Whether it is time to allocate memory for the first save."""
        return self.automatic and step == self._prepare_at

    def saved(self, step: int) -> None:
        """Count a save and plan the next; estimates are renewed ever more rarely."""
        self._saves += 1
        self._counts_from = step
        if self.automatic:
            if self._saves & (self._saves - 1) == 0:  # a power of two
                self._estimate_at = step + 1
            elif self.estimate is not None:
                self._due_at = step + self.estimate.steps

    def follow(self, rate: FleetRate, step: int) -> None:
        """All ranks heard how often the fleet fails: the interval is renewed before the next step.

        A rate that the job names stays.
        """
        known = self._fleet
        if self._job.checkpoint.failure_rate != AUTOMATIC_RATE or known == rate:
            return
        self._fleet = rate
        changed = known is None or known.per_million_node_days != rate.per_million_node_days
        if self.estimate is not None and changed:
            self._estimate_at = step

    def renews(self, step: int) -> bool:
        """Whether ``renew`` is to be called, by all ranks."""
        return self.automatic and step == self._estimate_at

    def renew(
        self, step: int, step_seconds: float, stall_seconds: float, flush_seconds: float
    ) -> Estimate:
        """Decide anew from what rank 0 measured; collective."""
        if self._history is None:
            self._history = read_history(Path(self._job.runs) / self._job.name)
        own = estimate(
            world_size=self._world_size,
            failure_rate=self._job.checkpoint.failure_rate,
            history=self._history,
            stall_seconds=stall_seconds or ASSUMED_STALL_SECONDS,
            flush_seconds=flush_seconds,
            step_seconds=max(1e-6, step_seconds),
            fleet=self._fleet,
        )
        agreed = self._agreed(own)
        assert isinstance(agreed, Estimate)
        if self.estimate is None:
            self._counts_from = step
        self.estimate = agreed
        self._due_at = max(step + 1, self._counts_from + agreed.steps)
        if self._saves == 0:
            ahead = math.ceil(PREPARE_SECONDS / agreed.step_seconds)
            self._prepare_at = max(step + 1, self._due_at - ahead)
        return agreed


def read_history(runs: Path) -> History:
    """How long earlier runs of a name ran, and how many of them something outside ended."""
    seconds, failures = 0.0, 0
    for report in runs.glob("*/exit_info.json"):
        try:
            info = msgspec.json.decode(report.read_bytes(), type=ExitInfo)
            began = datetime.strptime(report.parent.name[:15], "%Y%m%d-%H%M%S")
            ended = datetime.fromisoformat(info.finished)
        except (OSError, ValueError, msgspec.DecodeError):
            continue
        seconds += max(0.0, (ended - began.replace(tzinfo=UTC)).total_seconds())
        failures += info.code in CRASHES
    return History(seconds, failures)
