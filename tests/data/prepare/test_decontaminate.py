"""Words that an evaluation set and a document share are found, and nothing less than that."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from phalanx.data import DataError
from phalanx.data.prepare.decontaminate import EvaluationNgrams, gather_ngrams
from phalanx.data.prepare.words import TextView
from tests.data.prepare.raw import prose

LONG = prose(1, words=40)
SHORT = "what is the tallest mountain on the moon called"  # 9 words
TINY = "who won the game"


@pytest.fixture(scope="module")
def ngrams(tmp_path_factory: pytest.TempPathFactory) -> EvaluationNgrams:
    path = tmp_path_factory.mktemp("exam") / "exam.jsonl"
    rows = [{"question": LONG, "choices": [SHORT, TINY]}, {"answer": 3}]
    path.write_bytes(msgspec.json.Encoder().encode_lines(rows))
    found = gather_ngrams([str(path)], "", 13, 8)
    found.save(path.with_suffix(".npz"))
    again = EvaluationNgrams.load(path.with_suffix(".npz"))
    assert again.digest() == found.digest()
    return again


def test_thirteen_words_in_a_row_are_found_whatever_stands_around_them(
    ngrams: EvaluationNgrams,
) -> None:
    words = LONG.split()
    part = " ".join(words[5:18]).upper().replace(" ", " – ")
    said = ngrams.found_in(TextView(f"{prose(2)} {part}, {prose(3)}"))
    assert said is not None and words[5].lower() in said
    assert ngrams.found_in(TextView(f"{prose(2)} {' '.join(words[5:17])} {prose(3)}")) is None


def test_a_short_example_is_found_whole_and_a_tiny_one_is_not_looked_for(
    ngrams: EvaluationNgrams,
) -> None:
    assert ngrams.found_in(TextView(f"He asked: {SHORT}? Nobody knew."))
    assert ngrams.found_in(TextView(f"He asked: {TINY}? Nobody knew.")) is None


@pytest.mark.parametrize("text", ["", "one", prose(9)])
def test_other_texts_are_clean(ngrams: EvaluationNgrams, text: str) -> None:
    assert ngrams.found_in(TextView(text)) is None


def test_a_set_without_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "exam.jsonl"
    path.write_text('{"question": "a"}\n')
    with pytest.raises(DataError, match="record 1 cannot be read: it has no text under 'text'"):
        gather_ngrams([str(path)], "text", 13, 8)
    path.write_text("")
    with pytest.raises(DataError, match="holds no example"):
        gather_ngrams([str(path)], "text", 13, 8)
    path.write_text("{\n")
    with pytest.raises(DataError, match="line 1 cannot be read"):
        gather_ngrams([str(path)], "", 13, 8)


def test_n_grams_that_were_half_written_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    ngrams = EvaluationNgrams({13: np.arange(100, dtype=np.uint64)})
    monkeypatch.setattr(os, "fsync", killed)  # the moment before all of it is on the disk
    with suppress(KeyboardInterrupt):
        ngrams.save(tmp_path / "ngrams.npz")
    assert not (tmp_path / "ngrams.npz").exists()


def test_an_evaluation_set_of_which_a_part_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "one two three four"}\n{"question": "cut\n')
    with pytest.raises(DataError, match="record 2 cannot be read"):
        gather_ngrams([str(path)], "question", 3, 3)
