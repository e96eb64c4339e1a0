"""Every input format gives the same documents; what cannot be read is counted with its place."""

from __future__ import annotations

import gzip
import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from phalanx.data import DataError
from phalanx.data.tokenize import archives, inputs
from phalanx.data.tokenize.inputs import SUFFIXES, cut_text, find_files, read_pieces
from phalanx.data.tokenize.records import RecordReader, Unreadable

DOCUMENTS = ["one\ntwo\n", "naïve café 你好 🙂\r\n", "", "a <|endoftext|> b", "x" * 300]


def documents_in(
    path: Path, text_key: str = "text", first_piece: int = 0
) -> tuple[list[str], list[Unreadable]]:
    unreadable: list[Unreadable] = []
    pieces = (piece for _, _, piece in read_pieces([path], text_key, 0, first_piece))
    documents: list[str] = []
    for part in RecordReader(text_key).parts(pieces, unreadable):
        if part.first:
            documents.append("")
        documents[-1] += part.text
    return documents, unreadable


def as_lines(documents: list[str], key: str = "text") -> bytes:
    records = [{"id": at, key: document} for at, document in enumerate(documents)]
    return msgspec.json.Encoder().encode_lines(records)


def write_lines(path: Path, key: str) -> None:
    path.write_bytes(as_lines(DOCUMENTS, key))


def write_gzip(path: Path, key: str) -> None:
    path.write_bytes(gzip.compress(as_lines(DOCUMENTS, key)))


def write_zstd(path: Path, key: str) -> None:  # two frames, as concatenated files have
    lines = as_lines(DOCUMENTS, key)
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(lines[:50]) + compress(lines[50:]))


def write_parquet(path: Path, key: str) -> None:
    table = pyarrow.table({"id": list(range(len(DOCUMENTS))), key: DOCUMENTS})
    pyarrow.parquet.write_table(table, path, row_group_size=2)


def tar_of(members: list[tuple[str, bytes]]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def write_tar(path: Path, key: str) -> None:
    members = []
    for at, document in enumerate(DOCUMENTS):
        members.append((f"part/{at:04d}.jpg", b"no text"))
        if at % 2:
            members.append((f"part/{at:04d}.json", msgspec.json.encode({key: document})))
        else:
            members.append((f"part/{at:04d}.json", b'{"width": 3}'))
            members.append((f"part/{at:04d}.txt", document.encode()))
    path.write_bytes(tar_of(members))


def write_tar_zstd(path: Path, key: str) -> None:
    write_tar(path, key)
    path.write_bytes(zstandard.ZstdCompressor().compress(path.read_bytes()))


FORMATS: dict[str, Callable[[Path, str], None]] = {
    "a.jsonl": write_lines,
    "a.ndjson": write_lines,
    "a.jsonl.gz": write_gzip,
    "a.jsonl.zst": write_zstd,
    "a.parquet": write_parquet,
    "a.tar": write_tar,
    "a.tar.zst": write_tar_zstd,
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("key", ["text", "content"])
def test_every_format_gives_the_same_documents(
    tmp_path: Path, name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FORMATS[name](tmp_path / name, key)
    assert documents_in(tmp_path / name, key) == (DOCUMENTS, [])
    monkeypatch.setattr(inputs, "LINES_BYTES", 30)
    monkeypatch.setattr(inputs, "PIECE_CHARACTERS", 40)
    monkeypatch.setattr(archives, "_ROWS", 2)
    assert documents_in(tmp_path / name, key) == (DOCUMENTS, [])
    assert find_files([tmp_path]) == [tmp_path / name]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}[suffix]
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack("line\r\nnaïve\n".encode()))
    assert documents_in(path) == (["line\r\nnaïve\n"], [])


def test_a_long_text_is_cut_alike_in_a_file_and_in_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "PIECE_CHARACTERS", 10)
    for text in ("ab\n" * 30, "x" * 95, "a" * 10, "a" * 11, "a" * 19 + "\nb", "a" * 20 + "\nb"):
        path = tmp_path / "long.txt"
        path.write_text(text)
        pieces = [piece for _, _, piece in read_pieces([path], "text")]
        assert [piece.content for piece in pieces] == cut_text(text)
        assert [piece.first for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]


