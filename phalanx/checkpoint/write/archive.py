"""Copies of written shards in a second tier, made asynchronously and tried again.

The same rules as on the first: every rank's shard, then its sidecar; whoever sees all sidecars
creates the manifest. A store that is away costs nothing but time, and is complained about.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from phalanx.checkpoint.format.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    Shard,
    encode,
    parse_manifest,
    parse_sidecar_name,
    shard_name,
    sidecar_name,
    table_name,
)
from phalanx.checkpoint.format.shard import Sidecar
from phalanx.checkpoint.format.tier import Tier, open_tier, read_scores, retain
from phalanx.checkpoint.write.commit import SaveOrder
from phalanx.checkpoint.write.direct import WRITE_BYTES, WRITERS, aligned_buffer, chunk_sums
from phalanx.checkpoint.write.quota import admit_copy
from phalanx.data.corpus.checksum import crc32c

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 5.0
COMPLAINT_SECONDS = 60.0  # between two words about the same trouble

log = logging.getLogger(__name__)


class Copy:
    """One shard to copy. The file is held open, so that pruning the first tier does not hurt."""

    def __init__(self, order: SaveOrder, sidecar: Sidecar) -> None:
        self.order, self.sidecar = order, sidecar
        name = shard_name(sidecar.rank, sidecar.session)
        self._file = os.open(Path(order.path) / name, os.O_RDONLY | os.O_CLOEXEC)

    def buffers(self) -> Iterator[memoryview]:
        """The shard, proved again on its way."""
        good = self.sidecar.chunk_sums.tolist()
        size = self.sidecar.shard_bytes
        memories = itertools.cycle([aligned_buffer(WRITE_BYTES) for _ in range(WRITERS + 1)])
        for offset in range(0, size, WRITE_BYTES):
            buffer, length = next(memories), min(WRITE_BYTES, size - offset)
            count = os.preadv(self._file, [buffer[:length]], offset)
            sums = chunk_sums(buffer[:count])
            first = offset // self.sidecar.chunk_bytes
            if count < length or sums != good[first : first + len(sums)]:
                raise CheckpointError(Path(self.order.path), "its shard on disk is corrupt")
            yield buffer

    def close(self) -> None:
        os.close(self._file)


class Archiver:
    """Copies one worker's shards, in order, in a thread that lives while there are any."""

    def __init__(self, complain: Callable[[int, str], None], done: Callable[[int], None]) -> None:
        self._complain, self._done = complain, done
        self._copies: list[Copy] = []
        self._lock = threading.Lock()
        self._running = False

    def add(self, copy: Copy) -> None:
        """Copy a shard that is durable on the first tier."""
        with self._lock:
            self._copies.append(copy)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._copies:
                    self._running = False
                    return
                copy = self._copies.pop(0)
            copy_patiently(copy, self._complain)
            self._done(copy.order.draft.step)


def copy_patiently(copy: Copy, complain: Callable[[int, str], None]) -> None:
    """Try until it is done or time is up; what went wrong is told, not raised."""
    step, target = copy.order.draft.step, copy.order.archive
    assert target is not None
    began, pause, complained = time.monotonic(), FIRST_PAUSE_SECONDS, -COMPLAINT_SECONDS
    try:
        while True:
            try:
                archive(open_tier(target.url), copy)
                return
            except OSError as error:
                waited = time.monotonic() - began
                problem = f"{target.url}: {error.strerror or error}"
                if waited + pause > target.retry_seconds:
                    complain(step, f"not copied, given up after {waited:.0f} s: {problem}")
                    return
                if waited - complained >= COMPLAINT_SECONDS:
                    complained = waited
                    complain(step, f"not copied yet, trying again: {problem}")
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
    except Exception as error:  # whatever a client raises, the keeper goes on
        complain(step, f"not copied to {target.url}: {error}")
    finally:
        copy.close()


def archive(tier: Tier, copy: Copy) -> None:
    """One attempt: shard, table, sidecar; then the manifest if all ranks are there."""
    order, side = copy.order, copy.sidecar
    name, draft = Path(order.path).name, order.draft
    shard = shard_name(side.rank, side.session)
    text = msgspec.json.encode(side)
    sidecar = sidecar_name(side.rank, side.session, Shard(side.shard_bytes, crc32c(text)))
    there = tier.files(name)
    if sidecar not in there:
        admit_copy(tier, order)
        tier.upload(f"{name}/{shard}", side.shard_bytes, copy.buffers())
        if order.table:
            digest = next(g.table for g in draft.groups if side.rank == g.ranks[0][0])
            tier.write(f"{name}/{table_name(digest, side.session)}", order.table)
        tier.write(f"{name}/{sidecar}", text)
        there = tier.files(name)
    commit(tier, order, there)


def commit(tier: Tier, order: SaveOrder, there: dict[str, int]) -> bool:
    """Create the manifest where every sidecar is; then remove what is no longer kept."""
    name, draft = Path(order.path).name, order.draft
    parsed = (parse_sidecar_name(file, draft.session) for file in there)
    seen = dict(found for found in parsed if found)
    if len(seen) < draft.world_size:
        return False
    complete = msgspec.structs.replace(
        draft, shards=tuple(seen[rank] for rank in range(draft.world_size))
    )
    if not tier.create(f"{name}/{MANIFEST_FILE}", encode(complete)):
        standing = parse_manifest(f"{tier.where}/{name}", tier.read(f"{name}/{MANIFEST_FILE}"))
        if standing.session != draft.session:
            raise CheckpointError(f"{tier.where}/{name}", "another run's checkpoint is there")
        return True
    assert order.archive is not None
    decision = retain(tier, order.archive.policy, read_scores(Path(order.path).parent), name)
    if decision.excess_bytes:
        over = f"{decision.excess_bytes / 1e9:.1f} GB above the quota"
        log.error("%s is %s, and nothing more may be removed", tier.where, over)
    return True
