"""Memory of runs: three totals, who should not have fitted, and what running says."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.plan.cost.constants import shipped
from phalanx.plan.evidence.memory_readings import (
    memory_errors,
    memory_row,
    rate_interval,
    with_activation_shares,
)
from phalanx.plan.evidence.published import PublishedRun, parse_runs
from tests.plan.evidence.test_published import ROW

CONSTANTS = structs.replace(shipped(), activation_share={})


def one(**changed: str) -> PublishedRun:
    return parse_runs([ROW | {"stack": "fsdp"} | changed])[0][0]


def test_allocated_reserved_and_device_are_different_numbers() -> None:
    kinds = ("allocated", "reserved", "device")
    rows = [memory_row(one(mem_gb="60", mem_kind=kind), CONSTANTS) for kind in kinds]
    predicted = [row.predicted_bytes for row in rows]
    assert predicted == sorted(set(predicted), key=lambda count: count or 0.0)
    assert rows[0].needed_bytes == rows[2].needed_bytes


def test_runs_that_ran_and_failed_are_judged_one_by_one() -> None:
    large = {"microbatch": "4", "global_batch": "256"}
    rows = [
        memory_row(one(recompute="full"), CONSTANTS),
        memory_row(one(**large), CONSTANTS),
        memory_row(one(**large, mem_gb="OOM"), CONSTANTS),
        memory_row(one(recompute="full", mem_gb="OOM"), CONSTANTS),
    ]
    assert [row.misjudged for row in rows] == [False, True, False, True]
    found = memory_errors(rows)
    assert (found.ran, found.false_oom, found.failed, found.false_fit) == (2, 1, 2, 1)


@pytest.mark.parametrize(
    ("hits", "tries", "low", "high"),
    [(1, 4, 0.046, 0.699), (2, 11, 0.051, 0.477), (0, 10, 0.0, 0.278), (0, 0, 0.0, 1.0)],
)
def test_few_runs_know_a_rate_badly(hits: int, tries: int, low: float, high: float) -> None:
    assert rate_interval(hits, tries) == pytest.approx((low, high), abs=0.001)


def test_recompute_that_nobody_stated_is_what_lets_a_run_fit() -> None:
    large = {"microbatch": "4", "global_batch": "256"}
    assert not memory_row(one(**large, recompute=""), CONSTANTS).misjudged
    assert memory_row(one(recompute="", mem_gb="60"), CONSTANTS).error is None


def test_running_pulls_the_share_of_activations_down_and_never_up() -> None:
    tight = one(microbatch="2", global_batch="128")
    over = with_activation_shares(CONSTANTS, [tight] * 4).activation_share["fsdp"]
    roomy = with_activation_shares(CONSTANTS, [one(recompute="full")] * 4).activation_share["fsdp"]
    failed = [one(recompute="selective", mem_gb="OOM")] * 4
    up = with_activation_shares(CONSTANTS, failed).activation_share["fsdp"]
    assert roomy == pytest.approx(1.0) and over < roomy < up


def test_readings_decide_the_share() -> None:
    run = one(recompute="full", mem_gb="60")
    predicted = memory_row(run, CONSTANTS).predicted_bytes
    assert predicted is not None
    more = structs.replace(run, memory_bytes=1.1 * predicted)
    fitted = with_activation_shares(CONSTANTS, [more] * 10)
    assert fitted.activation_share["fsdp"] > 1.05
    error = memory_row(more, fitted).error
    assert error is not None and abs(error) < 0.03
