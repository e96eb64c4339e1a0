"""Eight causes planted in jobs on a GPU: each profile names its own.

Some share a run. One GPU has one rank: tiny buckets are planted in ranks on CPU beside it, and the
power cap is played, as a driver would tell it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import Job, job_from_table, resolve
from phalanx.hardware import count_cuda
from phalanx.observe.profile.advice import SlowCause
from phalanx.observe.profile.advise import advise
from phalanx.observe.profile.profile import JobProfile
from phalanx.train.callback import Callback, TrainingRun
from phalanx.train.profile.facts import PowerReading
from phalanx.train.profile.power import DriverQuestion, parse_power
from phalanx.train.profile.recorder import ProfileRecorder, warm_steps
from phalanx.train.trainer import StepOutcome
from tests.data.corpora import write_corpus
from tests.observe.profile.profiled import SlowCorpus, profiled
from tests.observe.profile.test_rules import CAPPED

# Not torch.cuda: whoever forks ranks must not have asked it.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(count_cuda() == 0, reason="needs a CUDA device"),
]

TABLE: dict[str, Any] = {
    "name": "planted",
    "model": {"dim": 1024, "layers": 4, "heads": 8, "ffn": 4096, "vocab": 8192},
    "data": {"sequence": 2048},
    "train": {"steps": 10, "global_batch": 8, "micro_batch": 8, "device": "cuda"},
    "log": {"every": 100},
}


class ReadsLoss(Callback):
    """Waits for the device in every step, and then takes its time."""

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        for _ in range(2000):
            outcome.loss.item()


class Fragments(Callback):
    """Leaves the allocator with holes that no later tensor fits into."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def begin(self, run: TrainingRun) -> None:
        pieces = [torch.empty(24 << 20, dtype=torch.uint8, device="cuda") for _ in range(1600)]
        self._kept = pieces[::16]


class CappedCard:
    """A card whose power limit somebody halved."""

    def __init__(self, index: int) -> None:
        pass

    def answer(self) -> PowerReading | None:
        return parse_power(CAPPED)


def planted_job(folder: Path, ranks: int = 1, **settings: object) -> Job:
    given = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return resolve(job_from_table({**TABLE, "runs": str(folder)}, given), ranks)


def causes(profile: JobProfile) -> set[SlowCause]:
    return {advice.cause for advice in advise(profile)}


def profile_of(
    folder: Path, job: Job, *callbacks: Callback, ranks: int = 1, capped: bool = False
) -> JobProfile:
    ask = CappedCard if capped else DriverQuestion
    recorder = ProfileRecorder(4, 1, ask, warm_steps(job.data))
    return profiled(job, ranks, folder / "out", recorder, callbacks)


def test_a_healthy_job_and_a_power_cap(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, planted_job(tmp_path), capped=True)
    assert causes(profile) == {SlowCause.POWER_CAP}


def test_a_slow_loader(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", 400_000, vocab=8192)
    corpus = {"data__source": '"shards"', "data__path": f'"{tmp_path / "corpus"}"'}
    profile = profile_of(tmp_path, planted_job(tmp_path, **corpus), SlowCorpus(0.3))
    assert SlowCause.SLOW_LOADER in causes(profile)


def test_a_host_sync_in_the_loop(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, planted_job(tmp_path), ReadsLoss())
    assert SlowCause.HOST_SYNC in causes(profile)
    assert any("test_profile.py" in sync.where for sync in profile.syncs)


def test_fp32_products_and_too_much_recompute(tmp_path: Path) -> None:
    settings = {"precision__compute": '"float32"', "memory__recompute": '"full"'}
    profile = profile_of(tmp_path, planted_job(tmp_path, **settings))
    assert {SlowCause.FP32_MATMUL, SlowCause.RECOMPUTE} <= causes(profile)


def test_a_small_micro_batch(tmp_path: Path) -> None:
    small = {"train__micro_batch": 1, "train__global_batch": 16, "data__sequence": 256}
    profile = profile_of(tmp_path, planted_job(tmp_path, **small))
    assert SlowCause.SMALL_MICRO_BATCH in causes(profile)


def test_fragmentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PYTORCH_ALLOC_CONF", "expandable_segments:False")
    profile = profile_of(tmp_path, planted_job(tmp_path), Fragments())
    assert SlowCause.FRAGMENTATION in causes(profile)


def test_tiny_buckets(tmp_path: Path) -> None:
    small = {"model__dim": 64, "model__layers": 2, "model__ffn": 256, "data__sequence": 32}
    ddp = {"parallel__zero": 0, "parallel__ddp_bucket_mb": 0.001, "train__device": '"cpu"'}
    profile = profile_of(tmp_path, planted_job(tmp_path, 2, **small, **ddp), ranks=2)
    assert SlowCause.TINY_BUCKETS in causes(profile)
