"""Numbers of GPUs beside the cluster's: rounder ones below it, others where nothing works."""

from __future__ import annotations

import pytest

from phalanx.hardware import cluster
from phalanx.plan.search.gpu_counts import other_counts, round_counts, rounder_counts


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100-1000", [896, 960, 992]),
        ("h100-100k", [98304, 99328, 99840]),
        ("h100-960", [896]),
        ("h100-1024", []),
        ("gb200-4608", []),
        ("h100-24", []),
        ("h100-8", []),
    ],
)
def test_rounder_counts_lie_just_below_and_fill_nodes(name: str, expected: list[int]) -> None:
    assert rounder_counts(cluster(name)) == expected


def test_round_counts_and_others_fill_nodes() -> None:
    on = cluster("h100-1000")
    assert list(round_counts(on))[:3] == [1000, 512, 384]
    assert all(count % 8 == 0 and count != 1000 for count in other_counts(on))
