"""What a run costs: GPU-hours, dollars, energy, carbon and days, each with an interval."""

from __future__ import annotations

import math

from msgspec import Struct

from phalanx.hardware import Cluster
from phalanx.plan.cost.failures import DAY_SECONDS


class Range(Struct, frozen=True):
    """An expected value and the 80 % interval around it."""

    low: float
    mid: float
    high: float

    def times(self, factor: float) -> Range:
        """Every bound times a positive number."""
        return Range(self.low * factor, self.mid * factor, self.high * factor)


class Bill(Struct, frozen=True, kw_only=True):
    """The cost of a token budget on a cluster."""

    tokens: int
    gpus: int  # paid for, spares included
    days: Range
    gpu_hours: Range
    dollars: Range
    dollars_per_million_tokens: float
    megawatt_hours: Range
    tonnes_co2: Range


def bill(
    cluster: Cluster,
    tokens: int,
    tokens_per_second: Range,
    goodput: Range,
    spare_gpus: int = 0,
) -> Bill:
    """Days and cost of a token budget. The slow end of the speed meets the poor end of goodput."""
    days = Range(
        _days(tokens, tokens_per_second.high * goodput.high),
        _days(tokens, tokens_per_second.mid * goodput.mid),
        _days(tokens, tokens_per_second.low * goodput.low),
    )
    paid = cluster.gpus + spare_gpus
    gpu_hours = days.times(24 * paid)
    dollars = gpu_hours.times(cluster.price_per_gpu_hour)
    megawatt_hours = gpu_hours.times(cluster.watts_per_gpu / 1e6)
    return Bill(
        tokens=tokens,
        gpus=paid,
        days=days,
        gpu_hours=gpu_hours,
        dollars=dollars,
        dollars_per_million_tokens=dollars.mid / tokens * 1e6,
        megawatt_hours=megawatt_hours,
        tonnes_co2=megawatt_hours.times(cluster.carbon_kg_per_kwh),
    )


def _days(tokens: int, kept_tokens_per_second: float) -> float:
    # A cluster that fails faster than it recovers never ends.
    return tokens / kept_tokens_per_second / DAY_SECONDS if kept_tokens_per_second else math.inf
