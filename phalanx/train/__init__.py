"""The loop, the optimizer and its schedule, step records, and the processes of a run.

Records are exported here; everything else needs torch and is imported from its own module:
``rank.launch`` starts ranks on this machine, ``rank.rank`` is one of them, ``trainer`` makes its
steps, and what does something beside them is a ``callback``.
"""

from __future__ import annotations

from phalanx.train.report.records import (
    CheckpointRecord,
    Record,
    StepParts,
    StepRecord,
    ValidationRecord,
    read_records,
)

__all__ = [
    "CheckpointRecord",
    "Record",
    "StepParts",
    "StepRecord",
    "ValidationRecord",
    "read_records",
]
