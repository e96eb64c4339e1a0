"""One rank's file: safetensors layout behind a header of whole pages, and its sidecar."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.checkpoint.format.direct import ALIGN_BYTES, CHUNK_BYTES
from phalanx.checkpoint.format.geometry import TensorPiece

LENGTH_BYTES = 8  # of the header's length, which safetensors puts first
FORMAT = "phalanx"


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says about its file. Its existence says that the file is durable."""

    rank: int
    step: int
    generation: int
    session: str
    shard_bytes: int
    header_bytes: int  # where the data starts
    chunk_bytes: int = CHUNK_BYTES
    sums: bytes = b""  # crc32c of every chunk, 4 bytes each, little-endian
    rng: bytes = b""  # the rank's random generators
    generators: tuple[bytes, ...] = ()  # those of ranks, where files were divided anew

    @property
    def chunk_sums(self) -> NDArray[np.uint32]:
        return np.frombuffer(self.sums, "<u4")


class StoredTensor(msgspec.Struct, frozen=True):
    """Where a tensor's part lies in a shard file."""

    dtype: str
    offset: tuple[int, ...]  # of the part in the whole tensor
    sizes: tuple[int, ...]
    start: int  # byte in the file


def build_header(pieces: Sequence[TensorPiece], note: dict[str, str]) -> bytes:
    """The head of a file that holds these pieces one after the other, padded to whole pages."""
    fields: dict[str, Any] = {}
    start = 0
    for piece in pieces:
        fields[piece.name] = {
            "dtype": piece.dtype,
            "shape": piece.box.sizes,
            "data_offsets": (start, start + piece.bytes),
        }
        start += piece.bytes
    offsets = {piece.name: piece.box.offset for piece in pieces}
    places = msgspec.json.encode(offsets).decode()
    text = msgspec.json.encode(
        {"__metadata__": {"format": FORMAT, "offsets": places} | note, **fields}
    )
    padded = -(-(LENGTH_BYTES + len(text)) // ALIGN_BYTES) * ALIGN_BYTES - LENGTH_BYTES
    return struct.pack("<Q", padded) + text.ljust(padded)


class _Field(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def parse_header(head: bytes | memoryview) -> dict[str, StoredTensor]:
    """The parts in a shard file, by tensor."""
    fields = msgspec.json.decode(head[LENGTH_BYTES:], type=dict[str, msgspec.Raw])
    note = msgspec.json.decode(fields.pop("__metadata__"), type=dict[str, str])
    offsets = msgspec.json.decode(note["offsets"], type=dict[str, tuple[int, ...]])
    stored = {}
    for name, raw in fields.items():
        field = msgspec.json.decode(raw, type=_Field)
        start = len(head) + field.data_offsets[0]
        stored[name] = StoredTensor(field.dtype, offsets[name], field.shape, start)
    return stored
