"""What a run reads depends on nothing but its settings: not on ranks, cuts or resumes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Literal

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phalanx.config import BatchRamp, BlendSource, Data, Stage
from phalanx.data import Cursor, DataError, SampleReader
from phalanx.data.feed import StepReader, step_buffers
from phalanx.data.order.draws import SampleDraws
from tests.data.corpora import CountingSource, real_samples

DP_SIZES = (1, 2, 3, 4, 6, 8, 16, 64, 780, 781)
SOURCES = {"web": CountingSource(97), "code": CountingSource(41), "tiny": CountingSource(1)}
BATCH = 23

CURRICULUM = Data(
    sequence=2,
    prefetch=0,
    source="shards",
    blend={
        "web": BlendSource(path="a", weight=0.6),
        "code": BlendSource(path="b", weight=0.37),
        "tiny": BlendSource(path="c", weight=0.03),
    },
    stages=(
        Stage(tokens=2 * 150, weights={"web": 0.2, "code": 0.8}),
        Stage(tokens=2 * 301, weights={"tiny": 0.1, "code": 0.9}),
    ),
)
BLOCKED = msgspec.structs.replace(CURRICULUM, shuffle="blocked", block_tokens=10, window_blocks=3)
EITHER = pytest.mark.parametrize("data", [CURRICULUM, BLOCKED], ids=["global", "blocked"])


class Numbered(CountingSource):
    """A counting source whose samples tell which source they are from."""

    def __init__(self, samples: int, base: int) -> None:
        super().__init__(samples)
        self._base = base

    def read(self, indices: Sequence[int], rows: Iterable[NDArray[np.int64]]) -> None:
        rows = list(rows)
        super().read(indices, rows)
        for row in rows:
            row += self._base


def open_reader(data: Data, monkeypatch: pytest.MonkeyPatch) -> SampleReader:
    sources = {
        name: Numbered(source.samples, 1000 * number)
        for number, (name, source) in enumerate(SOURCES.items())
    }
    monkeypatch.setattr("phalanx.data.reader.open_sources", lambda *_: sources)
    return SampleReader(data, 1 << 30)


def step_of_all(
    reader: SampleReader,
    data: Data,
    cursor: Cursor,
    count: int,
    batch: int | BatchRamp = BATCH,
    micro_batch: int = 1,
) -> list[int]:
    """Samples of one step, gathered over replicas in their order."""
    found = []
    for index in range(count):
        steps = StepReader(data, reader, batch, micro_batch, index, count, "train")
        buffer = next(step_buffers(0, steps.most_rows, data.sequence, pin=False))
        found += real_samples(steps.step(cursor, buffer))
    return found


@EITHER
def test_every_number_of_ranks_reads_the_same_global_batches(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_reader(data, monkeypatch)
    steps = StepReader(data, reader, BATCH, 1, 0, 1, "train")
    cursor = Cursor(0, (), reader.draws.fingerprint(0))
    whole = reader.batch(0, 20 * BATCH)[:, 0].tolist()
    for step in range(20):
        expected = whole[step * BATCH : (step + 1) * BATCH]
        sizes = DP_SIZES if step in (0, 6, 13) else DP_SIZES[:7]  # 6 and 13 hold stage edges
        for count in sizes:
            assert step_of_all(reader, data, cursor, count) == expected
        cursor = steps.advance(cursor)


@EITHER
def test_batch_gives_ranks_contiguous_shares_of_any_range(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_reader(data, monkeypatch)
    for first, count in ((0, 64), (131, 50), (7, 781), (290, 13)):  # whatever the ramp makes it
        whole = reader.batch(first, count)
        for size in DP_SIZES:
            shares = [reader.batch(first, count, rank, size) for rank in range(size)]
            assert np.array_equal(np.concatenate(shares), whole)
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


@EITHER
@pytest.mark.parametrize("seed", range(6))
def test_a_run_cut_and_resumed_at_other_sizes_reads_the_uncut_sequence(
    data: Data, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    uncut = open_reader(data, monkeypatch).batch(0, 30 * BATCH)[:, 0].tolist()
    read: list[int] = []
    saved = msgspec.json.encode(Cursor(0, (), SampleDraws(data, "train", SOURCES).fingerprint(0)))
    while len(read) < 30 * BATCH:
        reader = open_reader(data, monkeypatch)  # a new process knows only the cursor
        cursor = msgspec.json.decode(saved, type=Cursor)
        count = chance.choice(DP_SIZES[:7])
        steps = StepReader(data, reader, BATCH, 1, 0, count, "train")
        for _ in range(min(chance.randint(1, 7), 30 - len(read) // BATCH)):
            read += step_of_all(reader, data, cursor, count)
            cursor = steps.advance(cursor)
        saved = msgspec.json.encode(cursor)
    assert read == uncut


RAMP = BatchRamp(edges=(40, 41, 290), batches=(9, 5, 23, 70))  # the second stage is stepped over


def test_a_ramp_counts_samples_as_steps_do() -> None:
    read, sizes = 0, []
    for step in range(40):
        assert RAMP.samples(step) == read
        sizes.append(RAMP.at(read))
        read += sizes[-1]
    assert sizes[:17] == [9] * 5 + [23] * 11 + [70]
    assert RAMP.largest == 70


@EITHER
@pytest.mark.parametrize("seed", range(4))
def test_a_ramped_run_cut_and_resumed_at_other_sizes_reads_the_uncut_sequence(
    data: Data, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    total, steps_made = 22, 0
    uncut = open_reader(data, monkeypatch).batch(0, RAMP.samples(total))[:, 0].tolist()
    read: list[int] = []
    saved = msgspec.json.encode(Cursor(0, (), SampleDraws(data, "train", SOURCES).fingerprint(0)))
    while steps_made < total:
        reader = open_reader(data, monkeypatch)  # a new process knows only the cursor
        cursor = msgspec.json.decode(saved, type=Cursor)
        count, micro_batch = chance.choice(DP_SIZES[:7]), chance.choice((1, 2, 3))
        steps = StepReader(data, reader, RAMP, micro_batch, 0, count, "train")
        for _ in range(min(chance.randint(1, 4), total - steps_made)):
            step = step_of_all(reader, data, cursor, count, RAMP, micro_batch)
            assert len(step) == RAMP.at(len(read))
            read += step
            cursor = steps.advance(cursor)
            steps_made += 1
        saved = msgspec.json.encode(cursor)
    assert read == uncut


def test_the_edges_of_a_ramp_count_what_was_read_not_what_was_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = open_reader(CURRICULUM, monkeypatch)
    cursor = Cursor(36, (), reader.draws.fingerprint(36)).skip(36, 300)
    steps = StepReader(CURRICULUM, reader, RAMP, 1, 0, 1, "train")
    sizes = []
    for _ in range(3):
        sizes.append(len(step_of_all(reader, CURRICULUM, cursor, 2, RAMP)))
        cursor = steps.advance(cursor)
    assert sizes == [9, 23, 23] and cursor.seen == RAMP.samples(7)


@EITHER
def test_each_source_is_drawn_epoch_by_epoch_through_all_stages(
    data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_reader(data, monkeypatch)
    drawn = reader.batch(0, 2000)[:, 0]
    for number, source in enumerate(SOURCES.values()):
        own = drawn[drawn // 1000 == number] % 1000
        whole = len(own) // source.samples * source.samples
        for epoch in own[:whole].reshape(-1, source.samples):
            assert sorted(epoch.tolist()) == list(range(source.samples))
    assert (drawn[150:301] < 2000).all() and (drawn[301:] >= 1000).all()  # weights 0 in stages


@given(
    consumed=st.integers(0, 3000),
    skips=st.lists(st.tuples(st.integers(0, 3500), st.integers(1, 300)), max_size=4),
)
@settings(max_examples=60, deadline=None)
def test_samples_seen_of_each_source_follow_from_the_cursor(
    consumed: int, skips: list[tuple[int, int]]
) -> None:
    draws = SampleDraws(CURRICULUM, "train", SOURCES)
    cursor = Cursor(consumed)
    for first, length in skips:
        cursor = cursor.skip(first, first + length)
    skipped = {number for first, past in cursor.ranges for number in range(first, past)}
    read = np.array([number for number in range(consumed) if number not in skipped], np.int64)
    which = draws.locate(read)[0] if len(read) else read
    expected = {name: int((which == at).sum()) for at, name in enumerate(SOURCES)}
    assert draws.seen(cursor) == expected
    assert sum(expected.values()) == cursor.seen


def test_samples_skipped_after_a_rollback_are_never_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = open_reader(CURRICULUM, monkeypatch)
    whole = reader.batch(0, 400)[:, 0].tolist()
    cursor = Cursor(92, (), reader.draws.fingerprint(92)).skip(100, 146).skip(150, 160)
    expected = [*range(92, 100), *range(146, 150), *range(160, 171)]
    read = step_of_all(reader, CURRICULUM, cursor, 3)
    assert read == [whole[number] for number in expected]


def test_what_lies_ahead_may_change_and_what_was_read_may_not() -> None:
    def fingerprint(data: Data, consumed: int) -> str:
        return SampleDraws(data, "train", SOURCES).fingerprint(consumed)

    first, second = CURRICULUM.stages
    other = msgspec.structs.replace(
        CURRICULUM, stages=(first, Stage(tokens=second.tokens, weights={"web": 1.0}))
    )
    assert fingerprint(CURRICULUM, 301) == fingerprint(other, 301)
    assert fingerprint(CURRICULUM, 302) != fingerprint(other, 302)
    for change in ({"seed": 1}, {"sequence": 3}, {"shuffle": "blocked"}):
        changed = msgspec.structs.replace(CURRICULUM, **change)
        assert fingerprint(changed, 0) != fingerprint(CURRICULUM, 0)
    grown = {**SOURCES, "web": CountingSource(98)}
    grown["web"].fingerprint = "counting, grown"
    assert SampleDraws(CURRICULUM, "train", grown).fingerprint(0) != fingerprint(CURRICULUM, 0)


def test_going_on_with_other_data_needs_to_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = open_reader(BLOCKED, monkeypatch)
    foreign = Cursor(46, (), SampleDraws(CURRICULUM, "train", SOURCES).fingerprint(46))
    with pytest.raises(DataError, match=r"shuffle=global.*shuffle=blocked:10:3.*allow_other_data"):
        step_of_all(reader, BLOCKED, foreign, 1)
    allowed = msgspec.structs.replace(BLOCKED, allow_other_data=True)
    assert step_of_all(reader, allowed, foreign, 1) == reader.batch(46, BATCH)[:, 0].tolist()
    after = StepReader(allowed, reader, BATCH, 1, 0, 1, "train").advance(foreign)
    assert after.fingerprint == reader.draws.fingerprint(after.consumed)


def test_the_cursor_of_a_long_run_with_many_rollbacks_stays_below_256_bytes() -> None:
    data = msgspec.structs.replace(
        BLOCKED, seed=2**63 - 1, sequence=131072, block_tokens=1 << 25, window_blocks=128
    )
    draws = SampleDraws(data, "train", SOURCES)
    cursor = Cursor(0, (), draws.fingerprint(10**17))
    chance = random.Random(0)
    skipped = 0
    for made in range(1, 300):  # after a spike the run goes back and on without it
        cursor = cursor.advance(chance.randrange(1, 10 ** chance.randrange(2, 17)))
        length = chance.randrange(1, 10**6)
        cursor = cursor.skip(cursor.consumed, cursor.consumed + length)
        skipped += length
        assert len(msgspec.json.encode(cursor)) <= 256
        assert len(cursor.ranges) >= min(made, 3)  # those that matter are known one by one
        read = cursor.advance(1)
        assert read.seen == read.consumed - skipped
        assert sum(draws.seen(read).values()) == read.seen


@pytest.mark.parametrize("shuffle", ["global", "blocked"])
def test_sources_of_a_blend_and_splits_are_shuffled_apart(
    shuffle: Literal["global", "blocked"],
) -> None:
    blend = {name: BlendSource(path=name, weight=1) for name in ("one", "two")}
    data = Data(source="shards", blend=blend, sequence=8, shuffle=shuffle, block_tokens=64)
    alike = dict.fromkeys(blend, CountingSource(500))
    orders = []
    for split in ("train", "validation"):
        which, indices = SampleDraws(data, split, alike).locate(np.arange(1000))
        orders += [indices[which == source] for source in (0, 1)]
    for one, other in combinations(orders, 2):
        assert np.mean(one == other) < 0.1
