"""Whether mappings that were measured side by side are predicted in their order."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.plan.evidence.ordering import Ordering, ordering_of
from phalanx.plan.evidence.published import parse_runs
from tests.plan.evidence.test_published import ROW


def order(*times: tuple[float, float], spreads: tuple[float, ...] = ()) -> Ordering | None:
    """Of mappings that differ in their micro-batch: predicted and measured seconds."""
    table = [
        ROW | {"global_batch": "512", "microbatch": str(2**number), "iter_time_s": str(measured)}
        for number, (_, measured) in enumerate(times)
    ]
    runs, skipped = parse_runs(table)
    assert not skipped, skipped
    errors = np.log([predicted / measured for predicted, measured in times])
    return ordering_of(runs, errors, np.array(spreads or [0.1] * len(times)))


def test_pairs_are_right_where_the_faster_one_is_predicted_faster() -> None:
    found = order((10, 10), (12, 11), (11, 12))
    assert found is not None
    assert (found.groups, found.pairs) == (1, 3)
    assert found.right == pytest.approx(2 / 3)
    assert found.regret == 0


def test_regret_is_what_the_pick_takes_longer_than_the_best() -> None:
    found = order((10, 12), (11, 10))
    assert found is not None
    assert found.right == 0
    assert found.regret == found.worst_regret == pytest.approx(0.2)


def test_the_pick_is_by_the_90th_percentile() -> None:
    found = order((10, 12), (10.5, 10), spreads=(0.3, 0.1))
    assert found is not None
    assert (found.right, found.regret) == (0, 0)


def test_ties_and_runs_without_a_choice_say_nothing() -> None:
    assert order((10, 10), (9, 10.05)) is None
    assert order((10, 10)) is None
    other = ROW | {"iter_time_s": "8", "num_gpus": str(2 * int(ROW["num_gpus"]))}
    runs, _ = parse_runs([ROW | {"iter_time_s": "5"}, other])
    assert ordering_of(runs, np.zeros(2), np.zeros(2)) is None


def test_the_same_mapping_measured_twice_counts_once() -> None:
    twice = [ROW | {"iter_time_s": seconds} for seconds in ("4", "9")]
    once = ROW | {"iter_time_s": "5", "microbatch": "2"}
    runs, skipped = parse_runs([*twice, once])
    assert not skipped
    found = ordering_of(runs, np.zeros(3), np.zeros(3))
    assert found is not None and (found.groups, found.pairs, found.right) == (1, 1, 1.0)
