"""Advice: one thing to change, with its evidence and what it should gain."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from phalanx.config import Job
from phalanx.observe.profile.profile import JobProfile

GIB = 1 << 30
LEAST_GAIN = 0.02  # of a step: less is not worth a change


class SlowCause(StrEnum):
    """Why a step is slower than it could be."""

    SLOW_LOADER = "slow loader"
    HOST_SYNC = "host sync in the loop"
    TINY_BUCKETS = "tiny buckets"
    FP32_MATMUL = "fp32 matmul"
    RECOMPUTE = "recompute too much"
    SMALL_MICRO_BATCH = "small micro-batch"
    POWER_CAP = "power cap"
    FRAGMENTATION = "fragmentation"
    EXPOSED_GATHERS = "exposed gathers"
    EXPOSED_REDUCTIONS = "exposed reductions"
    TENSOR_TRAFFIC = "exposed tensor parallelism"
    RECOMPILES = "recompiles"


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to change."""

    cause: SlowCause
    title: str
    gain: float  # expected, as a share of the step; 0: it frees memory instead
    evidence: list[str]
    setting: str = ""  # that it changes
    value: str = ""  # to what
    command: str  # that explains or checks it


Rule = Callable[[JobProfile, Job], Advice | None]


def explain(setting: str) -> str:
    """The command that explains a setting."""
    return f"phalanx config explain {setting}"


def milliseconds(seconds: float) -> str:
    """A time in words."""
    return f"{seconds * 1e3:.4g} ms"


def size(count: float) -> str:
    """Bytes in words."""
    if count >= GIB:
        return f"{count / GIB:.3g} GiB"
    return f"{count / (1 << 20):.3g} MiB" if count >= 1 << 20 else f"{count / 1024:.3g} KiB"
