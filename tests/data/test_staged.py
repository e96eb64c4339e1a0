"""Samples that grow longer during a run: what each step reads follows from the cursor alone."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import msgspec
import numpy as np
import pytest

from phalanx.config import BatchRamp, BlendSource, Data, Stage
from phalanx.data import Cursor, DataError, Feed, StagedFeed, StepBatches
from tests.data.corpora import write_corpus

LENGTHS, FIRSTS = (8, 16, 32), (0, 8, 12)
RAMP = BatchRamp((8, 12), (4, 2, 2))
STEPS = 6
SHAPES = [(4, 8), (4, 8), (2, 16), (2, 16), (2, 32), (2, 32)]


def feed_of(data: Data) -> StagedFeed:
    def opened(stage: int) -> Feed:
        return Feed(msgspec.structs.replace(data, sequence=LENGTHS[stage]), 64, RAMP, 1, 0, 1)

    return StagedFeed(FIRSTS, opened)


def read(feed: StagedFeed, cursor: Cursor, steps: int) -> tuple[list[StepBatches], list[Cursor]]:
    """The batches of some steps, and the cursors before each and after the last."""
    batches, cursors = [], [cursor]
    for _ in range(steps):
        batches.append(deepcopy(feed.next(cursors[-1])))  # its memory is used again
        cursors.append(feed.advance(cursors[-1]))
    feed.close()
    return batches, cursors


def tokens_of(batches: list[StepBatches]) -> list[list[list[int]]]:
    return [[row for b in step.micro_batches for row in b.tokens.tolist()] for step in batches]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_samples_are_numbered_on_while_they_grow(prefetch: int) -> None:
    feed = feed_of(Data(prefetch=prefetch))
    batches, cursors = read(feed, feed.start(), STEPS)
    assert [np.array(rows).shape for rows in tokens_of(batches)] == SHAPES
    assert [step.step_first_sample for step in batches] == [0, 4, 8, 10, 12, 14]
    assert [step.real_tokens for step in batches] == [n * length for n, length in SHAPES]
    assert cursors[-1].consumed == 16


@pytest.mark.parametrize("cut", range(STEPS))
def test_a_run_continues_from_any_cursor(cut: int) -> None:
    feed = feed_of(Data(prefetch=2))
    batches, cursors = read(feed, feed.start(), STEPS)
    again, _ = read(feed_of(Data(prefetch=0)), cursors[cut], STEPS - cut)
    assert tokens_of(again) == tokens_of(batches)[cut:]


def test_a_cursor_is_refused_where_another_length_would_be_read() -> None:
    feed = feed_of(Data(prefetch=0))
    _, cursors = read(feed, feed.start(), 3)
    plain = Feed(Data(prefetch=0, sequence=8), 64, RAMP, 1, 0, 1)
    with pytest.raises(DataError, match="sequence=16"):
        plain.next(cursors[3])


def test_a_stage_that_is_added_later_begins_where_the_run_is() -> None:
    plain = Feed(Data(prefetch=0, sequence=8), 64, RAMP, 1, 0, 1)
    cursor = plain.advance(plain.advance(plain.start()))
    feed = feed_of(Data(prefetch=0))
    again, _ = read(feed, cursor, STEPS - 2)
    whole, _ = read(feed, feed.start(), STEPS)
    assert tokens_of(again) == tokens_of(whole)[2:]


def test_shares_hold_in_every_stage() -> None:
    feed = feed_of(Data(prefetch=0))
    whole, _ = read(feed, feed.start(), STEPS)
    feed.rebalance((), padded=False)
    again, _ = read(feed, feed.start(), STEPS)
    assert tokens_of(again) == tokens_of(whole)


def test_the_blend_changes_at_the_same_samples_whatever_their_length(tmp_path: Path) -> None:
    blend = {}
    for name, weight in (("a", 1.0), ("b", 0.0)):
        write_corpus(tmp_path / name, tokens=4000, vocab=64)
        blend[name] = BlendSource(path=str(tmp_path / name), weight=weight)

    def opened(stage: int) -> Feed:
        length = LENGTHS[stage]
        stages = (Stage(tokens=10 * length, weights={"b": 1.0}),)  # as `stage_jobs` counts them
        data = Data(source="shards", blend=blend, stages=stages, sequence=length, prefetch=0)
        return Feed(data, 64, RAMP, 1, 0, 1)

    feed = StagedFeed(FIRSTS, opened)
    _, cursors = read(feed, feed.start(), STEPS)
    assert [feed.seen(cursor) for cursor in cursors[2:5]] == [
        {"a": 8, "b": 0},
        {"a": 10, "b": 0},
        {"a": 10, "b": 2},
    ]
