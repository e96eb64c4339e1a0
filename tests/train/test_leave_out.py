"""Batches that are never read, whatever the batch's size and whatever was left out before."""

from __future__ import annotations

import torch

from phalanx.config import Job
from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.test_batch_ramp import BATCHES, ramped


def read_by(trainer: Trainer, steps: int) -> list[list[int]]:
    """The numbers of the samples that the next steps would read; nothing is computed."""
    found, cursor = [], trainer.cursor
    for _ in range(steps):
        past = trainer.feed.advance(cursor)
        numbers = range(cursor.consumed, past.consumed)
        left_out = {n for first, end in cursor.ranges for n in range(first, end)}
        found.append([number for number in numbers if number not in left_out])
        cursor = past
    return found


def make_trainer(job: Job) -> Trainer:
    device = torch.device("cpu")
    return Trainer(job, build_mesh(job, device), device)


def _leave_out_twice() -> tuple[list[list[list[int]]], list[tuple[int, int]]]:
    """A step is left out, made again with what follows, and left out a second time."""
    trainer = make_trainer(ramped(1, {}))
    reads, ranges = [read_by(trainer, 6)], []
    known: tuple[tuple[int, int], ...] = ()
    for _ in range(2):
        left_out = trainer.leave_out(known, 3)
        ranges.append(left_out)
        known = (*known, left_out)
        reads.append(read_by(trainer, 6))
    again = make_trainer(ramped(1, {}))  # as from a checkpoint before all of that
    again.leave_out(known, 0)
    reads.append(read_by(again, 6))
    again.leave_out(known, 0)  # as from one that knows already
    reads.append(read_by(again, 6))
    trainer.close()
    again.close()
    return reads, ranges


def test_the_batch_of_a_step_is_left_out_along_a_ramp_and_after_another_one() -> None:
    (reads, ranges), *_ = run_ranks(1, _leave_out_twice)
    whole, once, twice, restored, again = reads
    assert [len(batch) for batch in whole] == BATCHES
    assert ranges == [(whole[2][0], whole[2][-1] + 1), (once[2][0], once[2][-1] + 1)]
    assert once[:2] == whole[:2] == twice[:2]
    assert once[2][0] == whole[2][-1] + 1 and twice[2][0] == once[2][-1] + 1
    assert restored == twice == again
