"""What was planned of a job when it was submitted, and where each of its expectations is from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from msgspec import Struct

# job: the job file says it. default: nobody said, planned or measured it.
Origin = Literal["job", "planned", "measured", "default"]


class PlanInterval(Struct, frozen=True, forbid_unknown_fields=True):
    """An expected value and the 80 % interval around it."""

    low: int
    mid: int
    high: int


class PlanRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A plan, as far as people and the core look at it again; None: not planned."""

    device: str = ""  # that it was planned for, by its name in the catalogue
    mapping: str = ""  # in words
    chosen: tuple[str, ...] = ()  # settings that the job file left open, as they were chosen
    step_ns: PlanInterval | None = None
    run_seconds: PlanInterval | None = None  # all steps, with what failures cost
    micro_dollars: PlanInterval | None = None
    watt_hours: PlanInterval | None = None
    memory_bytes: int = 0  # of the fullest rank
    memory_limit_bytes: int = 0  # of its device
    origins: dict[str, Origin] = {}  # by field of ``Expected``; missing: default
    problem: str = ""  # why nothing was planned

    def summary(self) -> str:
        """Time, money and energy of the whole job with their intervals; "": not planned."""
        if self.step_ns is None or self.run_seconds is None:
            return ""
        from phalanx.plan.question.quantities import duration, energy  # which load numpy

        step = _between(self.step_ns, 1e9, "s a step")
        parts = [step, _between_texts(self.run_seconds, 1, duration)]
        if self.micro_dollars is not None:
            parts.append(_between(self.micro_dollars, 1e6, "dollars"))
        if self.watt_hours is not None:
            parts.append(_between_texts(self.watt_hours, 1e6, energy))
        return f"{', '.join(parts)}; {self.mapping} on {self.device}"


def _between(value: PlanInterval, unit: float, name: str) -> str:
    low, mid, high = (_short(each / unit) for each in (value.low, value.mid, value.high))
    return f"{mid} {name} ({low} to {high})"


def _between_texts(value: PlanInterval, unit: float, text: Callable[[float], str]) -> str:
    """The same where the unit depends on the size."""
    return f"{text(value.mid / unit)} ({text(value.low / unit)} to {text(value.high / unit)})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
