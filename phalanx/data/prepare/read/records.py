"""The documents of one file, whatever its format, each with its place in the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from phalanx.data.errors import DataError
from phalanx.data.prepare.read.warc import is_warc, read_warc
from phalanx.data.tokenize.inputs import (
    COMPRESSIONS,
    LINE_SUFFIXES,
    PARQUET_SUFFIXES,
    TEXT_SUFFIXES,
    UNPACK_ERRORS,
    open_unpacked,
    unpack_reason,
)

WARC_SUFFIXES = (".warc", ".wet")
SUFFIXES = (
    *(
        name + packed
        for name in (*TEXT_SUFFIXES, *LINE_SUFFIXES, *WARC_SUFFIXES)
        for packed in COMPRESSIONS
    ),
    *PARQUET_SUFFIXES,
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


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files that paths, folders and glob patterns name, sorted, each once."""
    files: set[Path] = set()
    for pattern in patterns:
        matches = list(_matches(pattern))
        for path in matches:
            if path.is_dir():
                files.update(each for each in path.rglob("*") if each.name.endswith(SUFFIXES))
            else:
                files.add(path)
        if not matches:
            rule = "matches no file and no folder"
            raise DataError("read.inputs", pattern, rule, "correct the path or the pattern")
    found = sorted(path for path in files if path.is_file())
    if not found:
        rule = f"no file with suffix {', '.join(SUFFIXES)} was found"
        raise DataError("read.inputs", " ".join(patterns), rule, "name files, or other folders")
    return found


def _matches(pattern: str) -> Iterator[Path]:
    """Files and folders that a path or a pattern such as ``raw/**/*.jsonl.gz`` names."""
    parts = Path(pattern).parts
    wild = next((at for at, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    base = Path(*parts[:wild])
    if wild < len(parts):
        yield from base.glob(str(Path(*parts[wild:])))
    elif base.exists():
        yield base


def read_documents(path: Path, text_key: str, id_key: str) -> Iterator[Found]:
    """Everything in a file, in its order; damage becomes a record that says so."""
    if path.name.endswith(PARQUET_SUFFIXES):
        yield from _parquet(path, text_key, id_key)
        return
    name = path.name.removesuffix(".gz").removesuffix(".zst")
    record = 0
    with path.open("rb", buffering=0) as raw:
        stream = open_unpacked(raw, path)
        try:
            if name.endswith(LINE_SUFFIXES):
                documents = _lines(stream, text_key, id_key)
            elif name.endswith(WARC_SUFFIXES) or is_warc(stream):
                documents = _warc(stream)
            else:
                documents = _whole(stream)
            for found in documents:
                record = found.record
                yield found
        except UNPACK_ERRORS as error:
            yield UnreadableRecord(record + 1, unpack_reason(error))


def _lines(stream: IO[bytes], text_key: str, id_key: str) -> Iterator[Found]:
    decoder = msgspec.json.Decoder()
    offset = 0
    for number, line in enumerate(stream, 1):
        here, offset = offset, offset + len(line)
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except ValueError as error:  # as all of msgspec's are
            yield UnreadableRecord(number, f"is no JSON ({error})")
            continue
        text = record.get(text_key) if isinstance(record, dict) else None
        if isinstance(text, str):
            yield SourceDocument(text, _id(record.get(id_key)), number, here)
        else:
            keys = ", ".join(map(str, record)) if isinstance(record, dict) else "no keys at all"
            yield UnreadableRecord(number, f"has no text under {text_key!r}, only {keys}")


def _id(value: object) -> str:
    return "" if value is None else str(value)


def _whole(stream: IO[bytes]) -> Iterator[Found]:
    content = stream.read(MOST_TEXT_BYTES + 1)
    if len(content) > MOST_TEXT_BYTES:
        yield UnreadableRecord(0, f"is one text of more than {MOST_TEXT_BYTES:,} bytes: cut it")
        return
    try:
        yield SourceDocument(content.decode(), "", 0, 0)
    except UnicodeDecodeError as error:
        yield UnreadableRecord(0, f"is not UTF-8 ({error.reason} at byte {error.start})")


def _warc(stream: IO[bytes]) -> Iterator[Found]:
    for number, page in enumerate(read_warc(stream), 1):
        if page.problem:
            yield UnreadableRecord(number, page.problem)
        elif page.text is not None:
            yield SourceDocument(page.text, page.id, number, page.offset)


def _parquet(path: Path, text_key: str, id_key: str) -> Iterator[Found]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        rule = "reading Parquet needs the package pyarrow, which is not installed"
        raise DataError("read.inputs", path, rule, "pip install 'phalanx[parquet]'") from None
    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
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
