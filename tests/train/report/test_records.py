"""Records survive the way to disk and back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from phalanx.train.report.records import (
    CheckpointRecord,
    Record,
    StepRecord,
    ValidationRecord,
    decode,
    encode,
    read_records,
)
from tests.train.sample_records import checkpoint_record, step_record, validation_record


@pytest.mark.parametrize(
    "record",
    [
        step_record(7),
        step_record(8, loss=None, grad_norm=None, non_finite=True, skipped=True),
        step_record(9, loss=1.0000001192092896, estimated=("forward", "backward")),
        validation_record(7),
        checkpoint_record(7),
    ],
)
def test_a_record_is_the_same_after_encoding_and_decoding(record: Record) -> None:
    assert decode(encode(record)) == record


def test_a_record_has_every_field_of_the_contract() -> None:
    fields = msgspec.to_builtins(step_record(1))
    contract = {
        "job", "generation", "rank", "step", "first_sample", "samples", "tokens", "loss",
        "grad_norm", "learning_rate", "step_seconds", "parts", "estimated", "peak_memory_bytes",
        "skipped", "non_finite",
    }  # fmt: skip
    assert contract <= fields.keys()
    assert {"data", "forward", "backward", "optimizer", "snapshot"} <= fields["parts"].keys()


def test_a_half_written_last_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    whole = encode(step_record(1)) + encode(step_record(2))
    path.write_bytes(whole + encode(step_record(3))[:40])
    assert [record.step for record in read_records(path, StepRecord)] == [1, 2]


def test_a_corrupt_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_bytes(encode(step_record(1))[:40] + b"\n" + encode(step_record(2)))
    with pytest.raises(msgspec.DecodeError):
        list(read_records(path, StepRecord))


def test_records_of_another_kind_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_bytes(b"".join(map(encode, (step_record(1), validation_record(1)))))
    assert [r.step for r in read_records(path, ValidationRecord)] == [1]
    assert not list(read_records(path, CheckpointRecord))
