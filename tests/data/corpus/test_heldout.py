"""Validation documents are chosen by hash: exactly partitioned, and the same as a corpus grows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from phalanx.data import DataError, ShardWriter, TokenStream, open_stream
from phalanx.data.corpus import heldout
from phalanx.data.corpus.opening import open_whole
from tests.data.corpus.test_foreign import write_datatrove, write_megatron

END = 0


def random_documents(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [[*random.integers(1, 500, random.integers(0, 40)).tolist(), END] for _ in range(count)]


def write_shards(folder: Path, documents: list[list[int]], file_bytes: int = 100) -> None:
    with ShardWriter(folder, 500, END, file_bytes=file_bytes) as writer:
        for document in documents:
            writer.write(document[:-1])
            writer.end_document()
        writer.finish()


def documents_of(stream: TokenStream) -> list[list[int]]:
    tokens: NDArray[np.int64] = np.zeros(stream.tokens, np.int64)
    stream.read_tokens(0, stream.tokens, tokens)
    starts = stream.document_starts(0, stream.tokens)
    return [piece.tolist() for piece in np.split(tokens, starts[1:])] if len(starts) else []


@pytest.mark.parametrize("fraction", [0.02, 0.3, 0.9])
def test_the_two_sides_are_the_corpus(tmp_path: Path, fraction: float) -> None:
    documents = random_documents(200)
    write_shards(tmp_path, documents)
    train = open_stream(tmp_path, 500, fraction, "train")
    held = open_stream(tmp_path, 500, fraction, "validation")
    train_documents, held_documents = documents_of(train), documents_of(held)
    assert len(train_documents) == train.documents and len(held_documents) == held.documents
    assert train.tokens + held.tokens == sum(map(len, documents))
    remaining = iter(held_documents), iter(train_documents)
    pending = [next(side, None) for side in remaining]
    for document in documents:  # both sides keep the order of the corpus
        side = 0 if document == pending[0] else 1
        assert document == pending[side]
        pending[side] = next(remaining[side], None)
    assert pending == [None, None]
    assert abs(len(held_documents) / len(documents) - fraction) < 0.1
    assert train.fingerprint != held.fingerprint


def test_any_range_of_a_side_reads_as_the_whole_side(tmp_path: Path) -> None:
    write_shards(tmp_path, random_documents(60))
    stream = open_stream(tmp_path, 500, 0.3, "train")
    tokens: NDArray[np.int64] = np.zeros(stream.tokens, np.int64)
    stream.read_tokens(0, stream.tokens, tokens)
    starts = stream.document_starts(0, stream.tokens)
    for first in range(0, stream.tokens, 29):
        for count in (1, 7, 100):
            past = min(stream.tokens, first + count)
            out: NDArray[np.int64] = np.zeros(past - first, np.int64)
            stream.read_tokens(first, past - first, out)
            assert np.array_equal(out, tokens[first:past])
            inside = stream.document_starts(first, past - first)
            assert inside.tolist() == [s for s in starts if first <= s < past]
    stream.check(0, stream.tokens)
    with pytest.raises(IndexError):
        stream.read_tokens(stream.tokens, 1, np.zeros(1, np.int64))


def test_a_corpus_that_grows_keeps_every_document_on_its_side(tmp_path: Path) -> None:
    documents = random_documents(300)
    write_shards(tmp_path / "small", documents[:150], file_bytes=60)
    write_shards(tmp_path / "large", documents, file_bytes=200)
    small, large = (
        documents_of(open_stream(tmp_path / name, 500, 0.2, "validation"))
        for name in ("small", "large")
    )
    assert 0 < len(small) < len(large)
    assert large[: len(small)] == small


def test_a_larger_fraction_holds_out_more_of_the_same(tmp_path: Path) -> None:
    write_shards(tmp_path, random_documents(300))
    few, many = (
        {tuple(document) for document in documents_of(open_stream(tmp_path, 500, f, "validation"))}
        for f in (0.1, 0.3)
    )
    assert few < many


def test_formats_used_in_place_need_one_recorded_pass(tmp_path: Path) -> None:
    documents = random_documents(200)
    write_megatron(tmp_path / "text", documents)
    write_datatrove(tmp_path / "text.ds", documents)
    sides = []
    for path in (tmp_path / "text", tmp_path / "text.ds"):
        with pytest.raises(DataError, match=r"phalanx data split .*text.* --fraction 0\.2"):
            open_stream(path, 500, 0.2, "train")
        stream = open_whole(path)
        heldout.record_held_out(stream, 0.2, heldout.choose_held_out(stream, 0.2))
        train = documents_of(open_stream(path, 500, 0.2, "train"))
        held = documents_of(open_stream(path, 500, 0.2, "validation"))
        assert sorted(train + held) == sorted(documents) and 20 < len(held) < 60
        sides.append((train, held))
    assert sides[0] == sides[1]


def test_a_record_of_another_corpus_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    write_datatrove(tmp_path / "text.ds", random_documents(100))
    stream = open_whole(tmp_path / "text.ds")
    path = heldout.record_held_out(stream, 0.2, heldout.choose_held_out(stream, 0.2))
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="damaged"):
        open_stream(tmp_path / "text.ds", 500, 0.2, "train")
    path.write_bytes(content)
    write_datatrove(tmp_path / "text.ds", random_documents(100, seed=1))
    with pytest.raises(DataError, match="another state of the corpus"):
        open_stream(tmp_path / "text.ds", 500, 0.2, "train")


def test_a_large_corpus_of_shards_uses_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, random_documents(100))
    expected = documents_of(open_stream(tmp_path, 500, 0.2, "train"))
    monkeypatch.setattr(heldout, "MOST_DOCUMENTS", 99)
    with pytest.raises(DataError, match="phalanx data split"):
        open_stream(tmp_path, 500, 0.2, "train")
    stream = open_whole(tmp_path)
    heldout.record_held_out(stream, 0.2, heldout.choose_held_out(stream, 0.2))
    assert documents_of(open_stream(tmp_path, 500, 0.2, "train")) == expected


def test_no_held_out_documents_means_no_validation(tmp_path: Path) -> None:
    write_shards(tmp_path, random_documents(10))
    assert open_stream(tmp_path, 500, 0.0, "train").tokens == open_stream(tmp_path, 500).tokens
    with pytest.raises(DataError, match=r"data\.validation_fraction"):
        open_stream(tmp_path, 500, 0.0, "validation")
