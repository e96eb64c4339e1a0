"""Records for tests."""

from __future__ import annotations

from typing import Any

from phalanx.observe.node.node_records import TimedRecord
from phalanx.train.report.records import StepParts, StepRecord

SECOND_NS = 1_000_000_000


def step_record(step: int, rank: int = 0, **more: Any) -> StepRecord:
    """A step of one second, half of it the rank's own work."""
    values: dict[str, Any] = {
        "job": "test",
        "generation": 1,
        "rank": rank,
        "step": step,
        "first_sample": step * 8,
        "samples": 8,
        "tokens": 1024,
        "tokens_seen": step * 1024,
        "loss": 4.0,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "step_seconds": 1.0,
        "parts": StepParts(
            data=0.1, forward=0.3, backward=0.5, optimizer=0.1, peer_wait=0.4, own=0.5
        ),
        "tokens_per_second": 1024.0,
        "mfu": 0.4,
        "hfu": 0.5,
        "mfu_basis": "test",
        "peak_memory_bytes": 1 << 30,
        "eta_seconds": 10.0,
        "skipped": False,
        "non_finite": False,
    }
    return StepRecord(**(values | more))


def said(step: int, rank: int = 0, time_ns: int = 0, **more: Any) -> TimedRecord:
    """The same as an agent reads it."""
    return TimedRecord(time_ns or step * SECOND_NS, step_record(step, rank, **more))
