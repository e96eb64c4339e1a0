"""Looking at checkpoints: what is there, whether every byte is what was written, what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from phalanx.checkpoint.direct import CHUNK_BYTES, WRITE_BYTES, aligned_buffer, chunk_sums
from phalanx.checkpoint.load import Stored
from phalanx.checkpoint.local import RECORD_SUFFIX
from phalanx.checkpoint.manifest import BadCheckpointError, CheckpointError, shard_name
from phalanx.checkpoint.shard import parse_header
from phalanx.checkpoint.source import NamedSource, ShardReader
from phalanx.checkpoint.tier import (
    BAD_FILE,
    PIN_FILE,
    VERIFIED_FILE,
    Tier,
    open_source,
    open_tier,
    step_of,
)

DIFF_BYTES = 64 << 20  # of a tensor, compared at a time

Report = Callable[[int], None]  # bytes done


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint in a list."""

    path: str
    step: int
    generation: int = 0
    tokens: int = 0
    bytes: int = 0
    ranks: int = 0
    mesh: dict[str, int] = {}
    created: str = ""
    age_seconds: float = 0.0
    pinned: bool = False
    verified: str = ""  # when every byte was last proved; UTC, ISO 8601
    parts: int = 0  # ranks whose shards lie here, of a node's own disk; they are no whole
    problems: list[str] = []  # why it is not to be trusted, so far as is known


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of reading every byte."""

    path: str
    bytes: int
    tensors: int
    problems: list[str]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that is not the same in two checkpoints."""

    name: str
    what: str  # only in one, shape, type, or values
    elements: int = 0  # that differ
    greatest: float = 0.0  # absolute difference


def find(where: str) -> Iterator[tuple[Tier, str]]:
    """Checkpoints at a place: one, a folder of them, a run, a folder of runs; incomplete too."""
    if "://" in where:
        root, _, last = where.rstrip("/").rpartition("/")
        tier = open_tier(where if step_of(last) < 0 else root)
        names = [last] if step_of(last) >= 0 else tier.names()
        yield from ((tier, name) for name in names)
        return
    path = Path(where)
    if step_of(path.name) >= 0:
        yield open_tier(path.parent), path.name
        return
    # A folder of checkpoints, a run, runs of a name, all runs; an archive has no rooms in its runs.
    for pattern in (
        "step-*",
        "checkpoints/step-*",
        "*/checkpoints/step-*",
        "*/*/checkpoints/step-*",
        "*/step-*",
        "*/*/step-*",
    ):
        found = sorted(p for p in path.glob(pattern) if p.is_dir() and step_of(p.name) >= 0)
        if found:
            yield from ((open_tier(p.parent), p.name) for p in found)
            return


def describe(tier: Tier, name: str) -> Listed:
    """What a checkpoint says about itself; nothing is proved but the manifest."""
    path, files = f"{tier.where}/{name}", tier.files(name)
    try:
        manifest = tier.source(name).manifest
    except (CheckpointError, OSError) as error:
        problems = error.problems if isinstance(error, CheckpointError) else [str(error)]
        parts = sum(file.endswith(RECORD_SUFFIX) for file in files)
        return Listed(
            path=path,
            step=step_of(name),
            problems=[] if parts else problems,
            bytes=sum(files.values()),
            parts=parts,
        )
    age = datetime.now(UTC) - datetime.fromisoformat(manifest.created)
    return Listed(
        path=path,
        step=manifest.step,
        generation=manifest.generation,
        tokens=manifest.tokens,
        bytes=manifest.total_bytes,
        ranks=manifest.world_size,
        mesh=manifest.mesh,
        created=manifest.created,
        age_seconds=age.total_seconds(),
        pinned=PIN_FILE in files,
        verified=tier.read(f"{name}/{VERIFIED_FILE}").decode() if VERIFIED_FILE in files else "",
        problems=["found bad before: see bad.json"] if BAD_FILE in files else [],
    )


