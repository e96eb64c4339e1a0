"""The index beside a shard: block checksums, and where its documents start.

A header of 64 bytes, then little-endian 32-bit numbers: a CRC-32C for each block, the first
token of each document that starts in the shard, and a hash of each of these documents, which
decides whether it is held out. Where only some tokens count as labels, pairs follow: the first of
each run of them, and the one past its last.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.data.corpus.checksum import crc32c

HASH_SPAN = 1 << 32  # hashes are uniform on range(HASH_SPAN)

# Magic, version, block bytes, tokens, blocks, documents, runs of labels.
_HEADER = struct.Struct("<8sIIQQQQ16x")
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
    labels: NDArray[np.uint32] = field(default_factory=lambda: np.empty((0, 2), np.uint32))
    # [runs, 2] of tokens that count as labels; none where the corpus says nothing about it

    def encode(self) -> bytes:
        """The bytes of the index file."""
        counts = (self.tokens, len(self.sums), len(self.starts), len(self.labels))
        header = _HEADER.pack(_MAGIC, _VERSION, self.block_bytes, *counts)
        numbers = (self.sums, self.starts, self.hashes, self.labels)
        return header + b"".join(np.asarray(part, "<u4").tobytes() for part in numbers)

    def read_labels(self, first: int, out: NDArray[Any]) -> None:
        """Fill ``out`` with 1 for each token from ``first`` on that counts as a label, else 0."""
        out[:] = 0
        past = first + len(out)
        # Both ends of runs ascend; bisect looks at a few of them, searchsorted would copy all.
        low = bisect_right(self.labels[:, 1], first)
        high = bisect_left(self.labels[:, 0], past, lo=low)
        for begin, end in self.labels[low:high].tolist():
            out[max(begin - first, 0) : end - first] = 1


def decode_index(data: NDArray[np.uint8], checksum: int | None) -> ShardIndex:
    """An index over ``data``, without copying it; ValueError says what is wrong with it.

    ``checksum`` proves every byte, and costs reading every byte: None where this is not wanted.
    """
    if len(data) < _HEADER.size:
        raise ValueError(f"is truncated: {len(data)} bytes")
    magic, version, block_bytes, tokens, *counts = _HEADER.unpack_from(data.data)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(f"is no index of version {_VERSION}")
    blocks, documents, runs = counts
    expected = index_bytes(blocks, documents, runs)
    if len(data) != expected:
        raise ValueError(f"has {len(data)} bytes, where its header asks for {expected}")
    if checksum is not None and (found := crc32c(data.data)) != checksum:
        raise ValueError(
            f"is damaged: checksum {found:08x}, where the manifest says {checksum:08x}"
        )
    numbers = data[_HEADER.size :].view("<u4")
    ends = [blocks, blocks + documents, blocks + 2 * documents]
    sums, starts, hashes, labels = np.split(numbers, ends)
    return ShardIndex(tokens, block_bytes, sums, starts, hashes, labels.reshape(runs, 2))


def index_bytes(blocks: int, documents: int, label_runs: int = 0) -> int:
    """Size of an index file."""
    return _HEADER.size + 4 * (blocks + 2 * documents + 2 * label_runs)


def document_hash(content: bytes) -> int:
    """Hash of a document (or of its beginning), uniform on range(HASH_SPAN)."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "little")
