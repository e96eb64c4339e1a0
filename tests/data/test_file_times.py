"""A time is a version of a file only once the file system's clock has gone on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phalanx.data import DataError, file_times
from phalanx.data.file_times import settled_stats, unsettled_seconds
from phalanx.data.tokenize import inputs, vocabulary
from phalanx.data.tokenize import run as tokenize

SECOND = 10**9
NOW = 1_800_000_000 * SECOND + 500_000_000


def test_what_was_just_written_is_not_settled() -> None:
    assert unsettled_seconds(NOW - 1_000_000, NOW) == pytest.approx(0.049)
    assert unsettled_seconds(NOW - SECOND // 10, NOW) == 0
    whole = NOW - NOW % SECOND  # a file system without fractions, or by chance
    assert unsettled_seconds(whole, NOW) == pytest.approx(1.5)
    assert unsettled_seconds(whole - 10 * SECOND, NOW) == 0
    assert unsettled_seconds(NOW + 3600 * SECOND + 1, NOW) == 0  # a wrong clock is not waited for


def test_a_file_that_is_rewritten_within_the_step_is_seen_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    waits: list[float] = []

    def write_again(seconds: float) -> None:
        waits.append(seconds)
        path.write_text("newer")
        os.utime(path, ns=(NOW, NOW - 10 * SECOND))

    monkeypatch.setattr(file_times.time, "sleep", write_again)
    os.utime(path, ns=(NOW, NOW))
    monkeypatch.setattr(file_times.time, "time_ns", lambda: NOW)
    assert [each.st_size for each in settled_stats([path])] == [5]
    assert len(waits) == 1


def test_a_file_that_keeps_its_size_and_is_rewritten_at_once_makes_no_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the file system stands still until somebody waits for it."""
    path = tmp_path / "a.txt"
    step = [NOW]

    def write(text: str) -> None:
        path.write_text(text)
        os.utime(path, ns=(step[0], step[0]))

    def wait(seconds: float) -> None:
        step[0] += SECOND

    real = tokenize.encode_in_order

    def rewritten(*arguments: object, **named: object) -> object:
        yield from real(*arguments, **named)  # type: ignore[arg-type]
        write("b" * 400)

    monkeypatch.setattr(file_times.time, "sleep", wait)
    monkeypatch.setattr(file_times.time, "time_ns", lambda: step[0])
    write("a" * 400)
    files = inputs.find_files([path])
    encoder = vocabulary.train_tokenizer(files, vocab_size=300)
    monkeypatch.setattr(tokenize, "encode_in_order", rewritten)
    with pytest.raises(DataError, match="changed while it was read"):
        tokenize.tokenize_files(files, encoder, tmp_path / "out")
