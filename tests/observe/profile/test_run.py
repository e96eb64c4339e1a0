"""Jobs that really run on CPU with causes planted in them; their profiles name these."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from phalanx.config import Data, Job
from phalanx.observe.profile.advice import Advice, SlowCause
from phalanx.observe.profile.advise import advise
from phalanx.observe.profile.profile import JobProfile
from phalanx.train.callback import Callback, TrainingRun
from phalanx.train.profile.facts import DeviceRates
from phalanx.train.profile.recorder import WARM_STEPS, ProfileRecorder, warm_steps
from phalanx.train.trainer import StepOutcome
from tests.data.corpora import write_corpus
from tests.observe.profile.profiled import SlowCorpus, profiled
from tests.train.forked_runs import small_job

SHAPE = {"model__dim": 64, "model__ffn": 256, "data__sequence": 32, "log__every": 100}
GOOD = {**SHAPE, "train__global_batch": 8, "train__micro_batch": 8}
PLANTED = {
    **SHAPE,
    "train__global_batch": 16,
    "train__micro_batch": 1,
    "memory__recompute": '"full"',
    "parallel__zero": 0,
    "parallel__ddp_bucket_mb": 0.001,
}
TENSOR_CORES = DeviceRates({"float32": 1e10, "bfloat16": 4e10}, 1e10)  # played: CPUs differ in it


class ReadsLoss(Callback):
    """Reads a device's value in every step, as code of one's own easily does."""

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        outcome.loss.item()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> JobProfile:
    """Two ranks with four causes at once, and a callback that reads values."""
    folder = tmp_path_factory.mktemp("planted")
    job = small_job(folder, 2, **PLANTED)
    return profiled(job, 2, folder / "out", ProfileRecorder(4, 1), [ReadsLoss()])


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> JobProfile:
    """One rank whose corpus is slow."""
    folder = tmp_path_factory.mktemp("slow")
    write_corpus(folder / "corpus", 20_000, vocab=64)
    corpus = {"data__source": '"shards"', "data__path": f'"{folder / "corpus"}"'}
    job = small_job(folder, 1, **GOOD, **corpus)
    recorder = ProfileRecorder(4, 1, warm=warm_steps(job.data))
    return profiled(job, 1, folder / "out", recorder, [SlowCorpus(0.4)])


def named(profile: JobProfile) -> dict[SlowCause, Advice]:
    return {advice.cause: advice for advice in advise(profile)}


def test_a_slow_corpus_is_named_by_the_comparison_with_synthetic_data(slow: JobProfile) -> None:
    assert slow.synthetic is not None
    advice = named(slow)[SlowCause.SLOW_LOADER]
    assert slow.times.median_seconds > slow.synthetic.median_seconds
    assert advice.gain > 0.1
    assert slow.share("data wait") > 0.1  # while the trace started, the loader read ahead


def test_what_was_not_planted_is_not_named(slow: JobProfile) -> None:
    assert named(slow).keys() <= {SlowCause.SLOW_LOADER, SlowCause.FP32_MATMUL}
    assert slow.recomputed_seconds == 0.0


def test_recompute_is_named_with_its_share(planted: JobProfile) -> None:
    advice = named(planted)[SlowCause.RECOMPUTE]
    assert (advice.setting, advice.value) == ("memory.recompute", "none")
    assert planted.recomputed_seconds / planted.traced_seconds == pytest.approx(advice.gain)


def test_small_micro_batches_are_named(planted: JobProfile) -> None:
    advice = named(planted)[SlowCause.SMALL_MICRO_BATCH]
    assert (advice.setting, advice.value) == ("train.micro_batch", "8")


def test_tiny_buckets_are_named(planted: JobProfile) -> None:
    """Counted for real; how long they took is played, since on a busy machine all else is slow."""
    assert {row.axis for row in planted.axes} == {"data"}
    (sums,) = (row for row in planted.axes if "reduce" in row.collective)
    assert sums.calls > 4 and sums.bytes / sums.calls < 1e6 and sums.seconds > 0
    costly = structs.replace(sums, seconds=0.1 * planted.traced_seconds)
    advice = named(structs.replace(planted, axes=[costly]))[SlowCause.TINY_BUCKETS]
    assert advice.setting == "parallel.ddp_bucket_mb"


def test_products_in_fp32_are_named_where_16_bits_are_faster(planted: JobProfile) -> None:
    assert planted.matmul_formats.keys() == {"float32"}
    found = named(structs.replace(planted, rates=TENSOR_CORES))[SlowCause.FP32_MATMUL]
    share = planted.matmul_formats["float32"] / planted.traced_seconds
    assert found.gain == pytest.approx(0.75 * share)


def test_reads_are_located_in_the_code(planted: JobProfile) -> None:
    """On CPU they wait for nothing: they are told and not advised against."""
    places = [sync.where for sync in planted.syncs]
    assert any("test_run.py" in where and "after_step" in where for where in places), places
    assert SlowCause.HOST_SYNC not in named(planted)


def test_a_profile_says_what_the_step_is_made_of(planted: JobProfile) -> None:
    job = small_job(Path("runs"), 2, **PLANTED)
    assert sum(planted.kinds.values()) == pytest.approx(planted.traced_seconds, rel=1e-6)
    assert {"forward", "backward", "optimizer", "data"} <= planted.phases.keys()
    assert planted.memory.state["gradients"] > 0
    assert planted.memory_line and planted.rates.memory_bytes_per_second > 0
    assert planted.world_size == 2 and planted.times.steps == 4
    assert planted.origin.torch
    assert isinstance(job, Job) and planted.job["train"]["micro_batch"] == job.train.micro_batch
    products = [kernel for kernel in planted.kernels if kernel.kind == "matmul"]
    assert products and all(kernel.flops and kernel.roof(planted.rates) for kernel in products)


def test_steps_that_were_read_ahead_are_not_timed() -> None:
    """The first step takes seconds on a device: what a slow loader reads meanwhile waits."""
    corpus, synthetic = Data(source="shards", prefetch=6), Data(prefetch=6)
    first = [ProfileRecorder(4, 1, warm=warm_steps(data)).first - 4 for data in (corpus, synthetic)]
    assert first == [WARM_STEPS + 6 + 2, WARM_STEPS + 1]
