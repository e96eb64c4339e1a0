"""A cursor names exactly the samples still to be read, with skipped ranges left out."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.data import Cursor

ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 10)).map(lambda r: (r[0], r[0] + r[1])), max_size=6
)


def with_skips(consumed: int, skips: list[tuple[int, int]]) -> Cursor:
    cursor = Cursor(consumed)
    for first, past in skips:
        cursor = cursor.skip(first, past)
    return cursor


@given(
    consumed=st.integers(0, 80), skips=ranges, first=st.integers(0, 20), count=st.integers(0, 20)
)
def test_upcoming_samples_are_those_neither_done_nor_skipped(
    consumed: int, skips: list[tuple[int, int]], first: int, count: int
) -> None:
    skipped = {number for start, stop in skips for number in range(start, stop)}
    expected = [number for number in range(consumed, 300) if number not in skipped]
    cursor = with_skips(consumed, skips)
    assert list(cursor.upcoming(first, count)) == expected[first : first + count]


@given(skips=ranges, batch=st.integers(1, 9), steps=st.integers(1, 12))
def test_advancing_reads_everything_once_in_order(
    skips: list[tuple[int, int]], batch: int, steps: int
) -> None:
    cursor = with_skips(0, skips)
    expected = list(cursor.upcoming(0, batch * steps))
    read: list[int] = []
    for _ in range(steps):
        read += list(cursor.upcoming(0, batch))
        cursor = cursor.advance(batch)
    assert read == expected
    assert cursor.seen == batch * steps


def test_a_range_skipped_behind_the_cursor_changes_nothing_ahead() -> None:
    cursor = Cursor(consumed=40, fingerprint="f")
    assert cursor.skip(10, 18).upcoming(0, 8) == cursor.upcoming(0, 8)
    assert cursor.skip(10, 18).seen == 32


def test_overlapping_and_touching_ranges_are_merged() -> None:
    cursor = Cursor().skip(8, 16).skip(0, 4).skip(16, 24).skip(10, 12)
    assert cursor.ranges == ((0, 4), (8, 24))


@pytest.mark.parametrize(
    "skipped", [((5, 5),), ((5, 3),), ((8, 9), (0, 2)), ((0, 4), (2, 6)), ((-1, 2),)]
)
def test_impossible_ranges_are_refused(skipped: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValueError, match="sorted and apart"):
        Cursor(skipped=skipped)


def test_a_cursor_survives_a_round_trip_and_stays_small() -> None:
    cursor = Cursor(10**12, ((10**9, 10**9 + 2048), (10**10, 10**10 + 2048)), "order=1 corpus=abc")
    text = msgspec.json.encode(cursor)
    assert msgspec.json.decode(text, type=Cursor) == cursor
    assert len(text) <= 256


def test_ranges_written_as_pairs_by_earlier_versions_are_read() -> None:
    text = b'{"consumed":50,"skipped":[[3,7],[60,70]],"fingerprint":"f"}'
    cursor = msgspec.json.decode(text, type=Cursor)
    assert cursor == Cursor(50, ((3, 7), (60, 70)), "f")
    assert cursor.ranges == ((3, 7), (60, 70)) and cursor.seen == 46


@given(skips=st.lists(st.tuples(st.integers(1, 10**12), st.integers(1, 10**6)), max_size=4))
def test_packing_keeps_every_range(skips: list[tuple[int, int]]) -> None:
    at, spans = 0, []
    for gap, length in skips:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    assert Cursor(0, tuple(spans)).ranges == tuple(spans)


def test_old_ranges_become_a_count_and_those_ahead_stay_exact() -> None:
    cursor = Cursor(10**9)
    spans = [(at * 10**7, at * 10**7 + 1000) for at in range(1, 60)] + [(2 * 10**9, 2 * 10**9 + 5)]
    for first, past in spans:
        cursor = cursor.skip(first, past)
    known = cursor.skips
    assert known.ranges == tuple(spans[-len(known.ranges) :]) and len(known.ranges) >= 4
    assert known.forgotten == 1000 * (60 - len(known.ranges))
    assert cursor.seen == 10**9 - 59_000
    assert cursor.advance(10**9 + 1).seen == 2 * 10**9 + 1 - 59_000
    with pytest.raises(ValueError, match="only counted by now"):
        cursor.skip(5, 6)


def test_more_ranges_ahead_than_a_cursor_holds_are_refused() -> None:
    def spans(count: int) -> tuple[tuple[int, int], ...]:
        return tuple((at * 10**9, at * 10**9 + 4096) for at in range(1, count + 1))

    assert Cursor(0, spans(6)).ranges == spans(6)
    with pytest.raises(ValueError, match="join them"):
        Cursor(0, spans(40))


@pytest.mark.parametrize("text", ["~", '"', "00000", "zzz|"])
def test_a_damaged_list_of_ranges_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no packed list"):
        Cursor(5, text)
