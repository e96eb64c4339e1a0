"""What the default policy is compared with EASY by."""

from __future__ import annotations

import pytest

from benchmarks.policies import against_easy
from phalanx.cluster.policy import QueuePolicy
from phalanx.cluster.units import HOUR_NS
from phalanx.simulate.policies.outcome import Spread

EASY = Spread(mean=2.0, p50=1.0, p95=8.0, p99=9.0, longest=10.0)
OVERTAKEN = QueuePolicy().starving_ns / HOUR_NS


def test_waits_are_parts_of_those_under_easy() -> None:
    ours = Spread(mean=1.0, p50=1.0, p95=10.0, p99=9.0, longest=OVERTAKEN + 5.0)
    assert against_easy(ours, EASY) == pytest.approx(
        {
            "mean_wait": 0.5,
            "p95_wait": 1.25,
            "longest_wait": 0.5,
            "longest_of_easy": (OVERTAKEN + 5.0) / EASY.longest,
        }
    )


def test_who_waits_no_longer_than_others_may_overtake_counts_as_bounded() -> None:
    ours = Spread(mean=1.0, p50=1.0, p95=1.0, p99=1.0, longest=OVERTAKEN)
    assert against_easy(ours, EASY)["longest_wait"] == 0.0
