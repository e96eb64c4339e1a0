"""Documents out of pieces of input; what cannot be read is noted with its place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgspec

from phalanx.data.tokenize.inputs import JSON_ERRORS, InputPiece, cut_text

MOST_KEYS = 12  # of a record, that are named


class Unreadable(msgspec.Struct, frozen=True):
    """A record that was left out, and why."""

    file: int
    line: int  # line, row or member, from 1; 0: the file from some place on
    reason: str


class TextPart(NamedTuple):
    """Text of bounded length: a document, or one of its parts in order."""

    text: str
    first: bool  # the document begins here
    last: bool  # the document ends here


class RecordReader:
    """Takes documents out of pieces: the text of JSON lines is under ``text_key``."""

    def __init__(self, text_key: str) -> None:
        record = msgspec.defstruct("Record", [("text", str)], rename={"text": text_key}, gc=False)
        self._decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(record)
        self._text_key = text_key

    def parts(
        self, pieces: Iterable[InputPiece], unreadable: list[Unreadable]
    ) -> Iterator[TextPart]:
        """Parts of all documents; an empty document is one empty part."""
        for piece in pieces:
            content = piece.content
            if isinstance(content, bytes):
                for text in self._texts(content, piece, unreadable):
                    yield from _parts_of(text)
            elif piece.kind == "unreadable":
                unreadable.append(Unreadable(piece.file, piece.line, content))
            elif piece.first and piece.last:
                yield from _parts_of(content)
            else:
                yield TextPart(content, piece.first, piece.last)

    def _texts(self, lines: bytes, piece: InputPiece, unreadable: list[Unreadable]) -> list[str]:
        try:
            return [record.text for record in self._decoder.decode_lines(lines)]
        except JSON_ERRORS:  # look for the lines at fault one by one
            pass
        texts = []
        for at, line in enumerate(lines.split(b"\n")):
            if line.strip():
                try:
                    texts.append(self._decoder.decode(line).text)
                except JSON_ERRORS as error:
                    reason = self._reason(line, str(error))
                    unreadable.append(Unreadable(piece.file, piece.line + at, reason))
        return texts

    def _reason(self, line: bytes, error: str) -> str:
        """What is wrong with a line; where only its key is, which keys there are."""
        try:
            decoded = msgspec.json.decode(line)
        except JSON_ERRORS:
            return error
        if not isinstance(decoded, dict) or self._text_key in decoded:
            return error
        keys = ", ".join(f"`{key}`" for key in list(decoded)[:MOST_KEYS]) or "none"
        return f"has no key `{self._text_key}`, only {keys}"


def _parts_of(document: str) -> Iterator[TextPart]:
    parts = cut_text(document) or [""]
    for at, part in enumerate(parts):
        yield TextPart(part, first=at == 0, last=at == len(parts) - 1)
