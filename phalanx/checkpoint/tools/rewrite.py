"""Writing a checkpoint from whole tensors that come one by one: imports and other divisions.

Tensors are gathered until they fill a shard, which then is one rank's: memory is bounded by a
shard and a tensor, however large the checkpoint.
"""

from __future__ import annotations

import datetime
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from torch import Tensor

from phalanx.checkpoint.format.describe import Description
from phalanx.checkpoint.format.direct import WriteRate, write_file
from phalanx.checkpoint.format.folder import WriterLock, checkpoint_path
from phalanx.checkpoint.format.geometry import RankGroup
from phalanx.checkpoint.format.manifest import (
    MANIFEST_FILE,
    VERSION,
    CheckpointError,
    Extra,
    Manifest,
    Shard,
    shard_name,
    table_name,
)
from phalanx.checkpoint.format.shard import Sidecar
from phalanx.checkpoint.write.commit import create_manifest, publish_sidecar
from phalanx.checkpoint.write.snapshot import ShardSnapshot
from phalanx.data.corpus.checksum import crc32c
from phalanx.data.durable_files import sync_folder, write_synced

SHARD_BYTES = 1 << 30


def write_whole(
    folder: Path,
    step: int,
    tensors: Iterable[tuple[str, Tensor]],
    extra: Extra,
    shard_bytes: int = SHARD_BYTES,
    *,
    generators: Sequence[bytes] = (),
    origin: str = "",
) -> Path:
    """Write whole tensors as a checkpoint of a folder; nothing of it is left after an error.

    ``generators`` are the random ones of the ranks of the run that made it, in their order.
    """
    final = checkpoint_path(folder, step, extra.generation)
    if (final / MANIFEST_FILE).exists():
        raise CheckpointError(final, "is there already", "remove it first, or name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    lock = WriterLock(folder)
    try:
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir()
        sync_folder(folder)
        session = secrets.token_hex(4)
        written = [
            _write_shard(final, step, session, rank, batch, extra.generation)
            for rank, batch in enumerate(batches(tensors, shard_bytes))
        ]
        if not written:
            raise CheckpointError(final, "there are no tensors to write")
        shards = [
            _publish(final, sidecar, tuple(generators[rank :: len(written)]))
            for rank, (_, sidecar) in enumerate(written)
        ]
        manifest = Manifest(
            version=VERSION,
            step=step,
            generation=extra.generation,
            tokens=extra.tokens,
            cursor=extra.cursor,
            mesh=extra.mesh,
            world_size=len(written),
            config_hash=extra.config_hash,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            session=session,
            groups=tuple(group for group, _ in written),
            shards=tuple(shards),
            config=extra.config,
            ranks=len(generators),
            origin=origin,
        )
        create_manifest(final, manifest, 0)
    except BaseException:
        shutil.rmtree(final, ignore_errors=True)
        raise
    finally:
        lock.release(remove=True)
        with suppress(OSError):
            folder.rmdir()  # where nothing came to lie in it
    return final


def batches(tensors: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in order, as many together as fit, at least one."""
    batch: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if batch and size + tensor_bytes > most_bytes:
            yield batch
            batch, size = {}, 0
        batch[name] = tensor
        size += tensor_bytes
    if batch:
        yield batch


def _write_shard(
    path: Path, step: int, session: str, rank: int, batch: dict[str, Tensor], generation: int
) -> tuple[RankGroup, Sidecar]:
    """One rank's file; its tensors are whole and nobody else has them."""
    try:
        description = Description(batch)
    except ValueError as error:
        raise CheckpointError(path, str(error)) from None
    group = RankGroup(description.digest, ((rank, 1, 1),), ((((rank, 1, 1),)),))
    alone = RankGroup(description.digest, ((0, 1, 1),), (((0, 1, 1),),))
    snapshot = ShardSnapshot(description, alone)
    write_synced(path / table_name(description.digest, session), description.encoded)
    file = path / shard_name(rank, session)
    sums = write_file(file, snapshot.bytes, snapshot.stream(batch), WriteRate())
    sidecar = Sidecar(
        rank=rank,
        step=step,
        generation=generation,
        session=session,
        shard_bytes=snapshot.bytes,
        header_bytes=len(snapshot.header),
        sums=sums,
    )
    return group, sidecar


def _publish(path: Path, sidecar: Sidecar, generators: tuple[bytes, ...]) -> Shard:
    """Only when all are written it is known which ranks' generators a shard is dealt."""
    sidecar = msgspec.structs.replace(sidecar, generators=generators)
    publish_sidecar(path, sidecar)
    return Shard(sidecar.shard_bytes, crc32c(msgspec.json.encode(sidecar)))
