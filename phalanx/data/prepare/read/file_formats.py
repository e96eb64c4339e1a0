"""The documents of one file, whatever its format, each with its place in the file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import PurePosixPath
from typing import IO, NamedTuple

import msgspec

from phalanx.data.errors import DataError
from phalanx.data.prepare.read.html_text import html_to_text
from phalanx.data.prepare.read.inputs import (
    HTML_SUFFIXES,
    WARC_SUFFIXES,
    is_url,
    open_input,
)
from phalanx.data.prepare.read.warc import is_warc, read_warc
from phalanx.data.tokenize.inputs import (
    JSON_ERRORS,
    LINE_SUFFIXES,
    LONG_LINE,
    MOST_LINE_BYTES,
    PARQUET_SUFFIXES,
    UNPACK_ERRORS,
    open_unpacked,
    pass_line,
    unpack_reason,
)

MOST_TEXT_BYTES = 1 << 30  # of a plain text file, which is one document

_ROWS = 256  # of Parquet, decoded at once


class SourceDocument(NamedTuple):
    """A document as it was found."""

    text: str
    id: str  # as the file gives it, else ""
    record: int  # line, row or record of the file, from 1; 0: the file is one document
    offset: int  # first byte of the record in the unpacked file; of Parquet, the row


class UnreadableRecord(NamedTuple):
    """A record, or the rest of a file, that cannot be read, and why."""

    record: int
    reason: str


Found = SourceDocument | UnreadableRecord


def read_documents(path: str, text_key: str, id_key: str) -> Iterator[Found]:
    """Everything in a file, in its order; damage becomes a record that says so."""
    if path.endswith(PARQUET_SUFFIXES):
        yield from _parquet(path, text_key, id_key)
        return
    name = path.removesuffix(".gz").removesuffix(".zst")
    record = 0
    with open_input(path) as raw:
        stream = open_unpacked(raw, PurePosixPath(path))
        try:
            if name.endswith(LINE_SUFFIXES):
                documents = _lines(stream, text_key, id_key)
            elif name.endswith(WARC_SUFFIXES) or is_warc(stream):
                documents = _warc(stream)
            else:
                documents = _whole(stream, html=name.endswith(HTML_SUFFIXES))
            for found in documents:
                record = found.record
                yield found
        except UNPACK_ERRORS as error:
            yield UnreadableRecord(record + 1, unpack_reason(error))


def _lines(stream: IO[bytes], text_key: str, id_key: str) -> Iterator[Found]:
    decoder = msgspec.json.Decoder()
    offset = 0
    for number in count(1):
        line = stream.readline(MOST_LINE_BYTES)
        if not line:
            return
        line_offset, offset = offset, offset + len(line)
        if len(line) == MOST_LINE_BYTES and not line.endswith(b"\n"):
            offset += pass_line(stream)
            yield UnreadableRecord(number, LONG_LINE)
            continue
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except JSON_ERRORS as error:
            yield UnreadableRecord(number, f"is no JSON ({error})")
            continue
        text = record.get(text_key) if isinstance(record, dict) else None
        if isinstance(text, str):
            yield SourceDocument(text, _id(record.get(id_key)), number, line_offset)
        else:
            keys = ", ".join(map(str, record)) if isinstance(record, dict) else "no keys at all"
            yield UnreadableRecord(number, f"has no text under {text_key!r}, only {keys}")


def _id(value: object) -> str:
    return "" if value is None else str(value)


def _whole(stream: IO[bytes], html: bool) -> Iterator[Found]:
    content = stream.read(MOST_TEXT_BYTES + 1)
    if len(content) > MOST_TEXT_BYTES:
        yield UnreadableRecord(
            0, f"is a single text of more than {MOST_TEXT_BYTES:,} bytes: cut it"
        )
        return
    try:
        text = content.decode()
        yield SourceDocument(html_to_text(text) if html else text, "", 0, 0)
    except UnicodeDecodeError as error:
        yield UnreadableRecord(0, f"is not UTF-8 ({error.reason} at byte {error.start})")


def _warc(stream: IO[bytes]) -> Iterator[Found]:
    for number, page in enumerate(read_warc(stream), 1):
        if page.problem:
            yield UnreadableRecord(number, page.problem)
        elif page.text is not None:
            yield SourceDocument(page.text, page.id, number, page.offset)


def _parquet(path: str, text_key: str, id_key: str) -> Iterator[Found]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        rule = "reading Parquet needs the package pyarrow, which is not installed"
        raise DataError("read.inputs", path, rule, "pip install 'phalanx[parquet]'") from None
    row = 0
    try:
        # Its table of contents stands at the end: an object is fetched whole.
        file = pyarrow.BufferReader(open_input(path).read()) if is_url(path) else path
        with pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if text_key not in names:
                yield UnreadableRecord(0, f"has no column {text_key!r}, only {', '.join(names)}")
                return
            columns = [text_key, id_key] if id_key in names else [text_key]
            for batch in table.iter_batches(_ROWS, columns=columns, use_threads=False):
                ids = batch.column(1).to_pylist() if len(columns) == 2 else [""] * batch.num_rows
                for text, name in zip(batch.column(0).to_pylist(), ids, strict=True):
                    row += 1
                    if isinstance(text, str):
                        yield SourceDocument(text, _id(name), row, row - 1)
                    else:
                        reason = f"column {text_key!r} holds {type(text).__name__}, not text"
                        yield UnreadableRecord(row, reason)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        yield UnreadableRecord(row + 1, f"is no Parquet file, or damaged ({error})")
