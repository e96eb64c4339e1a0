"""The record of a run: what was appended is there, a torn end is cut off, damage is found."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.pipelines.events import (
    LookedUp,
    Output,
    RunBegan,
    TaskFailed,
    TaskFinished,
    TaskResult,
    TimePassed,
)
from phalanx.pipelines.run.record import PipelineRecord, RecordError, read_record
from tests.examples import examples

EVENTS = [
    RunBegan(1, {"name": "x", "steps": {}}, {"a": "b"}, "1", 2),
    LookedUp(2, "a"),
    TaskFinished(3, "a", TaskResult({"out": Output("store/k/out", "h")}, {"loss": 0.1})),
    TaskFailed(4, "b", "line\nbreak"),
    TimePassed(5),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("record") / "record.log"
    record = PipelineRecord(path)
    for event in EVENTS:
        record.append(event)
    record.close()
    assert read_record(path) == EVENTS
    return path.read_bytes()


@given(st.data())
@examples(60)
def test_whatever_a_crash_cut_off_the_rest_is_read_and_goes_on(
    written: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "record.log"
    path.write_bytes(written[: data.draw(st.integers(0, len(written)))])
    kept = read_record(path)
    assert kept == EVENTS[: len(kept)]
    record = PipelineRecord(path)
    record.append(TimePassed(9))
    record.close()
    assert read_record(path) == [*kept, TimePassed(9)]


@given(st.data())
@examples(60)
def test_a_changed_byte_is_never_taken_for_an_event(
    written: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("changed") / "record.log"
    place = data.draw(st.integers(0, len(written) - 1))
    value = data.draw(st.integers(0, 255).filter(lambda value: value != written[place]))
    path.write_bytes(written[:place] + bytes([value]) + written[place + 1 :])
    with suppress(RecordError):
        kept = read_record(path)
        assert kept == EVENTS[: len(kept)] and len(kept) >= len(EVENTS) - 2


def test_a_missing_line_is_found(written: bytes, tmp_path: Path) -> None:
    lines = written.splitlines(keepends=True)
    path = tmp_path / "record.log"
    path.write_bytes(b"".join([*lines[:1], *lines[2:]]))
    with pytest.raises(RecordError, match="line 2 is damaged, or one before it is missing"):
        read_record(path)
