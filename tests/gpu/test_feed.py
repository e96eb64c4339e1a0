"""Batches for a GPU lie in page-locked memory, contiguous, and are those of the CPU."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from phalanx.config import Data
from phalanx.data import Feed, StepBatches
from phalanx.parallel import build_mesh
from phalanx.train.trainer import Trainer
from tests.data.corpora import write_corpus
from tests.parallel.test_parity import make_job

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

BUSY_CYCLES = 400_000_000  # of the device's clock: a fifth of a second or more


def moved_behind_work(batch: Tensor) -> tuple[Tensor, float, bool]:
    """Copy while the device is busy: the copy, host seconds, whether the device was still busy."""
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    began = time.perf_counter()
    there = batch.pin_memory().to("cuda", non_blocking=True)
    seconds, busy = time.perf_counter() - began, not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    return there, seconds, busy


def tensors(step: StepBatches) -> list[Tensor]:
    parts = [part for batch in step.micro_batches for part in (batch.tokens, batch.labels)]
    return [torch.from_numpy(part) for part in parts]


def test_pinned_batches_are_those_of_the_cpu() -> None:
    data = Data(sequence=64, prefetch=2)
    with (
        Feed(data, 1000, 10, 4, 1, 2, pin=True) as pinned,
        Feed(data, 1000, 10, 4, 1, 2) as plain,
    ):
        cursor = plain.start()
        for _ in range(8):  # more steps than there are buffers
            ours, theirs = pinned.next(cursor), plain.next(cursor)
            for a, b in zip(tensors(ours), tensors(theirs), strict=True):
                assert torch.equal(a, b)
                assert a.is_pinned() and a.is_contiguous()
                assert a.pin_memory().data_ptr() == a.data_ptr()  # nothing is pinned a second time
            cursor = plain.advance(cursor)


def test_copies_of_pinned_batches_do_not_wait_for_the_device(tmp_path: Path) -> None:
    write_corpus(tmp_path, 1_000_001)
    data = Data(source="shards", path=str(tmp_path), sequence=4096, prefetch=2)
    with Feed(data, 1000, 16, 8, 0, 1, pin=True) as feed:
        cursor = feed.start()
        moved_behind_work(tensors(feed.next(cursor))[0])  # the first use of the device
        for _ in range(4):
            for batch in tensors(feed.next(cursor)):  # 256 KiB: small ones never wait
                expected = batch.clone()
                there, seconds, busy = moved_behind_work(batch)
                assert busy, f"the host waited {seconds:.3f} s for the device"
                assert torch.equal(there.cpu(), expected)
            cursor = feed.advance(cursor)


def test_the_trainer_reads_pinned_batches_that_stay_while_they_are_copied(tmp_path: Path) -> None:
    write_corpus(tmp_path, 100_001, vocab=64)
    corpus = {"source": "shards", "path": str(tmp_path), "sequence": 32, "prefetch": 4}
    job = make_job(1, {"data": corpus, "train": {"steps": 8, "device": "cuda", "micro_batch": 4}})
    device = torch.device("cuda", 0)
    trainer = Trainer(job, build_mesh(job, device), device)
    reference = Feed(job.data, 64, 8, 4, 0, 1)
    seen: list[tuple[Tensor, np.ndarray]] = []  # type: ignore[type-arg]
    move = trainer.engine._to_device

    def watched(batch):  # type: ignore[no-untyped-def]
        assert torch.from_numpy(batch.tokens).is_pinned()
        assert torch.from_numpy(batch.labels).is_pinned()
        torch.cuda._sleep(BUSY_CYCLES // 50)  # the copy is still to come when the host goes on
        moved = move(batch)
        seen.append((moved[0], batch.tokens))
        return moved

    trainer.engine._to_device = watched  # type: ignore[method-assign]
    cursor = trainer.cursor
    for _ in range(8):  # more steps than there are buffers
        seen.clear()
        trainer.train_step()
        expected = [batch.tokens for batch in reference.next(cursor).micro_batches]
        for (there, _), tokens in zip(seen, expected, strict=True):
            assert np.array_equal(there.cpu().numpy(), tokens)
        cursor = reference.advance(cursor)
    trainer.close()
    reference.close()
