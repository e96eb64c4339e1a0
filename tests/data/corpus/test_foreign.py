"""Corpora of Megatron and datatrove are read in place, and damage to them is named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from phalanx.config import Data
from phalanx.data import (
    DataError,
    Feed,
    FileStream,
    ShardWriter,
    TokenStream,
    open_stream,
    refuse_mixed_tokenizers,
    verify,
)
from phalanx.data.corpus.foreign import ForeignStream
from phalanx.data.corpus.heldout import HeldOut, record_held_out
from phalanx.data.corpus.sums import forget_sums, record_sums
from phalanx.data.remote.staging import stage

DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9, 10, 11, 12, 13, 0], [14, 0]]
STREAM = [token for document in DOCUMENTS for token in document]
STARTS = [0, 4, 6, 12]


def write_megatron(
    prefix: Path,
    documents: list[list[int]],
    code: int = 8,
    dtype: str = "<u2",
    sentences: int = 1,
) -> None:
    """As Megatron lays it out; each document may be cut into several sequences."""
    pieces = [
        [piece for piece in np.array_split(np.array(document, dtype), sentences) if len(piece)]
        for document in documents
    ]
    flat = [piece for document in pieces for piece in document]
    lengths = np.array([len(piece) for piece in flat], "<i4")
    ends = np.cumsum(lengths, dtype=np.int64) * np.dtype(dtype).itemsize
    pointers = np.concatenate([[0], ends[:-1]]).astype("<i8")
    edges = np.concatenate([[0], np.cumsum([len(document) for document in pieces])]).astype("<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(flat), len(edges))
    numbers = lengths.tobytes() + pointers.tobytes() + edges.tobytes()
    prefix.with_suffix(".idx").write_bytes(header + numbers)
    prefix.with_suffix(".bin").write_bytes(b"".join(piece.tobytes() for piece in flat))


def write_datatrove(path: Path, documents: list[list[int]], dtype: str = "<u2") -> None:
    tokens = np.concatenate([np.array(document, dtype) for document in documents])
    ends = np.cumsum([len(document) for document in documents]).astype("<u8")
    path.write_bytes(tokens.tobytes())
    Path(f"{path}.index").write_bytes(ends.tobytes())
    Path(f"{path}.metadata").write_text(f"some/tokenizer|2\n{len(tokens)}\n{len(tokens)} T")


def read_all(stream: TokenStream) -> list[int]:
    out: NDArray[np.int64] = np.zeros(stream.tokens, np.int64)
    stream.read_tokens(0, stream.tokens, out)
    return out.tolist()


def check_ranges(stream: TokenStream, tokens: list[int], starts: list[int]) -> None:
    assert stream.tokens == len(tokens) and stream.documents == len(starts)
    for first in range(len(tokens)):
        for past in range(first, len(tokens) + 1):
            out = np.zeros(past - first, np.int64)
            stream.read_tokens(first, past - first, out)
            assert out.tolist() == tokens[first:past]
            found = stream.document_starts(first, past - first).tolist()
            assert found == [start for start in starts if first <= start < past]


@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (3, "<i2")])
@pytest.mark.parametrize("sentences", [1, 2])
def test_megatron_files_are_a_stream(tmp_path: Path, code: int, dtype: str, sentences: int) -> None:
    write_megatron(tmp_path / "text", DOCUMENTS, code, dtype, sentences)
    for name in ("text", "text.bin", "text.idx", "."):
        check_ranges(open_stream(tmp_path / name, vocab=20), STREAM, STARTS)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_datatrove_files_are_a_stream(tmp_path: Path, dtype: str) -> None:
    write_datatrove(tmp_path / "00000_unshuffled.ds", DOCUMENTS, dtype)
    for name in ("00000_unshuffled.ds", "."):
        check_ranges(open_stream(tmp_path / name, vocab=20), STREAM, STARTS)


@pytest.mark.parametrize("write", [write_megatron, write_datatrove])
def test_several_files_follow_each_other_by_name(
    tmp_path: Path, write: Callable[[Path, list[list[int]]], None]
) -> None:
    for name, documents in (("b", DOCUMENTS[2:]), ("a", DOCUMENTS[:2])):
        write(tmp_path / f"{name}.ds", documents)
    stream = open_stream(tmp_path, vocab=20)
    check_ranges(stream, STREAM, STARTS)
    assert Path(stream.place(7).file).stem == "b" and stream.place(7).token == 1


def test_the_fingerprint_of_files_in_place_follows_their_content(tmp_path: Path) -> None:
    prints = []
    for name, documents in (
        ("x", DOCUMENTS),
        ("y", DOCUMENTS),
        ("z", [[4, 6, 7, 0], *DOCUMENTS[1:]]),
    ):
        (tmp_path / name).mkdir()
        write_datatrove(tmp_path / name / "a.ds", documents)
        prints.append(open_stream(tmp_path / name).fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_a_token_outside_the_vocabulary_is_found_with_its_block(tmp_path: Path) -> None:
    write_megatron(tmp_path / "text", DOCUMENTS)
    open_stream(tmp_path / "text", vocab=15).check(0, len(STREAM))
    with pytest.raises(DataError, match=r"text\.bin: block 0 holds token 14.*vocabulary of 14"):
        open_stream(tmp_path / "text", vocab=14).check(0, len(STREAM))


def overwrite(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def shorten(name: str, count: int) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / name).write_bytes((folder / name).read_bytes()[:-count]) and None
    )


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (shorten("m.bin", 2), r"m\.bin: is truncated: 26 bytes, where the corpus says 28"),
        (shorten("m.idx", 3), r"m\.idx: is truncated"),
        (overwrite("m.idx", b"MMIDIDX\x00\x00" + b"\x00" * 9), r"m\.idx: is truncated"),
        (overwrite("m.idx", b"x" * 60), "no Megatron index"),
        (
            overwrite("m.idx", b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 7, 0, 0)),
            "type 7.*wrong dtype",
        ),
        (lambda folder: (folder / "m.bin").unlink(), r"m\.bin.*missing"),
    ],
)
def test_damaged_megatron_files_are_refused_with_the_reason(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    write_megatron(tmp_path / "m", DOCUMENTS)
    damage(tmp_path)
    with pytest.raises(DataError, match=reason):
        read_all(open_stream(tmp_path / "m"))


def test_a_megatron_file_cut_in_half_is_found_when_it_is_opened(tmp_path: Path) -> None:
    write_megatron(tmp_path / "m", DOCUMENTS)
    shorten("m.bin", 14)(tmp_path)
    with pytest.raises(DataError, match=r"m\.bin: is .*truncated: 14 bytes, where the corpus"):
        open_stream(tmp_path / "m")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (shorten("d.ds", 3), r"d\.ds: has 25 bytes.*truncated, or wrong dtype"),
        (shorten("d.ds.index", 3), r"d\.ds\.index: is truncated"),
        (lambda folder: (folder / "d.ds.index").unlink(), r"d\.ds\.index.*missing"),
        (lambda folder: (folder / "d.ds").unlink(), r"d\.ds: is missing"),
    ],
)
def test_damaged_datatrove_files_are_refused_with_the_reason(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    write_datatrove(tmp_path / "d.ds", DOCUMENTS)
    damage(tmp_path)
    with pytest.raises(DataError, match=reason):
        open_stream(tmp_path / "d.ds")


def test_files_of_different_types_are_no_corpus(tmp_path: Path) -> None:
    write_datatrove(tmp_path / "a.ds", DOCUMENTS)
    write_datatrove(tmp_path / "b.ds", DOCUMENTS, "<u4")
    with pytest.raises(DataError, match=r"different token types \(uint16, uint32\)"):
        open_stream(tmp_path)


def test_an_unfinished_corpus_of_shards_is_not_taken_for_another_format(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, 100, 0, file_bytes=20) as writer:
        writer.write(range(1, 26))
    assert (tmp_path / "shard-00000.idx").exists()
    with pytest.raises(DataError, match=r"no manifest\.json"):
        open_stream(tmp_path)


def test_sources_made_with_different_tokenizers_are_refused(tmp_path: Path) -> None:
    for name, tokenizer in (("one", "a" * 64), ("two", "b" * 64), ("three", "a" * 64)):
        with ShardWriter(tmp_path / name, 100, 0, tokenizer) as writer:
            writer.write([1, 2])
            writer.finish()
    write_datatrove(tmp_path / "d.ds", DOCUMENTS)
    streams = {name: open_stream(tmp_path / name) for name in ("one", "three", "d.ds")}
    refuse_mixed_tokenizers(streams)
    with pytest.raises(DataError, match=r"two: was made with tokenizer bbbb.*one with aaaa"):
        refuse_mixed_tokenizers({**streams, "two": open_stream(tmp_path / "two")})


MASK = [0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1]


def write_masked(path: Path, mask: list[int] = MASK) -> None:
    write_datatrove(path, DOCUMENTS)
    Path(f"{path}.loss").write_bytes(bytes(mask))


@pytest.mark.parametrize(("index", "count"), [(0, 1), (0, 2), (1, 2)])
def test_labels_that_a_loss_mask_leaves_out_carry_no_weight(
    tmp_path: Path, index: int, count: int
) -> None:
    write_masked(tmp_path / "a.ds")
    data = Data(source="shards", path=str(tmp_path), sequence=3, prefetch=0)
    with Feed(data, 20, 4, 1, index, count) as feed:
        step = feed.next(feed.start())
        which, rows = feed.reader.locate(range(index * 2, 4))
    assert which[0] == 0
    real = 0
    for batch, row in zip(step.micro_batches, rows, strict=False):
        first = 3 * row
        expected = [
            STREAM[at] if MASK[at] else -100 for at in range(first + 1, first + 4)
        ]  # the label of a position is the token after it
        assert batch.tokens[0].tolist() == STREAM[first : first + 3]
        assert batch.labels[0].tolist() == expected
        real += sum(label >= 0 for label in expected)
    assert step.real_tokens == real and step.damaged == 0


def test_a_loss_mask_is_cut_with_the_held_out_documents(tmp_path: Path) -> None:
    write_masked(tmp_path / "a.ds")
    stream = open_stream(tmp_path)
    assert isinstance(stream, FileStream)
    record_held_out(stream, 0.5, HeldOut(np.array([4]), np.array([2]), 1))
    for split, expected in (("validation", MASK[4:6]), ("train", MASK[:4] + MASK[6:])):
        side = open_stream(tmp_path, 20, 0.5, split)  # type: ignore[arg-type]
        found = np.zeros(side.tokens, np.uint8)
        side.read_mask(0, side.tokens, found)
        assert side.masked and found.tolist() == expected


def test_a_loss_mask_is_part_of_the_corpus_and_must_fit_it(tmp_path: Path) -> None:
    write_datatrove(tmp_path / "a.ds", DOCUMENTS)
    before = open_stream(tmp_path).fingerprint
    write_masked(tmp_path / "a.ds")
    assert open_stream(tmp_path).fingerprint != before
    write_masked(tmp_path / "a.ds", MASK[:-1])
    with pytest.raises(DataError, match=r"a\.ds\.loss: is truncated: 13 bytes"):
        open_stream(tmp_path)
    write_masked(tmp_path / "a.ds")
    write_datatrove(tmp_path / "b.ds", DOCUMENTS)
    with pytest.raises(DataError, match=r"not for b\.ds"):
        open_stream(tmp_path)


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus in place with recorded checksums of blocks of eight bytes."""
    monkeypatch.setattr("phalanx.data.corpus.sums.BLOCK_BYTES", 8)
    monkeypatch.setattr("phalanx.data.corpus.foreign.BLOCK_BYTES", 8)
    write_masked(tmp_path / "a.ds")
    write_masked(tmp_path / "b.ds")
    stream = open_stream(tmp_path)
    assert isinstance(stream, ForeignStream) and not verify(tmp_path).checksums
    record_sums(tmp_path, stream.paths)
    return tmp_path


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "at", "block"),
    [("a.ds", 0, 0), ("b.ds", 17, 2), ("b.ds", 27, 3), ("b.ds.index", 9, 1), ("a.ds.loss", 13, 1)],
)
def test_recorded_checksums_name_the_damaged_block(
    recorded: Path, name: str, at: int, block: int
) -> None:
    assert verify(recorded, 20).checksums
    flip(recorded / name, at)
    with pytest.raises(DataError, match=rf"{name}: block {block} .*damaged.*recorded"):
        verify(recorded, 20)


