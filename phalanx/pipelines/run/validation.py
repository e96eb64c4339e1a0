"""The validation loss that a run recorded, as scores."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from phalanx.data.durable_files import write_atomically
from phalanx.pipelines.run.content import last_checkpoint

VALIDATION_LOSS = "validation.loss"


class _Validation(Struct, frozen=True):
    """The keys read from a line of ``metrics/validation.jsonl``."""

    step: int
    loss: float | None


class RunScores(Struct, frozen=True):
    """Scores in the form that evaluations write."""

    checkpoint: str
    step: int
    scores: dict[str, float]


def validation_scores(run: Path, out: Path) -> RunScores:
    """Write a run's last validation loss, and return it; ValueError if there is none."""
    path = run / "metrics" / "validation.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    if not lines:
        raise ValueError(f"{run} has no validation loss: set train.validate_every in its job")
    last = msgspec.json.decode(lines[-1], type=_Validation)
    if last.loss is None:
        raise ValueError(f"{run}: its last validation loss is not finite")
    made = RunScores(str(last_checkpoint(run) or run), last.step, {VALIDATION_LOSS: last.loss})
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, msgspec.json.encode(made))
    return made
