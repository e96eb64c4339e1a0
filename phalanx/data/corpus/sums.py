"""Checksums beside a corpus whose own format has none, made by one pass over its files.

A header, then a CRC-32C for each block of each file, in the order in which the corpus names them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.data.corpus.checksum import crc32c
from phalanx.data.corpus.mapped import map_bytes
from phalanx.data.corpus.writer import BLOCK_BYTES, beside
from phalanx.data.durable_files import write_atomically
from phalanx.data.errors import DataError

RECORD_NAME = "checksums.crc32c"

_HEADER = struct.Struct("<8sII16sQQ")  # magic, version, block bytes, files, blocks, crc
_MAGIC = b"PHXSUMS\x00"
_VERSION = 1


class RecordedSums:
    """What each block of some files was when its checksum was recorded."""

    def __init__(self, sums: dict[Path, NDArray[np.uint32]], block_bytes: int) -> None:
        self.sums, self.block_bytes = sums, block_bytes

    def refuse_damage(self, path: Path, first: int, length: int) -> None:
        """Compare all blocks of a file that hold bytes [first, first + length)."""
        content = map_bytes(path)
        for block in range(first // self.block_bytes, -(-(first + length) // self.block_bytes)):
            data = content[block * self.block_bytes : (block + 1) * self.block_bytes]
            actual, expected = crc32c(data.data), int(self.sums[path][block])
            if actual != expected:
                rule = (
                    f"block {block} (bytes {block * self.block_bytes} on) is damaged: checksum "
                    f"{actual:08x}, where {expected:08x} was recorded"
                )
                fix = "restore the file; if it was changed on purpose, record its checksums again"
                raise DataError("data.path", path, rule, fix)


def record_sums(
    home: Path, paths: Sequence[Path], progress: Callable[[int], None] = lambda read: None
) -> Path:
    """Read all files once and write their checksums beside the corpus."""
    files = []
    for path in paths:
        content = map_bytes(path)
        for first in range(0, len(content), BLOCK_BYTES):
            block = content[first : first + BLOCK_BYTES]
            files.append(crc32c(block.data))
            progress(len(block))
    body = np.array(files, "<u4").tobytes()
    header = _HEADER.pack(
        _MAGIC, _VERSION, BLOCK_BYTES, _identity(home, paths), len(files), crc32c(body)
    )
    record = beside(home, RECORD_NAME)
    write_atomically(record, header + body)
    return record


def forget_sums(home: str | Path) -> None:
    """Remove a record, as of files that were changed on purpose."""
    beside(Path(home), RECORD_NAME).unlink(missing_ok=True)


def load_sums(home: Path, paths: Sequence[Path]) -> RecordedSums | None:
    """The recorded checksums of these files, or None where there is no record."""
    record = beside(home, RECORD_NAME)
    if not record.exists():
        return None

    def refuse(rule: str) -> DataError:
        fix = f"make it again with `phalanx data checksum {home}`, or remove it"
        return DataError("data.path", record, rule, fix)

    data = map_bytes(record)
    if len(data) < _HEADER.size:
        raise refuse("is truncated")
    magic, version, block_bytes, files, blocks, checksum = _HEADER.unpack_from(data.data)
    body = data[_HEADER.size :]
    if magic != _MAGIC or version != _VERSION or len(body) != 4 * blocks:
        raise refuse("is no record of checksums, or truncated")
    if crc32c(body.data) != checksum:
        raise refuse("is damaged: wrong checksum")
    if files != _identity(home, paths):
        raise refuse("was made for files of other names or sizes")
    counts = [-(-path.stat().st_size // block_bytes) for path in paths]
    edges = np.concatenate([[0], np.cumsum(counts)]).tolist()
    sums = body.view("<u4")
    parts = [sums[first:past] for first, past in pairwise(edges)]
    return RecordedSums(dict(zip(paths, parts, strict=True)), block_bytes)


def _identity(home: Path, paths: Sequence[Path]) -> bytes:
    """Names and sizes, not content: damage must be found in its block, not refused as a whole."""
    base = home if home.is_dir() else home.parent
    listed = [f"{path.relative_to(base)}|{path.stat().st_size}" for path in paths]
    return hashlib.sha256("\n".join(listed).encode()).digest()[:16]
