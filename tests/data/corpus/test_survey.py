"""Inspecting tells lengths exactly, shows the beginnings of documents, and draws the blend."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phalanx.config import BlendSource, Data, Stage
from phalanx.data import ShardStream, ShardWriter
from phalanx.data.corpus import survey
from phalanx.data.corpus.survey import LengthBin, measure_lengths, sample_texts, survey_blend
from tests.data.corpora import write_corpus


def write_lengths(folder: Path, lengths: list[int], file_bytes: int = 1 << 20) -> ShardStream:
    """Documents of these lengths, each its number repeated, end token included."""
    with ShardWriter(folder, 1000, 0, file_bytes=file_bytes) as writer:
        for number, length in enumerate(lengths):
            writer.write([number + 1] * (length - 1))
            writer.end_document()
        writer.finish()
    return ShardStream(folder)


def test_lengths_fall_into_powers_of_two(tmp_path: Path) -> None:
    lengths = measure_lengths(write_lengths(tmp_path, [1, 2, 3, 4, 7, 8, 16, 17]))
    assert lengths.bins == (
        LengthBin(1, 1, 1),
        LengthBin(2, 2, 5),
        LengthBin(4, 2, 11),
        LengthBin(8, 1, 8),
        LengthBin(16, 2, 33),
    )
    assert (lengths.measured, lengths.median, lengths.mean, lengths.longest) == (8, 5, 7.2, 17)


def test_of_many_files_an_even_choice_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "MOST_FILES", 3)
    lengths = measure_lengths(write_lengths(tmp_path, [10] * 100, file_bytes=100))
    assert 0 < lengths.measured < 100 and lengths.longest == 10
    empty = measure_lengths(write_lengths(tmp_path / "none", []))
    assert empty.measured == 0 and empty.bins == ()


def test_samples_begin_where_documents_begin_and_end_with_them(tmp_path: Path) -> None:
    stream = write_lengths(tmp_path, [5, 3, 8, 4])
    assert sample_texts(stream, 1, 64) == ["1 1 1 1 0"]
    assert sample_texts(stream, 2, 4) == ["1 1 1 1", "4 4 4 0"]
    assert sample_texts(write_lengths(tmp_path / "none", []), 3, 8) == []


def test_the_blend_of_a_run_is_told_by_stage_and_source(tmp_path: Path) -> None:
    for name, tokens in (("web", 801), ("code", 401), ("idle", 100)):
        write_corpus(tmp_path / name, tokens)
    blend = {
        "web": BlendSource(path=str(tmp_path / "web"), weight=3.0),
        "code": BlendSource(path=str(tmp_path / "code"), weight=1.0),
        "idle": BlendSource(path=str(tmp_path / "missing"), weight=0.0),
    }
    stages = (Stage(tokens=1600, weights={"code": 1.0}),)
    data = Data(source="shards", blend=blend, stages=stages, sequence=8)
    found = survey_blend(data, vocab=1000, samples=400)
    assert (found.stages, found.tokens) == ((0, 1600), 3200)
    web, code = found.sources
    assert (web.name, web.tokens, web.drawn_tokens, web.epochs) == ("web", 800, 1200, 1.5)
    assert (code.name, code.drawn_tokens, code.epochs) == ("code", 2000, 5.0)
    assert np.allclose(web.shares, (0.75, 0.0)) and np.allclose(code.shares, (0.25, 1.0))
