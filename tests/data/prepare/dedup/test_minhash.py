"""Similar texts share keys as often as theory says, and sketches measure their similarity."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.data.prepare.dedup import minhash
from phalanx.data.prepare.dedup.minhash import (
    Banding,
    MinHasher,
    choose_banding,
    shingles,
    similarity,
    sketch,
)
from phalanx.data.prepare.words import TextView, mix
from tests.data.prepare.raw import changed, prose


def jaccard(one: str, other: str) -> float:
    left, right = (set(shingles(TextView(text), 5).tolist()) for text in (one, other))
    return len(left & right) / len(left | right)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_the_banding_has_the_recall_that_was_asked_for(threshold: float) -> None:
    banding = choose_banding(threshold, 0.97)
    assert banding.probability(threshold) >= 0.97
    assert banding.bands * banding.rows <= minhash.MOST_HASHES
    assert Banding(banding.bands, banding.rows + 1).probability(threshold) < 0.97


def test_keys_are_shared_as_often_as_theory_says() -> None:
    """Random sets of a known similarity, so that the estimate has a known error."""
    hasher = MinHasher(Banding(10, 4))
    for similarity_wanted in (0.5, 0.8):
        shared, total = 0, 400
        common = round(200 * 2 * similarity_wanted / (1 + similarity_wanted))
        for seed in range(total):
            numbers = mix(np.arange(seed * 1000 + 1, seed * 1000 + 401 - common, dtype=np.uint64))
            one, other = np.sort(numbers[:200]), np.sort(numbers[-200:])
            shared += bool((hasher.keys(one) == hasher.keys(other)).any())
        expected = hasher.banding.probability(similarity_wanted)
        error = 4 * (expected * (1 - expected) / total) ** 0.5 + 0.01
        assert abs(shared / total - expected) < error


def test_keys_depend_on_the_set_alone_and_not_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    view = TextView(prose(1, words=400))
    ngrams = shingles(view, 5)
    hasher = MinHasher(Banding(15, 7))
    keys = hasher.keys(ngrams)
    monkeypatch.setattr(minhash, "_CHUNK", 17)
    assert (hasher.keys(ngrams[::-1]) == keys).all()
    # Stored keys outlive a version: these must not change unless VERSION of the recipe does.
    assert [f"{key:016x}" for key in keys[:2].tolist()] == ["48a99c22fccdb9b9", "21eed8d15b22d44f"]


def test_a_sketch_of_a_short_text_is_exact() -> None:
    for seed in range(10):
        one = prose(seed)
        other = changed(one, seed)
        measured = similarity(*(sketch(shingles(TextView(text), 5)) for text in (one, other)))
        assert measured == pytest.approx(jaccard(one, other))


def test_a_sketch_of_a_long_text_is_close() -> None:
    one = prose(3, words=6000)
    other = changed(one, 120)
    measured = similarity(*(sketch(shingles(TextView(text), 5)) for text in (one, other)))
    assert len(sketch(shingles(TextView(one), 5))) == minhash.SKETCH
    assert abs(measured - jaccard(one, other)) < 0.06  # four standard errors
    assert similarity(sketch(shingles(TextView(one), 5)), sketch(shingles(TextView(one), 5))) == 1.0


@pytest.mark.parametrize("text", ["", "one", "one two", "!!!", "你好"])
def test_short_texts_have_a_key_too(text: str) -> None:
    ngrams = shingles(TextView(text), 5)
    assert len(ngrams) == 1
    assert len(MinHasher(Banding(3, 2)).keys(ngrams)) == 3
