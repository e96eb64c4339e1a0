"""Batches are a pure function of the cursor, whatever the replicas, resumes and threads."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data import Cursor, DataError, DataExhausted, Feed
from tests.data.corpora import CountingSource, counting_feed, real_samples, same_batches, stream


def union(
    samples: int, global_batch: int, micro_batch: int, count: int, steps: int
) -> list[list[int]]:
    """Samples of each step, gathered over all replicas in their order."""
    feeds = [counting_feed(samples, global_batch, micro_batch, i, count) for i in range(count)]
    replicas = [stream(feed, feed.start(), steps) for feed in feeds]
    return [[sample for replica in replicas for sample in replica[step]] for step in range(steps)]


@given(
    count=st.integers(1, 12),
    global_batch=st.integers(1, 40),
    micro_batch=st.integers(1, 5),
    samples=st.integers(1, 60),
)
@settings(max_examples=150, deadline=None)
def test_the_union_over_replicas_is_the_global_batch(
    count: int, global_batch: int, micro_batch: int, samples: int
) -> None:
    alone = union(samples, global_batch, 1, 1, steps=3)
    assert union(samples, global_batch, micro_batch, count, steps=3) == alone
    assert all(len(step) == global_batch for step in alone)


def test_three_replicas_share_a_batch_of_eight() -> None:
    feeds = [counting_feed(100, 8, 1, index, 3) for index in range(3)]
    steps = [feed.next(feed.start()) for feed in feeds]
    assert [len(step.micro_batches) for step in steps] == [3, 3, 3]
    assert [step.real_tokens for step in steps] == [6, 6, 4]
    assert {(step.step_first_sample, step.samples) for step in steps} == {(0, 8)}
    padding = steps[2].micro_batches[2]
    assert (padding.tokens == 0).all() and (padding.labels == -100).all()
    gathered = [sample for step in steps for sample in real_samples(step)]
    assert [gathered] == union(100, 8, 1, 1, steps=1)


@pytest.mark.parametrize("padded", [False, True])
def test_unequal_shares_make_the_same_batch(padded: bool) -> None:
    shares = (3, 1, 2)
    feeds = [counting_feed(100, 12, 2, index, 3) for index in range(3)]
    alone = union(100, 12, 1, 1, steps=2)
    for feed in feeds:
        feed.next(feed.start())
        feed.rebalance(shares, padded=padded)
    steps = [feed.next(feed.advance(feed.start())) for feed in feeds]
    assert [sample for step in steps for sample in real_samples(step)] == alone[1]
    counts = [len(step.micro_batches) for step in steps]
    assert counts == ([3, 3, 3] if padded else [3, 1, 2])
    if padded:  # what only keeps others company is small and has no weight
        padding = steps[1].micro_batches[-1]
        assert padding.tokens.shape[0] == 1 and (padding.labels == -100).all()
    for feed in feeds:
        feed.rebalance((), padded=True)
    steps = [feed.next(feed.start()) for feed in feeds]
    assert [len(step.micro_batches) for step in steps] == [2, 2, 2]


def test_real_tokens_counts_the_labels_that_carry_weight() -> None:
    for index in range(5):
        step = counting_feed(100, 13, 2, index, 5).next(counting_feed(100, 13, 2, index, 5).start())
        weighted = sum(int((batch.labels != -100).sum()) for batch in step.micro_batches)
        assert step.real_tokens == weighted


def test_an_epoch_gives_every_sample_once_and_the_next_another_order() -> None:
    feed = counting_feed(samples=24, global_batch=6)
    steps = stream(feed, feed.start(), steps=8)
    first, second = sum(steps[:4], []), sum(steps[4:], [])  # noqa: RUF017  (eight short lists)
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


def test_a_batch_may_reach_over_an_epoch_edge() -> None:
    feed = counting_feed(samples=10, global_batch=4)
    read = [sample for step in stream(feed, feed.start(), 5) for sample in step]
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))


@given(cut=st.integers(0, 14), count=st.integers(1, 5), prefetch=st.sampled_from([0, 1, 3]))
@settings(max_examples=40, deadline=None)
def test_a_run_resumed_anywhere_reads_the_uncut_stream(cut: int, count: int, prefetch: int) -> None:
    whole = counting_feed(samples=11, global_batch=6)
    uncut = stream(whole, whole.start(), steps=15)
    cursor = whole.start()
    for _ in range(cut):
        cursor = whole.advance(cursor)
    feeds = [counting_feed(11, 6, 1, i, count, prefetch=prefetch) for i in range(count)]
    parts = [stream(feed, cursor, steps=15 - cut) for feed in feeds]
    for feed in feeds:
        feed.close()
    joined = [[s for part in parts for s in part[step]] for step in range(15 - cut)]
    assert joined == uncut[cut:]


def test_skipped_ranges_are_never_read_and_the_rest_keeps_its_order() -> None:
    feed = counting_feed(samples=50, global_batch=4)
    everything = [sample for step in stream(feed, feed.start(), 12) for sample in step]
    cursor = feed.start().skip(4, 8).skip(18, 21)
    step = feed.next(feed.advance(cursor))
    assert step.step_first_sample == 8
    read = [sample for samples in stream(feed, cursor, 9) for sample in samples]
    assert read == (everything[:4] + everything[8:18] + everything[21:])[:36]


def test_training_ends_when_the_epochs_cannot_fill_another_step() -> None:
    feed = counting_feed(samples=10, global_batch=4, epochs=2)
    cursor = feed.start()
    for _ in range(5):
        feed.next(cursor)
        cursor = feed.advance(cursor)
    with pytest.raises(DataExhausted, match=r"data\.epochs = 2 ends at 20"):
        feed.next(cursor)
    shorter = counting_feed(samples=10, global_batch=8, epochs=1)
    after_one = shorter.advance(shorter.start())
    with pytest.raises(DataExhausted):  # two samples are left, and no partial step is made
        shorter.next(after_one)


def test_exhaustion_with_prefetch_comes_after_the_last_whole_step() -> None:
    with counting_feed(samples=10, global_batch=4, epochs=1, prefetch=4) as feed:
        assert len(stream(feed, feed.start(), 2)) == 2
        with pytest.raises(DataExhausted):
            feed.next(feed.advance(feed.advance(feed.start())))


def test_validation_samples_are_the_last_ones_and_never_trained_on() -> None:
    data = Data(sequence=2, prefetch=0, validation_fraction=0.2)
    source = CountingSource(30)
    train = Feed(data, source.vocab, 12, 1, 0, 1, "train", source)
    held_out = Feed(data, source.vocab, 6, 1, 0, 1, "validation", source)
    assert (train.samples, held_out.samples) == (24, 6)
    trained = {sample for step in stream(train, train.start(), 6) for sample in step}
    validated = {sample for step in stream(held_out, held_out.start(), 3) for sample in step}
    assert trained == set(range(24))
    assert validated == set(range(24, 30))


def test_validating_without_held_out_samples_is_refused() -> None:
    with pytest.raises(DataError, match=r"data\.validation_fraction = 0\.0"):
        Feed(Data(sequence=2), 100, 4, 1, 0, 1, "validation")


def test_a_cursor_of_other_data_is_refused_with_the_difference() -> None:
    other = counting_feed(samples=50, global_batch=4, seed=3).start()
    with pytest.raises(DataError, match=r"seed=3.*would be seed=4"):
        counting_feed(samples=50, global_batch=4, seed=4).next(other)
    with pytest.raises(DataError, match=r"\(none\)"):
        counting_feed(samples=50, global_batch=4).next(Cursor())


def test_seeds_give_different_orders() -> None:
    first, second = (counting_feed(samples=50, global_batch=50, seed=seed) for seed in (0, 1))
    assert stream(first, first.start(), 1) != stream(second, second.start(), 1)


def test_prefetch_never_changes_a_batch() -> None:
    def feed(prefetch: int) -> Feed:
        data = Data(sequence=16, document_mask=True, prefetch=prefetch)
        return Feed(data, 50, global_batch=5, micro_batch=2, index=1, count=2)

    with feed(3) as threaded, feed(0) as plain:
        cursor = plain.start()
        following = plain.advance(cursor)
        # Forward, back again, twice the same, and with a skip: all out of the thread's order.
        for at in (cursor, following, cursor, cursor, following.skip(7, 9), following):
            assert same_batches(threaded.next(at).micro_batches, plain.next(at).micro_batches)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_rows_for_a_gpu_are_contiguous_and_the_same(
    prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.data.buffers.pinned", lambda shape: np.empty(shape, np.int64))
    data = Data(sequence=16, document_mask=True, prefetch=prefetch)
    with (
        Feed(data, 50, global_batch=5, micro_batch=2, index=1, count=2, pin=True) as apart,
        Feed(data, 50, global_batch=5, micro_batch=2, index=1, count=2) as shared,
    ):
        cursor = shared.start()
        for _ in range(9):  # more steps than there are buffers
            batches = apart.next(cursor).micro_batches
            assert same_batches(batches, shared.next(cursor).micro_batches)
            assert all(batch.tokens.flags.c_contiguous for batch in batches)
            assert all(batch.labels.flags.c_contiguous for batch in batches)
            cursor = shared.advance(cursor)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_a_batch_stays_as_it_is_while_the_next_step_is_taken(prefetch: int) -> None:
    with counting_feed(samples=1000, global_batch=4, prefetch=prefetch) as feed:
        cursor, held = feed.start(), []
        for _ in range(20):
            held.append(feed.next(cursor))
            now = [real_samples(step) for step in held[-2:]]
            plain = counting_feed(samples=1000, global_batch=4)
            before = stream(plain, plain.start(), len(held))[-2:]
            assert now == before
            cursor = feed.advance(cursor)


class FailingSource(CountingSource):
    """Breaks on its third read, until repaired."""

    def __init__(self) -> None:
        super().__init__(samples=100)
        self.reads = 0
        self.broken = True

    def read(self, indices: Sequence[int], rows: Iterable[NDArray[np.int64]]) -> None:
        self.reads += 1
        if self.broken and self.reads == 3:
            raise OSError("disk on fire")
        super().read(indices, rows)


def read_ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "phalanx-read-ahead"]


def test_an_error_in_the_thread_is_raised_at_its_step_and_can_be_retried() -> None:
    source = FailingSource()
    with Feed(Data(sequence=2, prefetch=4), source.vocab, 1, 1, 0, 1, source=source) as feed:
        cursor = feed.start()
        for _ in range(2):
            feed.next(cursor)
            cursor = feed.advance(cursor)
        with pytest.raises(OSError, match="disk on fire"):
            feed.next(cursor)
        source.broken = False
        plain = counting_feed(samples=100, global_batch=1)
        assert real_samples(feed.next(cursor)) == real_samples(plain.next(cursor))


def test_the_thread_starts_on_first_use_and_ends_with_the_feed() -> None:
    feed = counting_feed(samples=100, global_batch=2, prefetch=2)
    assert not read_ahead_threads()
    feed.next(feed.start())
    assert len(read_ahead_threads()) == 1
    feed.close()
    assert not read_ahead_threads()
    feed.next(feed.start())
    del feed  # forgotten without close()
    assert not read_ahead_threads()


@pytest.mark.parametrize("used_before_fork", [False, True])
def test_a_forked_child_reads_the_same_and_exits(used_before_fork: bool) -> None:
    feed = counting_feed(samples=100, global_batch=4, prefetch=2)
    cursor = feed.start()
    expected = stream(counting_feed(samples=100, global_batch=4), cursor, 3)
    if used_before_fork:
        feed.next(cursor)
        cursor = feed.advance(cursor)
        expected = expected[1:]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)  # a child that hangs must fail the test, not outlive it
            same = stream(feed, cursor, len(expected)) == expected
            feed.close()
            code = 0 if same and not read_ahead_threads() else 1
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert stream(feed, cursor, len(expected)) == expected
    feed.close()
