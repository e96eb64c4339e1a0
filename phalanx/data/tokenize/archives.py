"""Text out of Parquet files and of the members of WebDataset tars."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from phalanx.data.errors import DataError
from phalanx.data.tokenize.inputs import JSON_ERRORS, InputPiece

_ROWS = 256  # decoded at once


def parquet_pieces(path: Path, number: int, text_key: str) -> Iterator[InputPiece]:
    """One document a row, from the column ``text_key``."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        rule = "reading Parquet needs the package pyarrow, which is not installed"
        raise DataError("input", path, rule, "pip install 'phalanx[parquet]'") from None
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        yield InputPiece(
            "unreadable", f"is no Parquet file ({error})", number, 0, path.stat().st_size
        )
        return
    with table:
        if text_key not in table.schema_arrow.names:
            rule = f"has no column {text_key!r}, only {', '.join(table.schema_arrow.names)}"
            raise DataError("input", path, rule, "name the column with --text-key")
        share = path.stat().st_size / max(1, table.metadata.num_rows)
        row, passed = 0, 0
        try:
            for batch in table.iter_batches(_ROWS, columns=[text_key], use_threads=False):
                for text in batch.column(0).to_pylist():
                    row += 1
                    input_bytes = int(row * share) - passed
                    passed += input_bytes
                    if isinstance(text, str):
                        yield InputPiece("text", text, number, row, input_bytes)
                    else:
                        reason = f"column {text_key!r} holds {type(text).__name__}, not text"
                        yield InputPiece("unreadable", reason, number, row, input_bytes)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            yield InputPiece("unreadable", f"is damaged ({error})", number, row + 1, 0)


def tar_pieces(
    stream: IO[bytes], number: int, text_key: str, progress: Callable[[], int]
) -> Iterator[InputPiece]:
    """One document a sample: its ``.txt``, or the key ``text_key`` of its ``.json``."""
    sample, member_number = _Sample(""), 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                member_number += 1
                if not member.isfile():
                    continue
                key, _, suffix = member.name.rpartition("/")[2].partition(".")
                key = f"{member.name.rpartition('/')[0]}/{key}"
                if key != sample.key:
                    yield from sample.pieces(number, text_key, progress)
                    sample = _Sample(key, member_number)
                if suffix in ("txt", "json"):
                    content = archive.extractfile(member)
                    assert content is not None  # it is a file
                    sample.parts[suffix] = content.read()
    except tarfile.TarError as error:
        reason = f"is no tar file, or truncated ({error})"
        yield InputPiece("unreadable", reason, number, member_number + 1, progress())
        return
    yield from sample.pieces(number, text_key, progress)


class _Sample:
    """The members of a tar that share a name up to its first dot."""

    def __init__(self, key: str, member: int = 0) -> None:
        self.key = key
        self.parts: dict[str, bytes] = {}
        self._member = member  # number of its first member

    def pieces(
        self, number: int, text_key: str, progress: Callable[[], int]
    ) -> Iterator[InputPiece]:
        """The sample's text, or why it has none; nothing before the first sample."""
        if self._member == 0:
            return
        try:
            text = self._text(text_key)
        except JSON_ERRORS as error:
            yield InputPiece("unreadable", f"{self.key}: {error}", number, self._member, progress())
        else:
            yield InputPiece("text", text, number, self._member, progress())

    def _text(self, text_key: str) -> str:
        if "txt" in self.parts:
            return self.parts["txt"].decode()
        if "json" not in self.parts:
            raise ValueError("the sample has no .txt and no .json")
        record = msgspec.json.decode(self.parts["json"])
        text = record.get(text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"its .json has no text under {text_key!r}")
        return text
