"""Whoever is rank 0 next writes the records that the one before it could not."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from phalanx.train.report.gaps import KEPT_RECORDS, RecentRecords, missing_records, written_steps
from phalanx.train.report.records import StepRecord, encode
from tests.ranks import run_ranks
from tests.train.sample_records import step_record


def record(step: int, generation: int = 1, rank: int = 1) -> StepRecord:
    return step_record(step, generation=generation, rank=rank)


def write(path: Path, steps: range) -> None:
    path.write_bytes(b"".join(encode(record(step, rank=0)) for step in steps))


def _ask(path: Path) -> list[tuple[int, int, int]]:
    recent = RecentRecords()
    if dist.get_rank() == 1:  # rank 0 is new, rank 2 was behind when the gang broke
        for step in range(1, 13):
            recent.write(record(step))
    elif dist.get_rank() == 2:
        for step in range(1, 10):
            recent.write(record(step, generation=2 if step > 8 else 1))
    found = missing_records(path, recent, 11)
    return [(each.step, each.generation, each.rank) for each in found]


def test_records_that_died_with_rank_0_come_from_its_peers(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    write(path, range(1, 8))
    first, *others = run_ranks(3, _ask, path)
    # Step 12 is made again, and of two that made step 9 the later one counts.
    assert first == [(8, 1, 0), (9, 2, 0), (10, 1, 0), (11, 1, 0)]
    assert others == [[], []]


def test_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    assert written_steps(path) == (0, set())
    write(path, range(1, 5000))
    first, steps = written_steps(path)
    assert first > 0 and steps == set(range(first, 5000))
    recent = RecentRecords()
    for step in range(1, 2 * KEPT_RECORDS):
        recent.write(record(step))
    assert len(recent.records) == KEPT_RECORDS
