"""The index beside a shard: block checksums, and where its documents start.

A header of 64 bytes, then little-endian 32-bit numbers: a CRC-32C for each block, the first
token of each document that starts in the shard, and a hash of each of these documents, which
decides whether it is held out.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.data.corpus.checksum import crc32c

HASH_SPAN = 1 << 32  # hashes are uniform on range(HASH_SPAN)

_HEADER = struct.Struct("<8sIIQQQ24x")  # magic, version, block bytes, tokens, blocks, documents
_MAGIC = b"PHXINDEX"
_VERSION = 2


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """Contents of an index file."""

    tokens: int
    block_bytes: int
    sums: NDArray[np.uint32]  # [blocks] CRC-32C of each block of the shard
    starts: NDArray[np.uint32]  # [documents] first token within the shard
    hashes: NDArray[np.uint32]  # [documents]

    def encode(self) -> bytes:
        """The bytes of the index file."""
        counts = (self.tokens, len(self.sums), len(self.starts))
        header = _HEADER.pack(_MAGIC, _VERSION, self.block_bytes, *counts)
        numbers = [np.asarray(part, "<u4") for part in (self.sums, self.starts, self.hashes)]
        return header + b"".join(part.tobytes() for part in numbers)


def decode_index(data: NDArray[np.uint8], checksum: int | None) -> ShardIndex:
    """An index over ``data``, without copying it; ValueError says what is wrong with it.

    ``checksum`` proves every byte, and costs reading every byte: None where this is not wanted.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"is truncated: {len(data)} bytes")
    magic, version, block_bytes, tokens, blocks, documents = _HEADER.unpack_from(data.data)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(f"is no index of version {_VERSION}")
    expected = index_bytes(blocks, documents)
    if len(data) != expected:
        raise ValueError(f"has {len(data)} bytes, where its header asks for {expected}")
    if checksum is not None and (found := crc32c(data.data)) != checksum:
        raise ValueError(
            f"is damaged: checksum {found:08x}, where the manifest says {checksum:08x}"
        )
    numbers = data[_HEADER.size :].view("<u4")
    sums, starts, hashes = np.split(numbers, [blocks, blocks + documents])
    return ShardIndex(tokens, block_bytes, sums, starts, hashes)


def index_bytes(blocks: int, documents: int) -> int:
    """Size of an index file."""
    return _HEADER.size + 4 * (blocks + 2 * documents)


def document_hash(content: bytes) -> int:
    """Hash of a document (or of its beginning), uniform on range(HASH_SPAN)."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little")
