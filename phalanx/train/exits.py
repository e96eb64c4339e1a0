"""How a run can end: distinct exit codes, and the report that says why."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import IntEnum, StrEnum

import msgspec


class ExitCode(IntEnum):
    """Exit status of ``phalanx train`` and of each rank."""

    DONE = 0
    OTHER = 1
    CONFIG = 2
    GPU_MEMORY = 10
    HOST_MEMORY = 11
    DATA_EXHAUSTED = 12
    NON_FINITE = 13
    LOST_PEER = 14
    CHECKPOINT = 15
    STORAGE = 16
    NOT_ARCHIVED = 17  # all steps are done, and some checkpoint is not in the archive
    INTERRUPTED = 130  # a second Ctrl-C: nothing was saved


class EndReason(StrEnum):
    """Why a run ended. Where it was stopped, the signal or a callback's reason stands instead."""

    DONE = "done"  # all steps were made
    STOPPED = "stopped"  # on request, and nobody said why
    DRAIN = "drain"  # to give the nodes back
    INTERRUPTED = "interrupted"
    NO_REPORT = "no_report"  # no rank could write one
    CONFIG = "config"
    DATA_EXHAUSTED = "data_exhausted"
    NON_FINITE = "non_finite"
    GPU_MEMORY = "gpu_memory"
    HOST_MEMORY = "host_memory"
    CHECKPOINT = "checkpoint"
    KEEPER_LOST = "keeper_lost"
    DISK_FULL = "disk_full"
    STORAGE = "storage"
    NOT_ARCHIVED = "not_archived"
    LOST_PEER = "lost_peer"
    RANK_KILLED = "rank_killed"
    BUS_ERROR = "bus_error"
    CRASH = "crash"  # by another signal that nobody sent from outside
    ERROR = "error"  # any other exception


NOT_ARCHIVED = "not_archived"  # of ``details``: checkpoints that are not in the archive, and why
CHECKPOINT_INTERVAL = "checkpoint_interval"  # the one of ``details`` that warns of nothing


class ExitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The last word on a run, kept as ``exit_info.json``."""

    version: int = 1
    code: int
    reason: str  # an EndReason; of a run that was stopped: the signal, or a callback's reason
    message: str
    advice: str = ""
    rank: int | None = None  # the rank this is about; None: all of them
    step: int | None = None
    checkpoint: str = ""  # newest complete checkpoint of the run
    details: dict[str, int | float | str] = {}
    finished: str = ""
    early: bool = False  # stopped on request before its first step

    @property
    def is_symptom(self) -> bool:
        """A rank that lost a peer reports what another rank caused."""
        return self.reason == EndReason.LOST_PEER


class NonFiniteLoss(Exception):  # noqa: N818 - named for what the user sees
    """Too many steps in a row had a loss or gradient that is not a finite number."""

    def __init__(self, first_step: int, steps: int) -> None:
        super().__init__(first_step, steps)
        self.first_step = first_step
        self.steps = steps

    def __str__(self) -> str:
        return (
            f"loss or gradient norm was not finite for {self.steps} steps in a row, "
            f"from step {self.first_step} on"
        )


class DeviceMemoryError(Exception):
    """The device ran out of memory; carries where the memory was and what would help."""

    def __init__(self, message: str, breakdown: dict[str, int], advice: str) -> None:
        super().__init__(message, breakdown, advice)
        self.message = message
        self.breakdown = breakdown
        self.advice = advice

    def __str__(self) -> str:
        return self.message


def now() -> str:
    """The time of day as it is written into records: UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
