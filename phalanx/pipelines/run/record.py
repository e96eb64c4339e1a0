"""The record of a run: an append-only file of events, each line chained by checksum."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import msgspec

from phalanx.cluster.pipelines.events import AnyEvent
from phalanx.data.durable_files import sync_folder

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(AnyEvent).decode
_CHECKSUM = 9  # eight digits and a blank


class RecordError(Exception):
    """A record is damaged."""


class PipelineRecord:
    """Appends events and syncs them to disk."""

    def __init__(self, path: Path) -> None:
        self.events, whole_bytes, self._checksum = _read(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(whole_bytes)  # of the last line, what a crash left
        sync_folder(path.parent)

    def append(self, event: AnyEvent) -> None:
        """Append an event."""
        text = _encode(event)
        self._checksum = zlib.crc32(text, self._checksum)
        self._file.write(b"%08x %s\n" % (self._checksum, text))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_record(path: Path) -> list[AnyEvent]:
    """All events; an unfinished last line is ignored."""
    return _read(path)[0]


def _read(path: Path) -> tuple[list[AnyEvent], int, int]:
    """Events, how many bytes they take, and the last checksum."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0, 0
    events: list[AnyEvent] = []
    whole_bytes = checksum = 0
    lines = data.split(b"\n")
    for number, encoded in enumerate(lines[:-1], 1):
        text = encoded[_CHECKSUM:]
        expected = zlib.crc32(text, checksum)
        if encoded[:_CHECKSUM] != b"%08x " % expected:
            if number == len(lines) - 1:
                break  # torn by a crash: a block of the last line was not written
            raise RecordError(f"{path}: line {number} is damaged, or one before it is missing")
        try:
            events.append(_decode(text))
        except msgspec.MsgspecError as error:
            raise RecordError(
                f"{path}: line {number} was written by another release: {error}"
            ) from None
        checksum, whole_bytes = expected, whole_bytes + len(encoded) + 1
    return events, whole_bytes, checksum
