"""What is derived from steps: speed by world size, and against each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from phalanx.cluster.policy import PricePolicy
from phalanx.observe.gang_steps import GangStep
from phalanx.observe.node_records import PARTS
from phalanx.observe.recorder import RecordedGang, Recorder
from phalanx.observe.store import MetricStore
from tests.observe.records import SECOND_NS, step_record

TOKENS = 1024


def make(recorder: Recorder, step: int, world: int, seconds: float) -> dict[str, float]:
    """One step of a gang; returns what is known of it."""
    head = structs.replace(step_record(step), tokens=TOKENS, tokens_per_second=1.0)
    recorder.step(
        GangStep(
            job=1,
            generation=world,
            step=step,
            time_ns=step * SECOND_NS,
            first_ns=0,
            step_seconds=np.full(world, seconds, np.float32),
            compute_seconds=np.full(world, seconds / 2, np.float32),
            parts=np.full((len(PARTS), world), np.nan, np.float32),
            head=head,
        )
    )
    return {name: value or 0.0 for name, value in recorder.latest[1].items()}


def begin(recorder: Recorder, world: int) -> None:
    recorder.begin(RecordedGang(job=1, generation=world, world=world, gpus=world))


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(MetricStore(tmp_path / "m.sqlite"), PricePolicy())


def test_a_world_that_stays_scales_perfectly_whatever_its_noise(recorder: Recorder) -> None:
    begin(recorder, 4)
    for step, seconds in enumerate((1.0, 3.0, 0.5, 2.0, 1.0), start=1):
        row = make(recorder, step, 4, seconds)
        assert row["scaling_efficiency"] == 1.0
        assert row["tokens_per_second"] == pytest.approx(TOKENS / seconds)
        assert row["tokens_per_second"] == pytest.approx(4 * row["tokens_per_second_per_gpu"])


def test_a_larger_world_is_held_against_the_smallest(recorder: Recorder) -> None:
    begin(recorder, 2)
    for step in range(1, 10):
        make(recorder, step, 2, 1.0)
    begin(recorder, 4)
    for step in range(10, 20):
        row = make(recorder, step, 4, 0.625)  # 1.6 times as fast with twice the ranks
    assert row["scaling_efficiency"] == pytest.approx(0.8)
