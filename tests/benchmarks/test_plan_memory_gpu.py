"""Shapes whose memory is measured on a GPU: jobs that fit it, and rows that are judged rightly."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.plan_memory_gpu import SHAPES, figures_of, predicted
from phalanx.config import check
from phalanx.hardware import cluster


def test_every_shape_is_a_job_that_one_h200_holds() -> None:
    assert len(SHAPES) >= 20
    limit = cluster("h200-8").gpu.memory_bytes
    for shape in SHAPES:
        check(shape.job(), 1)
        growing, fixed = (predicted(shape, expandable=each) for each in (True, False))
        assert growing["allocated"] == fixed["allocated"]
        assert growing["allocated"] < growing["reserved"] < fixed["reserved"] < fixed["device"]
        assert growing["device"] < 0.95 * limit, shape


def _row(allocated: float, **changes: Any) -> dict[str, Any]:
    sizes = {"allocated": allocated, "reserved": 110, "device": 120}
    row = {f"{name}_bytes": size for name, size in sizes.items()}
    return row | {
        "predicted_allocated_bytes": 100,
        "predicted_reserved_bytes": 110,
        "predicted_device_bytes": 120,
        "out_of_memory": False,
        **changes,
    }


def test_each_reading_is_judged_by_its_own_prediction() -> None:
    figures = figures_of([_row(95), _row(80), _row(90, out_of_memory=True)])
    assert (figures["runs"], figures["failed"]) == (2, 1)
    assert (figures["allocated_within"], figures["reserved_within"]) == (0.5, 1.0)
    assert figures["allocated_worst"] == pytest.approx(0.25)
