"""Records with plausible values, for tests that need some."""

from __future__ import annotations

from phalanx.train.report.records import (
    CheckpointRecord,
    EvaluationRecord,
    StepParts,
    StepRecord,
    ValidationRecord,
)


def step_record(step: int, **changes: object) -> StepRecord:
    """A finished step; any field can be changed."""
    fields: dict[str, object] = {
        "job": "try",
        "generation": 0,
        "rank": 0,
        "step": step,
        "first_sample": 8 * step,
        "samples": 8,
        "tokens": 512,
        "tokens_seen": 512 * step,
        "loss": 4.25,
        "grad_norm": 1.5,
        "learning_rate": 3e-4,
        "step_seconds": 0.5,
        "parts": StepParts(data=0.01, forward=0.1, backward=0.3, optimizer=0.05),
        "tokens_per_second": 1024.0,
        "mfu": None,
        "hfu": None,
        "mfu_basis": "n/a on cpu",
        "peak_memory_bytes": 1 << 20,
        "eta_seconds": 12.0,
        "skipped": False,
        "non_finite": False,
    }
    return StepRecord(**{**fields, **changes})  # type: ignore[arg-type]


def validation_record(step: int) -> ValidationRecord:
    return ValidationRecord(job="try", generation=0, step=step, loss=4.5, seconds=0.25)


def evaluation_record(step: int) -> EvaluationRecord:
    scores = {"news.perplexity": 12.5, "arc_easy.acc": 0.25}
    return EvaluationRecord(job="try", generation=0, step=step, scores=scores, seconds=1.5)


def checkpoint_record(step: int) -> CheckpointRecord:
    return CheckpointRecord(job="try", generation=0, step=step, path="/c", seconds=0.5)
