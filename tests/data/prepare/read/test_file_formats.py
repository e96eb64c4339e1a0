"""Documents of every format, with their places; damage is named and what precedes it is kept."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import pytest

from phalanx.data import DataError
from phalanx.data.prepare.read.file_formats import SourceDocument, UnreadableRecord, read_documents

LINES = b'{"text": "one", "id": 7}\n\n{"text": "two \\u00e9"}\n'


def found(path: Path) -> list[SourceDocument | UnreadableRecord]:
    return list(read_documents(str(path), "text", "id"))


def test_json_lines_have_a_line_number_a_byte_offset_and_an_id(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    expected = [SourceDocument("one", "7", 1, 0), SourceDocument("two é", "", 3, 26)]
    assert found(tmp_path / "a.jsonl") == expected
    assert LINES[26:].startswith(b'{"text": "two')


def test_packed_lines_are_the_same(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (tmp_path / "c.ndjson.zst").write_bytes(zstandard.compress(LINES))
    expected = found(tmp_path / "a.jsonl")
    assert found(tmp_path / "b.jsonl.gz") == expected
    assert found(tmp_path / "c.ndjson.zst") == expected


def test_a_truncated_file_keeps_what_comes_before(tmp_path: Path) -> None:
    lines = b"".join(b'{"text": "%d"}\n' % number for number in range(50_000))
    packed = gzip.compress(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    *documents, last = found(tmp_path / "a.jsonl.gz")
    assert len(documents) > 1000 and isinstance(last, UnreadableRecord)
    assert last.record == len(documents) + 1 and "cannot be unpacked further" in last.reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "is no JSON"),
        (b'{"body": "x"}', "has no text under 'text', only body"),
        (b'{"text": null}', "has no text under 'text', only text"),
        (b"[1]", "has no text under 'text', only no keys at all"),
        (b'{"text": "\xff"}', "is no JSON"),
    ],
)
def test_a_bad_line_is_one_record_and_the_next_is_read(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    (tmp_path / "a.jsonl").write_bytes(line + b'\n{"text": "good"}\n')
    bad, good = found(tmp_path / "a.jsonl")
    assert isinstance(bad, UnreadableRecord) and reason in bad.reason and bad.record == 1
    assert isinstance(good, SourceDocument) and good.text == "good" and good.record == 2


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("zwei\r\nZeilen ü".encode())
    assert found(tmp_path / "a.txt") == [SourceDocument("zwei\r\nZeilen ü", "", 0, 0)]
    (tmp_path / "a.html.gz").write_bytes(gzip.compress(b"<p>one<p>two"))
    assert found(tmp_path / "a.html.gz") == [SourceDocument("one\n\ntwo", "", 0, 0)]
    (tmp_path / "b.txt").write_bytes(b"abc \xff")
    assert found(tmp_path / "b.txt") == [
        UnreadableRecord(0, "is not UTF-8 (invalid start byte at byte 4)")
    ]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": ["a", None, "b"], "id": [1, 2, 3], "other": [0, 0, 0]})
    parquet.write_table(table, tmp_path / "a.parquet")
    assert found(tmp_path / "a.parquet") == [
        SourceDocument("a", "1", 1, 0),
        UnreadableRecord(2, "column 'text' holds NoneType, not text"),
        SourceDocument("b", "3", 3, 2),
    ]
    parquet.write_table(table.select(["other"]), tmp_path / "b.parquet")
    assert found(tmp_path / "b.parquet") == [
        UnreadableRecord(0, "has no column 'text', only other")
    ]


def test_without_pyarrow_parquet_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match=r"pip install 'phalanx\[parquet\]'"):
        found(tmp_path / "a.parquet")


def test_a_line_of_nested_lists_is_one_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text('{"text": "a", "x": ' + "[" * 100_000 + '}\n{"text": "b"}\n')
    bad, good = found(path)
    assert isinstance(bad, UnreadableRecord) and bad.record == 1
    assert isinstance(good, SourceDocument) and good.text == "b"


def test_a_line_that_no_memory_holds_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phalanx.data.prepare.read.file_formats.MOST_LINE_BYTES", 100)
    path = tmp_path / "long.jsonl"
    long = '{"text": "' + "x" * 1000 + '"}\n'
    path.write_text('{"text": "a"}\n' + long + '{"text": "b"}\n')
    first, bad, last = found(path)
    assert isinstance(bad, UnreadableRecord) and bad.record == 2
    assert isinstance(first, SourceDocument) and isinstance(last, SourceDocument)
    assert (last.text, last.record, last.offset) == ("b", 3, 14 + len(long))
