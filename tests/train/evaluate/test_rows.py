"""Requests become rows: each token scored once, the same rounds on every replica."""

from __future__ import annotations

import pytest

from phalanx.data import WEIGHTLESS
from phalanx.train.evaluate.rows import ScoreRequest, request, rolling, rounds


def test_a_text_that_fits_is_one_window_after_the_start() -> None:
    assert list(rolling([5, 6, 7], 1, 8)) == [ScoreRequest((1, 5, 6, 7), 3)]
    assert list(rolling([], 1, 8)) == []


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 11])
def test_windows_score_every_token_of_a_long_text_once(length: int) -> None:
    text = list(range(10, 10 + length))
    windows = list(rolling(text, 1, 4))
    scored = [token for tokens, count in windows for token in tokens[len(tokens) - count :]]
    assert scored == text
    assert all(len(tokens) <= 5 for tokens, _ in windows)
    # What stands before a scored token is what stands before it in the text.
    whole = [1, *text]
    for tokens, _ in windows:
        first = whole.index(tokens[0])
        assert list(tokens) == whole[first : first + len(tokens)]


def test_windows_are_those_of_the_harness() -> None:
    utils = pytest.importorskip("lm_eval.utils")
    for length in range(1, 23):
        text = list(range(10, 10 + length))
        theirs = map(utils.make_disjoint_window, utils.get_rolling_token_windows(text, 1, 6, 1))
        expected = [ScoreRequest((*context, *scored), len(scored)) for context, scored in theirs]
        assert list(rolling(text, 1, 6)) == expected


def test_of_a_context_that_is_too_long_the_end_is_kept() -> None:
    assert request([1, 2, 3], [4, 5], 8) == ScoreRequest((1, 2, 3, 4, 5), 2)
    assert request([1, 2, 3], [4, 5], 2) == ScoreRequest((3, 4, 5), 2)
    assert request([1], [4, 5, 6], 2) == ScoreRequest((4, 5, 6), 2)


def test_replicas_have_equally_many_rounds_of_one_width_and_all_requests_between_them() -> None:
    asked = [ScoreRequest(tuple(range(2, 4 + n)), 1) for n in range(7)]
    by_replica = [list(rounds(asked, 2, i, 2, sequence=64)) for i in range(2)]
    assert [len(each) for each in by_replica] == [2, 2]
    numbers = [n for each in by_replica for turn in each for n in turn.numbers]
    assert sorted(numbers) == list(range(7))
    for ours, theirs in zip(*by_replica, strict=True):
        assert ours.batch.tokens.shape == theirs.batch.tokens.shape == (2, 32)
    for turn in by_replica[0]:
        for row, number in enumerate(turn.numbers):
            text = asked[number].tokens
            labels = turn.batch.labels[row].tolist()
            assert turn.batch.tokens[row, : len(text) - 1].tolist() == list(text[:-1])
            assert labels[len(text) - 2] == text[-1]
            assert sum(label != WEIGHTLESS for label in labels) == 1


def test_rows_are_as_wide_as_asked_for() -> None:
    asked = [ScoreRequest(tuple(range(50)), 1)]
    (free,) = rounds(asked, 1, 0, 1, sequence=100)
    assert free.batch.tokens.shape == (1, 64)
    (fixed,) = rounds(asked, 1, 0, 1, sequence=100, fixed_width=True)
    assert fixed.batch.tokens.shape == (1, 100)
    (narrow,) = rounds(asked, 1, 0, 1, sequence=50, multiple=4)
    assert narrow.batch.tokens.shape == (1, 52)
