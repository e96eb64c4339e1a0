"""What is derived from steps: speed by world size, and against each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from phalanx.cluster.policy import PricePolicy
from phalanx.observe.node.node_records import PARTS
from phalanx.observe.node.printed_steps import PrintedStep
from phalanx.observe.node.printed_steps import step_record as printed_record
from phalanx.observe.store.gang_steps import GangStep
from phalanx.observe.store.metric_store import MetricStore
from phalanx.observe.store.query import series
from phalanx.observe.store.recorder import JOB_TABLES, RecordedGang, Recorder, owner_of
from phalanx.train.report.records import (
    CheckpointRecord,
    EvaluationRecord,
    StepRecord,
    ValidationRecord,
)
from tests.observe.records import SECOND_NS, step_record

TOKENS = 1024


def make(
    recorder: Recorder, step: int, world: int, seconds: float, head: StepRecord | None = None
) -> dict[str, float]:
    """One step of a gang; returns what is known of it."""
    trained = structs.replace(step_record(step), tokens=TOKENS, tokens_per_second=1.0)
    recorder.step(
        GangStep(
            job=1,
            generation=world,
            step=step,
            time_ns=step * SECOND_NS,
            first_ns=0,
            step_seconds=np.full(world, seconds, np.float32),
            compute_seconds=np.full(world, seconds / 2, np.float32),
            parts=np.full((len(PARTS), world), np.nan if head is None else 0.0, np.float32),
            host_seconds=np.full(world, np.nan, np.float32),
            launch_seconds=np.full(world, np.nan, np.float32),
            send_seconds=np.full(world, np.nan, np.float32),
            head=head or trained,
        )
    )
    return {name: value or 0.0 for name, value in recorder.latest[1].items()}


def begin(recorder: Recorder, world: int) -> None:
    recorder.begin(RecordedGang(job=1, generation=world, world=world, gpus=world))


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(MetricStore(tmp_path / "m.sqlite"), PricePolicy())


def test_a_validation_and_a_checkpoint_of_one_step_are_both_kept(recorder: Recorder) -> None:
    begin(recorder, 2)
    common: dict[str, Any] = {"job": "j", "generation": 2}
    for step in (1, 2, 3, 4):
        make(recorder, step, 2, 1.0)
        if step % 2 == 0:
            validation = ValidationRecord(step=step, loss=5.0 - step, seconds=0.1, **common)
            checkpoint = CheckpointRecord(step=step, path="p", seconds=0.5, **common)
            recorder.other(1, validation, step * SECOND_NS + 1)
            recorder.other(1, checkpoint, step * SECOND_NS + 2)
    recorder.store.flush()
    names = ["validation_loss", "checkpoint_seconds", "loss"]
    found = series(recorder.store, owner_of(1), JOB_TABLES, names, (0, 10 * SECOND_NS), 100).series
    validated, saved = found["validation_loss"], found["checkpoint_seconds"]
    assert (validated.step, validated.value) == ([2, 4], [3.0, 1.0])
    assert (saved.step, saved.value) == ([2, 4], [0.5, 0.5])
    assert found["loss"].step == [1, 2, 3, 4]


def test_scores_are_kept_by_name_also_when_others_join_them(recorder: Recorder) -> None:
    begin(recorder, 2)
    common: dict[str, Any] = {"job": "j", "generation": 2, "seconds": 1.0}
    told = {"arc.acc": 0.25, "bad name,": 1.0, "news.perplexity": float("inf")}
    recorder.other(1, EvaluationRecord(step=2, scores=told, **common), SECOND_NS)
    more = {"arc.acc": 0.5, "gsm8k.exact_match@strict-match": 0.125}
    recorder.other(1, EvaluationRecord(step=4, scores=more, **common), 2 * SECOND_NS)
    recorder.other(1, EvaluationRecord(step=6, scores={}, **common), 3 * SECOND_NS)
    recorder.store.flush()
    names = [*told, *more]
    found = series(recorder.store, owner_of(1), JOB_TABLES, names, (0, 10 * SECOND_NS), 100).series
    assert (found["arc.acc"].step, found["arc.acc"].value) == ([2, 4], [0.25, 0.5])
    assert set(found) == set(more)


def test_the_newest_validation_stays_in_view_while_steps_go_on(recorder: Recorder) -> None:
    begin(recorder, 2)
    make(recorder, 1, 2, 1.0)
    record = ValidationRecord(job="j", generation=2, step=1, loss=4.5, seconds=0.1)
    recorder.other(1, record, SECOND_NS)
    assert recorder.latest[1]["validation_loss"] == 4.5
    row = make(recorder, 2, 2, 1.0)
    assert (row["step"], row["validation_step"], row["validation_loss"]) == (2, 1, 4.5)


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


def test_what_a_program_does_not_say_is_no_zero(recorder: Recorder) -> None:
    recorder.begin(RecordedGang(job=1, generation=1, world=1, gpus=0, program=True))
    printed = printed_record(PrintedStep(7, loss=2.5), 1, 1, 0, 0.5)
    said = {name for name, value in make(recorder, 7, 1, 0.5, printed).items() if value}
    own = {"own_seconds_middle", "own_seconds_most"}
    assert said == {"step", "time", "loss", "step_seconds", "world_size", "generation", *own}
    assert recorder.latest[1].keys() == said
