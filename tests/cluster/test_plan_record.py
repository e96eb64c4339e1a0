"""What was planned of a job, as people read it."""

from __future__ import annotations

import pytest

from phalanx.cluster.plan_record import PlanInterval, PlanRecord


def of(scale: int) -> PlanInterval:
    return PlanInterval(9 * scale, 10 * scale, 12 * scale)


@pytest.mark.parametrize(
    ("seconds", "watt_hours", "said"),
    [
        (1, 1, "10 s (9 s to 12 s), 2 dollars (1.8 to 2.4), 0.01 kWh (0.009 kWh to 0.012 kWh); "),
        (3600, 1000, "10 h (9 h to 12 h), 2 dollars (1.8 to 2.4), 10 kWh (9 kWh to 12 kWh); "),
        (86400, 10**6, "10 days (9 days to 12 days), 2 dollars (1.8 to 2.4), 10 MWh (9 MWh to 12 "),
    ],
)
def test_a_plan_is_told_in_units_of_its_size(seconds: int, watt_hours: int, said: str) -> None:
    record = PlanRecord(
        step_ns=of(10**8),
        run_seconds=of(seconds),
        micro_dollars=of(200_000),
        watt_hours=of(watt_hours),
        mapping="data 2",
        device="cpu",
    )
    assert record.summary().startswith(f"1 s a step (0.9 to 1.2), {said}")
