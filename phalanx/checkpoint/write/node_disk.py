"""The disk of a node: shards of its own ranks, for which no shared folder is needed.

``<root>/<run>/step-00000010/`` holds a shard and a record of every rank of the node. Nobody
commits: a step counts when the records of all its ranks are found, each on some node.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from phalanx.checkpoint.format.direct import (
    WRITE_BYTES,
    WriteRate,
    aligned_buffer,
    chunk_sums,
    write_file,
)
from phalanx.checkpoint.format.manifest import shard_name
from phalanx.checkpoint.format.shard import Sidecar
from phalanx.checkpoint.format.source import FileReader
from phalanx.checkpoint.format.tier import DOOMED, PIN_FILE, FolderTier, read_scores, step_of
from phalanx.checkpoint.retention import RetentionEntry, decide
from phalanx.checkpoint.write.commit import LocalDisk, SaveOrder
from phalanx.data.corpus.checksum import crc32c
from phalanx.data.durable_files import sync_folder, write_atomically

LOCK_FILE = "in-use"  # of a run, held by the keepers that write into it
RECORD_SUFFIX = ".local"


class ShardRecord(msgspec.Struct, frozen=True):
    """All about one rank's shard but its bytes."""

    order: SaveOrder
    sidecar: Sidecar


class LocatedShard(msgspec.Struct, frozen=True):
    """A record and the step's folder that it lies in."""

    record: ShardRecord
    folder: Path

    @property
    def run(self) -> str:
        return self.folder.parent.name

    @property
    def shard(self) -> Path:
        side = self.record.sidecar
        return self.folder / shard_name(side.rank, side.session)


def write_local(order: SaveOrder, buffers: Iterable[memoryview]) -> bytes:
    """Make this rank's shard durable on the disk of its node; the checksums of its chunks."""
    target, side = order.local, order.sidecar
    assert target is not None
    folder = Path(target.root) / target.run / Path(order.path).name
    with _in_use(folder.parent):
        _free_space(order, target, folder)
        folder.mkdir(exist_ok=True)
        shard = folder / shard_name(side.rank, side.session)
        shard.unlink(missing_ok=True)  # of an attempt that failed
        try:
            sums = write_file(shard, side.shard_bytes, buffers, WriteRate())
            _write_record(folder, ShardRecord(order, msgspec.structs.replace(side, sums=sums)))
        except BaseException:
            shard.unlink(missing_ok=True)
            with suppress(OSError):  # other ranks' may be there
                folder.rmdir()
            raise
        sync_folder(folder.parent)
    return sums


def _write_record(folder: Path, record: ShardRecord) -> None:
    text = msgspec.json.encode(record)
    side = record.sidecar
    name = f"rank-{side.rank:05d}.{side.session}.{crc32c(text):08x}{RECORD_SUFFIX}"
    write_atomically(folder / name, text)


def find_records(root: Path, pattern: str = "rank-*") -> Iterator[LocatedShard]:
    """What lies on this node's disk; damaged records are passed over."""
    for path in sorted(root.glob(f"*/step-*/{pattern}{RECORD_SUFFIX}")):
        yield from _read_record(path)


def records_in(folder: Path) -> Iterator[LocatedShard]:
    """The records of one step's folder."""
    for path in sorted(folder.glob(f"rank-*{RECORD_SUFFIX}")):
        yield from _read_record(path)


def _read_record(path: Path) -> Iterator[LocatedShard]:
    """None where it is damaged."""
    match = re.fullmatch(r"rank-\d+\.\w+\.([0-9a-f]{8})\.local", path.name)
    with suppress(OSError, msgspec.MsgspecError):
        text = path.read_bytes()
        if match and step_of(path.parent.name) >= 0 and crc32c(text) == int(match[1], 16):
            yield LocatedShard(msgspec.json.decode(text, type=ShardRecord), path.parent)


def find_record(root: Path, rank: int, session: str, step: int) -> LocatedShard | None:
    """A certain rank's shard of a step."""
    if not re.fullmatch(r"\w+", session):  # it becomes part of a path
        return None
    for found in find_records(root, f"rank-{rank:05d}.{session}.*"):
        if found.record.order.draft.step == step:
            return found
    return None


def condemn(root: Path, rank: int, session: str, step: int) -> bool:
    """Have a shard that fails its proof found no more; whether it did fail."""
    stored = find_record(root, rank, session, step)
    if stored is None or is_good(stored):
        return False
    for path in stored.folder.glob(f"rank-{rank:05d}.{session}.*{RECORD_SUFFIX}"):
        path.rename(path.with_name(path.name + ".bad"))
    return True


def is_good(shard: LocatedShard) -> bool:
    """Whether a shard on this disk is what its record says."""
    side, sums, offset = shard.record.sidecar, list[int](), 0
    buffer = aligned_buffer(WRITE_BYTES)
    try:
        reader = FileReader(shard.shard, direct=True)
    except OSError:
        return False
    try:
        while offset < side.shard_bytes:
            count = reader.read(buffer[: min(WRITE_BYTES, side.shard_bytes - offset)], offset)
            sums += chunk_sums(buffer[:count])
            offset += WRITE_BYTES
    except OSError:
        return False
    finally:
        reader.close()
    return np.array(sums, "<u4").tobytes() == side.sums


def _free_space(order: SaveOrder, target: LocalDisk, folder: Path) -> None:
    """Remove what is no longer kept; OSError where the quota leaves no room for one more."""
    runs = folder.parent.parent
    for doomed in runs.glob(f"*/step-*{DOOMED}"):  # of a removal that was cut short
        shutil.rmtree(doomed, ignore_errors=True)
    steps = [path for path in folder.parent.glob("step-*") if path != folder]
    scores = read_scores(Path(order.path).parent)
    entries = [_entry(path, scores) for path in steps if step_of(path.name) >= 0]
    # Counted with the one to come, of which only the place is reserved here.
    policy = msgspec.structs.replace(target.policy, last=max(1, target.policy.last - 1))
    used = FolderTier(runs).bytes_below() - sum(entry.bytes for entry in entries)
    decision = decide(entries, policy, other_bytes=used + order.sidecar.shard_bytes)
    if decision.excess_bytes:
        over = f"{decision.excess_bytes / 1e9:.2f} GB above checkpoint.local.quota_gb"
        raise OSError(f"one more shard would be {over}")
    for name in decision.removed:
        _remove(folder.parent / name)
    if len(entries) >= policy.last:
        for run in runs.iterdir():
            if run != folder.parent and run.is_dir() and not _is_in_use(run):
                shutil.rmtree(run, ignore_errors=True)


def _entry(path: Path, scores: dict[int, float]) -> RetentionEntry:
    step = step_of(path.name)
    pinned = (path / PIN_FILE).exists()
    return RetentionEntry(path.name, step, FolderTier(path).bytes_below(), scores.get(step), pinned)


def _remove(path: Path) -> None:
    with suppress(OSError):  # another rank of this node does the same
        doomed = path.with_name(path.name + DOOMED)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def _in_use(run: Path) -> Iterator[None]:
    """Nobody else removes this run's folder meanwhile."""
    run.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(run / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def _is_in_use(run: Path) -> bool:
    try:
        descriptor = os.open(run / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
