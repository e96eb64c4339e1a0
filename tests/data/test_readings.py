"""What ``data order`` says a rank reads is what its feed reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phalanx.config import BatchRamp, BlendSource, Data, constant_batch
from phalanx.data import DataError, Feed, SampleReader
from phalanx.data.order.cursor import Cursor
from phalanx.data.readings import step_cursor, step_readings
from tests.data.corpora import write_corpus

RAMP = BatchRamp(edges=(20,), batches=(7, 9))


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("skipped", [(), ((7, 23),)])
def test_the_readings_of_a_step_are_what_every_replica_gets(
    tmp_path: Path, replicas: int, skipped: tuple[tuple[int, int], ...]
) -> None:
    tokens = {
        name: write_corpus(tmp_path / name, count, file_bytes=150)
        for name, count in (("web", 161), ("code", 81))
    }
    blend = {name: BlendSource(path=str(tmp_path / name)) for name in tokens}
    data = Data(source="shards", blend=blend, sequence=8, prefetch=0)
    reader = SampleReader(data, vocab=1000)
    for step in (1, 2, 9):
        cursor = step_cursor(step, RAMP, Cursor(0, skipped))
        size = RAMP.at(RAMP.samples(step - 1))
        readings = list(step_readings(reader, cursor, RAMP, 2, replicas))
        assert sorted(reading.sample for reading in readings) == list(cursor.upcoming(0, size))
        for replica in range(replicas):
            feed = Feed(data, 1000, RAMP, 2, replica, replicas)
            at = Cursor(cursor.consumed, skipped, reader.draws.fingerprint(cursor.consumed))
            batches = feed.next(at).micro_batches
            own = [reading for reading in readings if reading.replica == replica]
            real = sum(int((batch.labels >= 0).all(axis=1).sum()) for batch in batches)
            assert len(own) == real
            for reading in own:
                row = batches[reading.micro_batch].tokens[reading.row]
                first = reading.index * 8
                assert np.array_equal(row, tokens[reading.source][first : first + 8])
                number = int(reading.file.removeprefix("shard-").removesuffix(".bin"))
                assert number * 75 + reading.token == first
        drawn, _ = reader.locate(
            range(cursor.advance(size).consumed)
        )  # of each source, over the whole run
        for reading in readings:
            before = drawn[: reading.sample].count(list(tokens).index(reading.source))
            assert reading.epoch == before // ((len(tokens[reading.source]) - 1) // 8)


def test_steps_are_counted_from_one() -> None:
    batch = constant_batch(8)
    assert step_cursor(1, batch).consumed == 0 and step_cursor(3, batch).consumed == 16
    assert step_cursor(3, batch, Cursor(99, ((10, 20),))).consumed == 26
    with pytest.raises(ValueError, match="counted from 1"):
        step_cursor(0, batch)


def test_steps_before_what_a_cursor_remembers_are_refused() -> None:
    batch = constant_batch(10**6)
    cursor, place = Cursor(), {}
    for step in range(1, 200):
        place[step] = cursor.consumed
        cursor = cursor.advance(10**6)
        if step % 4 == 0:
            cursor = cursor.skip(cursor.consumed, cursor.consumed + 10**6)
    for step in (190, 197, 199):
        assert step_cursor(step, batch, cursor).consumed == place[step]
    with pytest.raises(DataError, match="older checkpoint"):
        step_cursor(8, batch, cursor)
