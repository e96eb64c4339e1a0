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
from contextlib import suppress
from pathlib import Path

import msgspec

from phalanx.checkpoint.format.direct import WRITE_BYTES, WRITERS, aligned_buffer, chunk_sums
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
from phalanx.checkpoint.format.tier import FolderTier, Tier, open_tier, read_scores, retain
from phalanx.checkpoint.write.commit import ArchiveTier, SaveOrder
from phalanx.checkpoint.write.quota import admit_copy
from phalanx.data.corpus.checksum import crc32c

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 5.0
REFUSED_SECONDS = 30.0  # that a place is tried again which says no, or that is not there
REFUSALS = (PermissionError, FileNotFoundError, NotADirectoryError)
LEAVING_SECONDS = 0.5  # within which the wish to leave is noticed
TRIAL_FILE = "trial"  # beside the checkpoints, for a moment
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


class CopyAttempts:
    """One copy, tried until it is done or given up."""

    def __init__(self, copy: Copy, complain: Callable[[int, str], None]) -> None:
        assert copy.order.archive is not None
        self.copy, self.step, self._target = copy, copy.order.draft.step, copy.order.archive
        self.next_at = self._began = time.monotonic()
        self._complain = complain
        self._pause, self._complained = FIRST_PAUSE_SECONDS, -COMPLAINT_SECONDS
        self.problem = ""  # why it was given up

    def once(self, *, last: bool) -> bool:
        """Try; whether it is over. What went wrong is told, not raised. ``last``: no other try."""
        try:
            archive(open_tier(self._target.url), self.copy)
        except OSError as error:
            if self._goes_on(error, last):
                return False
        except Exception as error:  # whatever a client raises, the keeper goes on
            self.problem = f"not copied to {self._target.url}: {error}"
            self._complain(self.step, self.problem)
        self.copy.close()
        return True

    def _goes_on(self, error: OSError, last: bool) -> bool:
        waited = time.monotonic() - self._began
        problem = f"{self._target.url}: {error.strerror or error}"
        patience = self._target.retry_seconds
        if isinstance(error, REFUSALS):
            patience = min(patience, REFUSED_SECONDS)
        if last or waited + self._pause > patience:
            self.problem = f"not copied, given up after {waited:.0f} s: {problem}"
            self._complain(self.step, self.problem)
            return False
        if waited - self._complained >= COMPLAINT_SECONDS:
            self._complained = waited
            self._complain(self.step, f"not copied yet, trying again: {problem}")
        self.next_at = time.monotonic() + self._pause * random.uniform(0.5, 1.5)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        return True


class Archiver:
    """Copies one worker's shards in a thread that lives while there are any.

    A copy that must wait for its next try lets others go first. ``leaving``: no copy that failed
    is tried again.
    """

    def __init__(
        self,
        complain: Callable[[int, str], None],
        done: Callable[[int, str], None],
        leaving: threading.Event,
    ) -> None:
        self._complain, self._done, self._leaving = complain, done, leaving
        self._trying: list[CopyAttempts] = []
        self._changed = threading.Condition()
        self._running = False

    def add(self, copy: Copy) -> None:
        """Copy a shard that is durable on the first tier."""
        with self._changed:
            if not self._running:
                threading.Thread(target=self._run, daemon=True).start()
                self._running = True
            self._trying.append(CopyAttempts(copy, self._complain))
            self._changed.notify()

    def _run(self) -> None:
        while (attempts := self._next()) is not None:
            if attempts.once(last=self._leaving.is_set()):
                with self._changed:
                    self._trying.remove(attempts)
                self._done(attempts.step, attempts.problem)

    def _next(self) -> CopyAttempts | None:
        """The copy whose turn it is, waited for; None: there is none."""
        with self._changed:
            while self._trying:
                attempts = min(self._trying, key=lambda each: each.next_at)
                delay = attempts.next_at - time.monotonic()
                if delay <= 0 or self._leaving.is_set():
                    return attempts
                self._changed.wait(min(delay, LEAVING_SECONDS))
            self._running = False
            return None


def copy_patiently(
    copy: Copy, complain: Callable[[int, str], None], leaving: Callable[[], bool] = lambda: False
) -> str:
    """Try until it is done or time is up, or somebody wants to leave; why it is given up."""
    attempts = CopyAttempts(copy, complain)
    while not attempts.once(last=leaving()):
        while time.monotonic() < attempts.next_at and not leaving():
            time.sleep(min(LEAVING_SECONDS, FIRST_PAUSE_SECONDS))
    return attempts.problem


def try_out(target: ArchiveTier) -> None:
    """Write a small file where copies will go; CheckpointError where that is refused.

    A store that does not answer may do so when it is needed, and is only complained about.
    """
    fix = "set checkpoint.archive.url and the credentials of whoever runs the job, or leave it out"
    tier = open_tier(target.url)
    try:
        tier.files(TRIAL_FILE)  # a copy begins so; some stores make a bucket of a first file
        tier.write(TRIAL_FILE, b"")
    except PermissionError as error:
        problem = f"copies cannot be written there: {error.strerror or error}"
        raise CheckpointError(target.url, problem, fix) from None
    except FileNotFoundError:
        raise CheckpointError(target.url, "there is no such bucket or folder", fix) from None
    except OSError as error:
        if isinstance(tier, FolderTier):
            problem = f"copies cannot be written there: {error.strerror or error}"
            raise CheckpointError(target.url, problem, fix) from None
        log.error("%s: no answer yet, copies will be tried again: %s", target.url, error)
        return
    with suppress(OSError):  # some may write, and remove nothing
        tier.drop(TRIAL_FILE)


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
