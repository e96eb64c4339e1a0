"""Records of steps that a dead rank 0 had made and not written: its peers know them too.

A step is safe as soon as its snapshots are, and its record follows a moment later, or (with
``log.every``) many steps later. Whoever is rank 0 next asks those that were there.
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import msgspec
import torch.distributed as dist

from phalanx.train.report.records import Record, StepRecord, decode

KEPT_RECORDS = 256
TAIL_BYTES = 256 << 10  # of the file, that gaps are looked for in


class RecentRecords:
    """A sink: the last records of this process, whatever generation made them."""

    def __init__(self) -> None:
        self.records: deque[StepRecord] = deque(maxlen=KEPT_RECORDS)

    def write(self, record: Record) -> None:
        """Keep it."""
        if isinstance(record, StepRecord):
            self.records.append(record)

    def flush(self) -> None:
        """There is nothing to write."""

    def close(self) -> None:
        """They are kept: the next generation may want them."""


def missing_records(path: Path, recent: RecentRecords, step: int) -> list[StepRecord]:
    """Records up to a step that are not in the file, in order; on rank 0. Collective."""
    by_rank: list[list[StepRecord]]
    if dist.get_world_size() == 1:
        by_rank = [list(recent.records)]
    else:
        by_rank = [[] for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else []
        dist.gather_object(list(recent.records), by_rank or None, dst=0)
    first, written = written_steps(path)
    missing: dict[int, StepRecord] = {}
    for record in (record for part in by_rank for record in part):
        if not first < record.step <= step or record.step in written:
            continue
        known = missing.get(record.step)
        if known is None or record.generation > known.generation:
            missing[record.step] = record
    return [msgspec.structs.replace(missing[number], rank=0) for number in sorted(missing)]


def written_steps(path: Path) -> tuple[int, set[int]]:
    """Steps at the end of a file of records, and the step before them (0: that is all of it)."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")[1 if start else 0 : -1]
    except FileNotFoundError:
        return 0, set()
    records = [decode(line) for line in lines]
    steps = {record.step for record in records if isinstance(record, StepRecord)}
    return (min(steps) if start and steps else 0), steps