@pytest.mark.parametrize("name", FORMATS)
def test_reading_goes_on_from_any_piece(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "LINES_BYTES", 30)
    FORMATS[name](tmp_path / name, "text")
    whole = list(read_pieces([tmp_path / name], "text"))
    assert sum(piece.input_bytes for _, _, piece in whole) <= (tmp_path / name).stat().st_size
    for at in range(len(whole)):
        rest = list(read_pieces([tmp_path / name], "text", 0, at))
        assert [(file, number, piece.content) for file, number, piece in rest] == [
            (file, number, piece.content) for file, number, piece in whole[at:]
        ]


def test_unreadable_lines_are_left_out_and_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        b'{"text": "good one"}',
        b'{"text": "cut off',
        b"",
        b'{"other": "no text"}',
        b'{"text": 5}',
        b'{"text": "\xff\xfe"}',
        b'{"text": "good two", "text2": null}',
        b'["a list"]',
    ]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(lines))
    for piece_bytes in (1, 60, 1 << 20):
        monkeypatch.setattr(inputs, "LINES_BYTES", piece_bytes)
        documents, unreadable = documents_in(path)
        assert documents == ["good one", "good two"]
        assert [found.line for found in unreadable] == [2, 4, 5, 6, 8]
        assert "truncated" in unreadable[0].reason
        assert "`text`" in unreadable[1].reason


def test_rows_and_members_without_text_are_numbered(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["a", None, "c"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    documents, unreadable = documents_in(tmp_path / "a.parquet")
    assert documents == ["a", "c"] and [found.line for found in unreadable] == [2]
    members = [
        ("1.txt", b"a"),
        ("2.jpg", b"?"),
        ("3.json", b"{}"),
        ("4.txt", b"\xff"),
        ("5.txt", b"e"),
    ]
    (tmp_path / "a.tar").write_bytes(tar_of(members))
    documents, unreadable = documents_in(tmp_path / "a.tar")
    assert documents == ["a", "e"] and [found.line for found in unreadable] == [2, 3, 4]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.txt.gz", "a.txt.zst", "a.tar"])
def test_a_truncated_file_gives_what_it_has_and_is_named(tmp_path: Path, name: str) -> None:
    lines = as_lines([f"document {at} {'%x' % (at * 7919 % 65537)}" for at in range(20_000)])
    path = tmp_path / name
    if name == "a.tar":
        path.write_bytes(tar_of([("1.txt", b"whole"), ("2.txt", b"x" * 5000)])[:4000])
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines)[:-30_000])
    else:
        path.write_bytes(zstandard.ZstdCompressor().compress(lines)[:-30_000])
    documents, unreadable = documents_in(path)
    assert len(unreadable) == 1
    assert "truncated" in unreadable[0].reason or "unpacked" in unreadable[0].reason
    if name == "a.tar":
        assert documents == ["whole"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.tar"])
def test_a_file_that_is_something_else_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"this is plain text, whatever its name says" * 30)
    documents, unreadable = documents_in(tmp_path / name)
    assert documents == [] and len(unreadable) == 1


def test_a_missing_column_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", "content")
    with pytest.raises(DataError, match=r"no column 'text', only id, content.*--text-key"):
        documents_in(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [("zstandard", "a.jsonl.zst", "zstd"), ("pyarrow", "a.parquet", "parquet")],
)
def test_an_absent_package_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, extra: str
) -> None:
    FORMATS[name](tmp_path / name, "text")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"{module}, which is not installed.*phalanx\[{extra}\]"):
        documents_in(tmp_path / name)


def test_folders_are_searched_for_every_known_suffix(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        (tmp_path / f"file{suffix}").touch()
    (tmp_path / "picture.png").touch()
    assert len(find_files([tmp_path])) == len(SUFFIXES)