def test_recorded_checksums_are_compared_while_reading(recorded: Path) -> None:
    flip(recorded / "b.ds", 4)  # token 8 becomes 9: in the vocabulary, but wrong
    data = Data(source="shards", path=str(recorded), sequence=2, prefetch=0, on_damage="weightless")
    with Feed(data, 20, 13, 1, 0, 1) as feed:
        assert feed.next(feed.start()).damaged > 0


def test_a_record_of_other_files_is_refused_until_made_again(recorded: Path) -> None:
    write_masked(recorded / "c.ds")
    with pytest.raises(DataError, match=r"other names or sizes.*data checksum"):
        open_stream(recorded)
    flip(recorded / "checksums.crc32c", 60)
    with pytest.raises(DataError, match="wrong checksum"):
        open_stream(recorded)
    forget_sums(recorded)
    stream = open_stream(recorded)
    assert isinstance(stream, ForeignStream)
    record_sums(recorded, stream.paths)
    assert verify(recorded, 20).checksums


def test_a_corpus_with_recorded_checksums_is_proved_while_staged(recorded: Path) -> None:
    copy = recorded.parent / "copy"
    stage(recorded, copy)
    assert verify(copy, 20).checksums
    flip(recorded / "b.ds", 9)
    with pytest.raises(DataError, match=r"b\.ds: block 1 is damaged"):
        stage(recorded, copy.with_name("other"))
