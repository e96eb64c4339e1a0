"""TensorBoard's event files, written directly.

The format is a few lines (length and checksum framed protobuf messages), while importing
TensorBoard takes half a second of a run's start and would make it a dependency of training.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


_CRC32C = _crc_table()


class EventFile:
    """Appends scalars that TensorBoard shows."""

    def __init__(self, folder: Path) -> None:
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.0"
        self._file = (folder / name).open("wb")
        self._append(_field(1, _double(time.time())) + _field(3, _bytes(b"brain.Event:2")))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add one value a tag at a step."""
        summary = b"".join(
            _field(1, _bytes(_field(1, _bytes(tag.encode())) + _field(2, _float(value))))
            for tag, value in values.items()
        )
        event = _field(1, _double(time.time())) + _field(2, _varint(step))
        self._append(event + _field(5, _bytes(summary)))

    def flush(self) -> None:
        """Make what was added visible to readers."""
        self._file.flush()

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _append(self, event: bytes) -> None:
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))


class _Wire(bytes):
    """An encoded protobuf value that knows its wire type."""

    kind: int


def _wire(kind: int, encoded: bytes) -> _Wire:
    wire = _Wire(encoded)
    wire.kind = kind
    return wire


def _field(number: int, value: _Wire) -> bytes:
    return bytes(_varint(number << 3 | value.kind)) + value


def _varint(value: int) -> _Wire:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return _wire(0, bytes(encoded))


def _double(value: float) -> _Wire:
    return _wire(1, struct.pack("<d", value))


def _float(value: float) -> _Wire:
    return _wire(5, struct.pack("<f", value))


def _bytes(value: bytes) -> _Wire:
    return _wire(2, bytes(_varint(len(value))) + value)


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)