def verify(where: str, report: Report) -> Verdict:
    """Read every byte of a checkpoint and prove it; problems name shard and tensor.

    Copies that several pipeline stages wrote are compared too. That all is good is noted down.
    """
    problems: list[str] = []
    done = tensors = 0
    try:
        source = open_source(where)
    except CheckpointError as error:
        return Verdict(path=where, bytes=0, tensors=0, problems=error.problems)
    stored: Stored | None = None
    try:
        stored = Stored(source)
        tensors = len(stored.tensors())
    except BadCheckpointError as error:
        problems += error.problems
    for rank in range(source.manifest.world_size):
        try:
            for size, problem in _verify_shard(source, rank):
                done += size
                report(size)
                problems += [problem] if problem else []
        except (CheckpointError, OSError) as error:
            found = error.problems if isinstance(error, CheckpointError) else [str(error)]
            problems += found
    if stored is not None and not problems:
        problems += _unequal_copies(stored)
    _note_verified(where, good=not problems)
    return Verdict(path=where, bytes=done, tensors=tensors, problems=problems)


def _note_verified(where: str, good: bool) -> None:
    root, _, name = where.rstrip("/").rpartition("/")
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError):  # a read-only copy is none the worse
        if good:
            open_tier(root).write(f"{name}/{VERIFIED_FILE}", now.encode())
        else:
            open_tier(root).drop(f"{name}/{VERIFIED_FILE}")


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
        slots = sorted(parse_header(bytes(buffer[:header_bytes])).items(), key=lambda s: s[1].start)
    except (msgspec.DecodeError, KeyError, UnicodeDecodeError):
        return "its header"
    ends = [slot.start for _, slot in slots[1:]] + [reader.bytes]
    hit = [n for (n, slot), end in zip(slots, ends, strict=True) if slot.start < high and end > low]
    return ", ".join([*(["its header"] if low < header_bytes else []), *hit[:4]])


def diff(one: str, other: str, report: Report) -> list[Difference]:
    """The tensors of two checkpoints that are not equal to the bit."""
    left, right = Stored(open_source(one)), Stored(open_source(other))
    ours, theirs = left.tensors(), right.tensors()
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs or name not in ours:
            found.append(Difference(name=name, what=f"only in {one if name in ours else other}"))
        elif ours[name] != theirs[name]:
            (shape, dtype), (shape2, dtype2) = ours[name], theirs[name]
            what = f"{tuple(shape)} {dtype} against {tuple(shape2)} {dtype2}"
            found.append(Difference(name=name, what=what))
        elif different := _compare(name, left, right):
            found.append(different)
        report(1)
    return found


def _compare(name: str, left: Stored, right: Stored) -> Difference | None:
    elements, greatest = 0, 0.0
    for a, b in zip(parts(left, name), parts(right, name), strict=True):
        if torch.equal(_bits(a), _bits(b)):
            continue
        elements += int((a != b).sum())
        greatest = max(greatest, float((a.double() - b.double()).abs().max()))
    if not elements:
        return None
    return Difference(name=name, what="values", elements=elements, greatest=greatest)


def parts(
    stored: Stored, name: str, most_bytes: int = DIFF_BYTES, copy: int = 0
) -> Iterator[Tensor]:
    """A whole tensor in pieces of rows that fit into little memory; each is proved."""
    shape, dtype = stored.tensors()[name]
    if not shape:
        whole = torch.empty(shape, dtype=dtype)
        stored.fill_rows(name, 0, whole, copy)
        yield whole
        return
    row_bytes = dtype.itemsize * max(1, shape[1:].numel())
    rows = max(1, most_bytes // row_bytes)
    for first in range(0, shape[0], rows):
        part = torch.empty((min(rows, shape[0] - first), *shape[1:]), dtype=dtype)
        stored.fill_rows(name, first, part, copy)
        yield part


def _unequal_copies(stored: Stored) -> Iterator[str]:
    """Tensors that several pipeline stages hold (a tied embedding) and that are not the same."""
    for name, count in stored.copies().items():
        for copy in range(1, count):
            pairs = zip(parts(stored, name), parts(stored, name, copy=copy), strict=True)
            if not all(torch.equal(_bits(a), _bits(b)) for a, b in pairs):
                yield f"{name} is held by {count} stages, whose copies are not equal"
                break


def _bits(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dim() else tensor.reshape(1)).view(torch.uint8)
