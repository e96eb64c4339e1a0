"""A save from durable bytes to one manifest: shard, sidecar, and whoever sees all sidecars.

Nothing here waits for another rank, and nobody is special: the last one to put its sidecar
sees them all. Used by ranks that write themselves and by keepers; it needs no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from phalanx.checkpoint.format.direct import WriteRate, write_file
from phalanx.checkpoint.format.folder import RESERVED_FILE, clear, prune, refuse_outdated
from phalanx.checkpoint.format.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    Manifest,
    Shard,
    encode,
    parse_sidecar_name,
    read_manifest,
    shard_name,
    sidecar_name,
    table_name,
)
from phalanx.checkpoint.format.shard import Sidecar
from phalanx.checkpoint.retention import RetentionPolicy
from phalanx.checkpoint.write.quota import admit
from phalanx.data.corpus.checksum import crc32c
from phalanx.data.durable_files import (
    create_once,
    sync_folder,
    write_atomically,
    write_synced,
)


class ArchiveTier(msgspec.Struct, frozen=True, kw_only=True):
    """A second tier that a checkpoint is copied to."""

    url: str  # of this run's checkpoints there
    root: str = ""  # what its quota covers; empty: this run's alone
    policy: RetentionPolicy = RetentionPolicy()
    retry_seconds: float = 3600.0


class LocalDisk(msgspec.Struct, frozen=True, kw_only=True):
    """The disk of a node, which a shard is written to before any shared folder."""

    root: str  # of all runs of this name
    run: str
    policy: RetentionPolicy = RetentionPolicy(last=3)


class SaveOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of a save, but for the bytes of its tensors."""

    path: str  # the checkpoint's folder
    policy: RetentionPolicy
    draft: Manifest  # all of it but the shards
    sidecar: Sidecar  # all of it but the checksums
    table: bytes = b""  # from the first rank of a group
    bytes_per_second: float = 0.0  # limit of the writing; 0: none
    delay_seconds: float = 0.0  # before the writing, so that not all ranks write at once
    total_bytes: int = 0  # of all ranks' shards
    write: bool = True  # otherwise the snapshot stays in memory
    prompt: bool = False  # sealed in memory and at the buddy first, and only then written
    archive: ArchiveTier | None = None  # where it is copied to when it is on disk
    local: LocalDisk | None = None  # the node's own disk, where it is written first


def write_shard(order: SaveOrder, buffers: Iterable[memoryview]) -> Sidecar:
    """Make this rank's file durable, then say so with its sidecar."""
    sidecar = msgspec.structs.replace(order.sidecar, sums=write_bytes(order, buffers))
    publish_sidecar(Path(order.path), sidecar)
    return sidecar


def write_bytes(order: SaveOrder, buffers: Iterable[memoryview]) -> bytes:
    """Make this rank's file durable; the checksums of its chunks."""
    path, side = Path(order.path), order.sidecar
    admit(order)
    path.mkdir(parents=True, exist_ok=True)
    sync_folder(path.parent)
    if order.table:
        digest = next(g.table for g in order.draft.groups if side.rank == g.ranks[0][0])
        write_synced(path / table_name(digest, side.session), order.table)
    file = path / shard_name(side.rank, side.session)
    time.sleep(order.delay_seconds)
    try:
        return write_file(file, side.shard_bytes, buffers, WriteRate(order.bytes_per_second))
    except BaseException:
        withdraw(order)  # what fills a disk must not stay on it
        raise


def withdraw(order: SaveOrder) -> None:
    """Remove what this rank wrote of a save that failed; its folder goes with the last rank's."""
    path, side = Path(order.path), order.sidecar
    if (path / MANIFEST_FILE).exists():
        return
    own = (f"rank-{side.rank:05d}.", *(["table-"] if order.table else []))
    with suppress(OSError):
        for file in path.glob(f"*.{side.session}.*"):
            if file.name.startswith(own):
                file.unlink()
        if side.rank == 0:
            (path / RESERVED_FILE).unlink(missing_ok=True)
        path.rmdir()


def is_published(order: SaveOrder) -> bool:
    """Whether others can see that this rank's file is durable."""
    path, side = Path(order.path), order.sidecar
    with suppress(OSError):
        return side.rank in seen_shards(path, side.session)
    return path.exists()  # nobody can tell: it may be


def publish_sidecar(path: Path, sidecar: Sidecar) -> None:
    """The rank's word that its file is durable; it appears whole."""
    text = msgspec.json.encode(sidecar)
    shard = Shard(sidecar.shard_bytes, crc32c(text))
    name = sidecar_name(sidecar.rank, sidecar.session, shard)
    write_atomically(path / name, text)


def seen_shards(path: Path, session: str) -> dict[int, Shard]:
    """The ranks whose sidecars are there, from one listing."""
    shards = {}
    with os.scandir(path) as entries:
        for entry in entries:
            if parsed := parse_sidecar_name(entry.name, session):
                shards[parsed[0]] = parsed[1]
    return shards


def try_commit(order: SaveOrder, committed: Callable[[], None] = lambda: None) -> bool:
    """Create the manifest if every sidecar is there; whether the checkpoint is complete now.

    ``committed`` is told first: removing what is no longer kept takes a while.
    """
    path, draft = Path(order.path), order.draft
    if (path / MANIFEST_FILE).exists():
        _refuse_foreign(path, draft)
        committed()
        return True
    try:
        seen = seen_shards(path, draft.session)
    except FileNotFoundError:  # a newer checkpoint is complete and this one was cleared away
        return False
    if len(seen) < draft.world_size:
        return False
    refuse_outdated(path.parent, draft.generation)
    shards = tuple(seen[rank] for rank in range(draft.world_size))
    complete = msgspec.structs.replace(draft, shards=shards)
    first = create_manifest(path, complete, order.sidecar.rank)
    if not first:
        _refuse_foreign(path, draft)
    (path / RESERVED_FILE).unlink(missing_ok=True)
    doomed = prune(path.parent, order.policy, path) if first else []
    committed()
    clear(doomed)
    return True


def create_manifest(path: Path, manifest: Manifest, rank: int) -> bool:
    """The commit: one conditional create. False if somebody else was first."""
    return create_once(path / MANIFEST_FILE, encode(manifest), f"{rank}.{manifest.session}.tmp")


def _refuse_foreign(path: Path, draft: Manifest) -> None:
    if read_manifest(path).session != draft.session:
        problem = f"step {draft.step} of generation {draft.generation} is there already"
        raise CheckpointError(path, problem, "save with a higher generation, or remove it first")
