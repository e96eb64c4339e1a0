"""Shards return what was written, and a damaged corpus is refused with its reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from phalanx.config import Data
from phalanx.data import (
    DataError,
    Feed,
    SampleReader,
    ShardStream,
    ShardWriter,
    TokenPosition,
    open_sources,
    open_stream,
    read_manifest,
    verify,
)
from phalanx.data.corpus import writer
from tests.data.corpora import write_corpus


@pytest.mark.parametrize(("vocab", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_the_stored_type_follows_the_vocabulary(tmp_path: Path, vocab: int, dtype: str) -> None:
    tokens = write_corpus(tmp_path, 500, vocab)
    manifest = read_manifest(tmp_path)
    assert (manifest.dtype, manifest.tokens, manifest.documents) == (dtype, 500, 3)
    stored = np.fromfile(
        tmp_path / manifest.files[0].name, dtype="<u2" if vocab == 65_536 else "<u4"
    )
    assert np.array_equal(stored, tokens)


@pytest.mark.parametrize("file_bytes", [2, 34, 200, 1 << 20])
def test_samples_are_cut_from_one_stream_across_files(tmp_path: Path, file_bytes: int) -> None:
    tokens = write_corpus(tmp_path, 300, file_bytes=file_bytes)
    data = Data(source="shards", path=str(tmp_path), sequence=32)
    source = open_sources(data, vocab=1000)["corpus"]
    assert source.samples == 299 // 32
    for index in range(source.samples):
        window = np.zeros(33, np.int64)
        source.read([index], [window])
        assert np.array_equal(window, tokens[index * 32 : index * 32 + 33])
    with pytest.raises(IndexError):
        source.read([source.samples], [window])


def test_an_epoch_reads_the_corpus_once(tmp_path: Path) -> None:
    tokens = write_corpus(tmp_path, 321, file_bytes=100)
    data = Data(source="shards", path=str(tmp_path), sequence=32, prefetch=2)
    with Feed(data, 1000, global_batch=10, micro_batch=5, index=0, count=1) as feed:
        step = feed.next(feed.start())
    rows = np.concatenate([batch.tokens for batch in step.micro_batches])
    assert sorted(rows.tolist()) == sorted(tokens[:320].reshape(10, 32).tolist())


def test_positions_after_an_end_of_document_belong_to_the_next(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, vocab=10, end_of_document=0) as writer:
        for document in ([5, 6], [], [7, 8, 9]):
            writer.write(document)
            writer.end_document()
        writer.write([1])
        writer.finish()
    data = Data(source="shards", path=str(tmp_path), sequence=8, document_mask=True, prefetch=0)
    feed = Feed(data, 10, global_batch=1, micro_batch=2, index=0, count=1)
    batch = feed.next(feed.start()).micro_batches[0]
    assert batch.documents is not None and batch.documents.dtype == np.int32
    assert batch.tokens[0].tolist() == [5, 6, 0, 0, 7, 8, 9, 0]
    assert batch.documents.tolist() == [[0, 0, 0, 1, 2, 2, 2, 2], [0] * 8]  # the second is padding


def test_a_truncated_shard_is_named_with_both_sizes(tmp_path: Path) -> None:
    write_corpus(tmp_path, 500)
    shard = tmp_path / "shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-6])
    with pytest.raises(DataError, match=r"shard-00000\.bin.*truncated: 994 bytes.*says 1000"):
        ShardStream(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path, 500, file_bytes=400)
    (tmp_path / "shard-00001.bin").unlink()
    with pytest.raises(DataError, match=r"shard-00001\.bin.*missing"):
        ShardStream(tmp_path)


def test_a_folder_without_a_manifest_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no manifest\.json.*phalanx data tokenize"):
        ShardStream(tmp_path)
    with pytest.raises(DataError, match=r"no such folder; make one with `phalanx data tokenize`"):
        ShardStream(tmp_path / "nowhere")


def change(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.__setitem__(key, value)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (change("dtype", "int8"), r"corrupt.*dtype"),
        (change("version", 99), "format version 99, and this Phalanx reads 2"),
        (change("tokens", 499), "counts 499 tokens, but its files add up to 500"),
        (change("vocab", 70_000), "uint16, which cannot hold a vocabulary of 70000"),
        (change("end_of_document", 1000), "ends documents with token 1000"),
        (change("surprise", 1), r"corrupt.*surprise"),
        (lambda manifest: manifest.pop("files"), r"corrupt.*files"),
        (change("documents", 4), "counts 4 documents, but its files hold 3"),
        (change("file_tokens", 400), "do not hold 400 tokens"),
        (change("block_bytes", 333), "blocks of 333 bytes"),
        (lambda m: m["files"][0].__setitem__("name", "../other.bin"), "outside its folder"),
    ],
)
def test_a_corrupt_manifest_is_refused_with_its_reason(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], reason: str
) -> None:
    write_corpus(tmp_path, 500)
    path = tmp_path / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes())
    damage(manifest)
    path.write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(DataError, match=reason) as error:
        read_manifest(tmp_path)
    assert "manifest.json" in str(error.value)


def test_a_wrong_dtype_is_seen_by_the_size_of_the_files(tmp_path: Path) -> None:
    write_corpus(tmp_path, 500)
    path = tmp_path / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes())
    manifest["dtype"] = "uint32"
    path.write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(DataError, match=r"shard-00000\.bin: is no file of uint32.*wrong dtype"):
        ShardStream(tmp_path)


def test_a_half_written_manifest_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, 500)
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match=r"manifest\.json: is corrupt"):
        read_manifest(tmp_path)


def test_what_is_no_folder_is_not_called_an_incomplete_corpus(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, rule in (("absent", "there is no such folder"), ("file", "is a file, no folder")):
        with pytest.raises(DataError, match=f"{name}: {rule}; make one with"):
            read_manifest(tmp_path / name)


def test_a_model_with_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, 100)
    with pytest.raises(DataError, match=r"model\.vocab = 999.*1000 or more"):
        open_stream(tmp_path, vocab=999)


def test_a_sequence_longer_than_the_corpus_is_refused_with_the_longest_possible(
    tmp_path: Path,
) -> None:
    write_corpus(tmp_path, 100)
    data = Data(source="shards", path=str(tmp_path), sequence=100)
    with pytest.raises(DataError, match=r"data\.sequence = 100.*has 100.*to 99 or less"):
        open_sources(data, vocab=1000)


def test_a_token_outside_the_vocabulary_is_not_handed_to_the_model(tmp_path: Path) -> None:
    write_corpus(tmp_path, 500, file_bytes=400)
    shard = tmp_path / "shard-00001.bin"
    content = np.fromfile(shard, "<u2")
    content[20] = 1000
    content.tofile(shard)
    data = Data(source="shards", path=str(tmp_path), sequence=10)
    with pytest.raises(DataError, match=r"shard-00001\.bin .*: sample 2[12] holds token 1000"):
        SampleReader(data, vocab=5000).batch(0, 49)


def test_a_flipped_byte_is_found_by_its_checksum(tmp_path: Path) -> None:
    write_corpus(tmp_path, 500, file_bytes=400)
    verify(tmp_path)
    shard = tmp_path / "shard-00001.bin"
    content = bytearray(shard.read_bytes())
    content[17] ^= 0x40
    shard.write_bytes(content)
    with pytest.raises(DataError, match=r"shard-00001\.bin: block 0 .* is damaged: checksum"):
        verify(tmp_path)


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", 500)
    write_corpus(tmp_path / "b", 500)
    write_corpus(tmp_path / "c", 501)
    a, b, c = (ShardStream(tmp_path / name).fingerprint for name in "abc")
    assert a == b != c


def test_an_interrupted_writer_leaves_no_corpus(tmp_path: Path) -> None:
    def interrupted() -> None:
        with ShardWriter(tmp_path, 100, 0, file_bytes=20) as writer:
            writer.write(range(1, 26))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "shard-00000.bin",
        "shard-00000.idx",
        "shard-00001.bin",
        "shard-00001.idx",
    ]
    with pytest.raises(DataError, match=r"no manifest\.json"):
        read_manifest(tmp_path)


def test_a_corpus_is_replaced_only_on_request_and_then_entirely(tmp_path: Path) -> None:
    write_corpus(tmp_path, 500, file_bytes=100)
    with pytest.raises(DataError, match="already holds a corpus"):
        ShardWriter(tmp_path, 100, 0)
    assert verify(tmp_path).tokens == 500
    with ShardWriter(tmp_path, 100, 0, replace=True) as writer:
        writer.write([1, 2, 3])
        writer.finish()
    assert verify(tmp_path).tokens == 3
    assert [path.name for path in tmp_path.glob("shard*.bin")] == ["shard-00000.bin"]


@pytest.mark.parametrize("token", [-1, 100])
def test_the_writer_refuses_tokens_outside_the_vocabulary(tmp_path: Path, token: int) -> None:
    with ShardWriter(tmp_path, 100, 0) as writer, pytest.raises(DataError, match=str(token)):
        writer.write([5, token])


def test_a_stream_reads_any_range_and_knows_where_documents_start(tmp_path: Path) -> None:
    tokens = write_corpus(tmp_path, 300, documents=7, file_bytes=34)
    stream = ShardStream(tmp_path)
    assert (stream.tokens, stream.documents, stream.vocab) == (300, 7, 1000)
    starts = np.flatnonzero(np.concatenate([[True], tokens[:-1] == 0]))
    for first in range(0, 300, 13):
        for count in (0, 1, 17, 40, 300 - first):
            past = min(300, first + count)
            out = np.zeros(past - first, np.int64)
            stream.read_tokens(first, past - first, out)
            assert np.array_equal(out, tokens[first:past])
            found = stream.document_starts(first, past - first)
            assert found.tolist() == [s for s in starts if first <= s < past]
    with pytest.raises(IndexError):
        stream.read_tokens(299, 2, np.zeros(2, np.int64))


def test_a_stream_says_where_a_token_is_and_proves_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 64)
    write_corpus(tmp_path, 500, file_bytes=400)
    stream = ShardStream(tmp_path)
    assert stream.block_tokens == 32
    assert stream.place(270) == TokenPosition("shard-00001.bin", 70, 2)
    stream.check(0, 500)
    path = tmp_path / "shard-00001.bin"
    content = bytearray(path.read_bytes())
    content[130] ^= 1
    path.write_bytes(content)
    stream = ShardStream(tmp_path)
    stream.check(0, 264)
    with pytest.raises(DataError, match=r"shard-00001\.bin: block 2 \(tokens 64 to 95"):
        stream.check(200, 65)


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path, 500)
    path = tmp_path / "shard-00000.idx"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"shard-00000\.idx: is damaged"):
        verify(tmp_path)
    path.write_bytes(content[:-4])
    with pytest.raises(DataError, match=r"shard-00000\.idx: has \d+ bytes"):
        ShardStream(tmp_path).document_starts(0, 10)


def test_a_shard_one_may_not_read_is_refused_before_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "corpus", 40)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root
    with pytest.raises(DataError, match=r"shard-00000\.bin: may not be read.*chmod"):
        ShardStream(tmp_path / "corpus")


def test_a_manifest_that_cannot_be_read_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").mkdir()
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read: Is a directory"):
        ShardStream(tmp_path)
