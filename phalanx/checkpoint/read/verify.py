"""Reading every byte of a checkpoint to prove it, and remembering what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from phalanx.checkpoint.format.direct import CHUNK_BYTES, WRITE_BYTES, aligned_buffer, chunk_sums
from phalanx.checkpoint.format.manifest import BadCheckpointError, CheckpointError, shard_name
from phalanx.checkpoint.format.shard import parse_header
from phalanx.checkpoint.format.source import NamedSource, ShardReader
from phalanx.checkpoint.format.tier import BAD_FILE, VERIFIED_FILE, open_source, open_tier
from phalanx.checkpoint.read.load import StoredTensors
from phalanx.checkpoint.read.parts import unequal_copies
from phalanx.checkpoint.write.node_disk import is_good, records_in

Report = Callable[[int], None]  # bytes done


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of reading every byte."""

    path: str
    bytes: int
    tensors: int
    problems: list[str]
    note: str = ""  # why it is not remembered
    unread: bool = False  # something may not be read or does not answer, which proves nothing


def verify(where: str, report: Report) -> VerifyResult:
    """Read every byte of a checkpoint and prove it; problems name shard and tensor.

    Copies that several pipeline stages wrote are compared too. The verdict is noted down beside
    the checkpoint: a bad one is not loaded again, one that was mended is.
    """
    try:
        source = open_source(where)
    except CheckpointError as error:
        if "://" not in where and (parts := list(records_in(Path(where)))):
            problems = [f"{p.shard.name} is not what was written" for p in parts if not is_good(p)]
            size = sum(part.record.sidecar.shard_bytes for part in parts)
            return VerifyResult(path=where, bytes=size, tensors=0, problems=problems)
        unread = isinstance(error.__cause__, PermissionError | ConnectionError)
        return VerifyResult(path=where, bytes=0, tensors=0, problems=error.problems, unread=unread)
    return _Proof(source, report).verdict(where)


class _Proof:
    """One reading of all shards."""

    def __init__(self, source: NamedSource, report: Report) -> None:
        self._source, self._report = source, report
        self._problems: list[str] = []
        self._bytes = 0
        self._away = False  # something could not be asked, which proves nothing

    def verdict(self, where: str) -> VerifyResult:
        tensors, stored = 0, None
        try:
            stored = StoredTensors(self._source)
            tensors = len(stored.tensors())
        except BadCheckpointError as error:
            self._problems += error.problems
        for rank in range(self._source.manifest.world_size):
            self._read(rank)
        if stored is not None and not self._problems:
            self._problems += unequal_copies(stored)
        problems = list(dict.fromkeys(self._problems))
        note = "" if self._away else remember(where, problems)
        return VerifyResult(
            path=where,
            bytes=self._bytes,
            tensors=tensors,
            problems=problems,
            note=note,
            unread=self._away,
        )

    def _read(self, rank: int) -> None:
        try:
            for size, problem in _verify_shard(self._source, rank):
                self._bytes += size
                self._report(size)
                self._problems += [problem] if problem else []
        except CheckpointError as error:
            self._problems += error.problems
        except OSError as error:
            self._away = self._away or isinstance(error, ConnectionError | PermissionError)
            name = shard_name(rank, self._source.manifest.session)
            self._problems.append(f"{name} cannot be read: {error.strerror or error}")


def remember(where: str, problems: list[str]) -> str:
    """Note down that a checkpoint was proved, or that it failed; why that cannot be done."""
    root, _, name = where.rstrip("/").rpartition("/")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    tier = open_tier(root)
    try:
        if problems:
            tier.write(f"{name}/{BAD_FILE}", msgspec.json.encode({"problems": problems}))
            tier.drop(f"{name}/{VERIFIED_FILE}")
        else:
            tier.write(f"{name}/{VERIFIED_FILE}", now.encode())
            tier.drop(f"{name}/{BAD_FILE}")
    except OSError as error:  # a read-only copy is none the worse
        return f"not remembered: {error.strerror or error}"
    return ""


def _verify_shard(source: NamedSource, rank: int) -> Iterator[tuple[int, str]]:
    name = shard_name(rank, source.manifest.session)
    sidecar = source.sidecar(rank)
    reader = source.open_shard(rank, direct=True)
    try:
        if reader.bytes != sidecar.shard_bytes:
            yield 0, f"{name} has {reader.bytes} bytes instead of {sidecar.shard_bytes}"
            return
        buffer, good = aligned_buffer(WRITE_BYTES), sidecar.chunk_sums.tolist()
        for start in range(0, reader.bytes, WRITE_BYTES):
            size = min(WRITE_BYTES, reader.bytes - start)
            count = reader.read(buffer[:size], start)
            first = start // CHUNK_BYTES
            for i, found in enumerate(chunk_sums(buffer[:count])):
                if found != good[first + i]:
                    low = (first + i) * CHUNK_BYTES
                    hit = _tensors_in(reader, sidecar.header_bytes, low, low + CHUNK_BYTES)
                    yield 0, f"{name} is corrupt in bytes {low} to {low + CHUNK_BYTES}: {hit}"
            yield size, "" if count == size else f"{name} ends early"
    finally:
        reader.close()


def _tensors_in(reader: ShardReader, header_bytes: int, low: int, high: int) -> str:
    """The tensors in a stretch of a shard, as far as its header can be read."""
    buffer = aligned_buffer(header_bytes)
    reader.read(buffer[:header_bytes], 0)
    try:
        stored = sorted(
            parse_header(bytes(buffer[:header_bytes])).items(), key=lambda s: s[1].start
        )
    except (msgspec.DecodeError, KeyError, UnicodeDecodeError):
        return "its header"
    ends = [tensor.start for _, tensor in stored[1:]] + [reader.bytes]
    hit = [
        n
        for (n, tensor), end in zip(stored, ends, strict=True)
        if tensor.start < high and end > low
    ]
    more = [f"and {len(hit) - 4} more"] * (len(hit) > 4)
    return ", ".join([*(["its header"] if low < header_bytes else []), *hit[:4], *more])
