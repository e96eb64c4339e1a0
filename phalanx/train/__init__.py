"""The loop, the optimizer and its schedule, step records, and the processes of a run.

Records are exported here; everything else needs torch and is imported from its own module:
``launch`` starts ranks on this machine, ``worker`` is one of them, ``trainer`` makes its steps.
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
