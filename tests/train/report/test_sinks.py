"""Sinks write what they are given, and their trouble does not end a run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from phalanx.train.report.records import (
    EvaluationRecord,
    StepRecord,
    ValidationRecord,
    encode,
    read_records,
    scalars,
)
from phalanx.train.report.run_folder import RunFolder, create
from phalanx.train.report.sinks import JsonLines, Sinks, TensorBoard, open_sinks
from tests.limits import file_size_limit
from tests.train.forked_runs import small_job
from tests.train.sample_records import (
    checkpoint_record,
    evaluation_record,
    step_record,
    validation_record,
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return create(small_job(tmp_path))


def full_disk() -> AbstractContextManager[None]:
    """Files cannot grow beyond one and a half records."""
    return file_size_limit(len(encode(step_record(1))) * 3 // 2)


def test_json_lines_keep_each_kind_in_its_file(folder: RunFolder) -> None:
    sinks = Sinks([JsonLines(folder)])
    sinks.write([step_record(1), step_record(2), validation_record(2), checkpoint_record(2)])
    sinks.write([evaluation_record(2)])
    assert [r.step for r in read_records(folder.steps, StepRecord)] == [1, 2]
    assert [r.loss for r in read_records(folder.validation, ValidationRecord)] == [4.5]
    (scored,) = read_records(folder.evaluation, EvaluationRecord)
    assert scored == evaluation_record(2)
    assert scalars(scored) == {"evaluation/news.perplexity": 12.5, "evaluation/arc_easy.acc": 0.25}
    sinks.close()


def test_a_full_disk_leaves_whole_lines_and_lets_training_go_on(folder: RunFolder) -> None:
    sinks = Sinks([JsonLines(folder)])
    with full_disk():
        sinks.write([step_record(1)])
        sinks.write([step_record(2)])  # crosses the limit
    assert "JsonLines" in sinks.failures
    assert folder.steps.read_bytes().endswith(b"\n")
    assert [r.step for r in read_records(folder.steps, StepRecord)] == [1]


def test_what_a_full_disk_refused_is_written_when_there_is_room(folder: RunFolder) -> None:
    sinks = Sinks([JsonLines(folder)])
    with full_disk():
        sinks.write([step_record(step) for step in range(1, 4)])
    assert "JsonLines" in sinks.failures
    sinks.write([step_record(4)])
    assert [r.step for r in read_records(folder.steps, StepRecord)] == [1, 2, 3, 4]


def test_one_broken_sink_does_not_silence_the_others(folder: RunFolder) -> None:
    broken = MagicMock(**{"write.side_effect": RuntimeError("server gone")})
    sinks = Sinks([broken, JsonLines(folder)])
    sinks.write([step_record(1)])
    sinks.write([step_record(2)])
    assert sinks.failures == {"MagicMock": "RuntimeError: server gone"}
    assert len(list(read_records(folder.steps, StepRecord))) == 2


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoard(tmp_path / "tb")
    for step in (1, 2, 300):
        sink.write(step_record(step, loss=4.0 + step))
    sink.write(validation_record(300))
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 5.0),
        (2, 6.0),
        (300, 304.0),
    ]
    assert [e.value for e in events.Scalars("validation/loss")] == [4.5]
    assert "speed/mfu" not in events.Tags()["scalars"]  # unknown is left out, not zero


def test_only_the_sinks_asked_for_are_opened(folder: RunFolder, tmp_path: Path) -> None:
    kinds = {type(s) for s in open_sinks(small_job(tmp_path, log__tensorboard="false"), folder)}
    assert kinds == {JsonLines}
