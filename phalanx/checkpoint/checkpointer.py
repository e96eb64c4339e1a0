"""Saving and loading the state of all ranks.

A synchronous save returns when the checkpoint is complete. An asynchronous one returns when
the state is copied; a keeper process writes it, and what became of it is told later.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from phalanx.checkpoint.format.describe import current_rank, world_size
from phalanx.checkpoint.format.folder import WriterLock, checkpoint_path, raise_fence, sweep
from phalanx.checkpoint.format.manifest import (
    MANIFEST_FILE,
    CheckpointError,
    Extra,
    KeeperLostError,
)
from phalanx.checkpoint.format.tier import add_score
from phalanx.checkpoint.keeper.attach import Attachment, KeeperOptions
from phalanx.checkpoint.keeper.background import Background
from phalanx.checkpoint.keeper.client import KeeperClient, NoKeeperError
from phalanx.checkpoint.keeper.messages import SaveOutcome
from phalanx.checkpoint.keeper.start import home_of
from phalanx.checkpoint.read.group_load import Loader
from phalanx.checkpoint.retention import RetentionPolicy
from phalanx.checkpoint.write.archive import Copy, copy_patiently, try_out
from phalanx.checkpoint.write.commit import (
    ArchiveTier,
    LocalDisk,
    SaveOrder,
    try_commit,
    write_shard,
)
from phalanx.checkpoint.write.group_layout import Arrangement, arrange
from phalanx.checkpoint.write.node_disk import write_local

log = logging.getLogger(__name__)
T = TypeVar("T")


class Checkpointer(Loader):
    """Writes checkpoints into one folder and keeps the newest ``keep`` of them (0: all).

    ``save`` and ``load`` are collective: every rank calls them, and all succeed or all raise.
    After ``prepare_background``, ``save`` talks to no other rank and returns before the
    checkpoint is complete; ``poll`` and ``finish`` tell what became of it.
    """

    def __init__(
        self,
        folder: Path,
        keep: int = 0,
        *,
        policy: RetentionPolicy | None = None,
        archive: ArchiveTier | None = None,
        local: LocalDisk | None = None,
        bytes_per_second: float = 0.0,
        stagger_seconds: float = 0.0,
        exclusive: bool = True,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.policy = policy or RetentionPolicy(last=keep)
        self.archive = archive
        self.local = local
        self.bytes_per_second = bytes_per_second  # limit of one rank's writing; 0: none
        self.stagger_seconds = stagger_seconds  # over which ranks spread the start of writing
        self.exclusive = exclusive  # otherwise generations alone fence off other writers
        self.prompt = False  # snapshots are safe in memory before they are written
        self._arranged: Arrangement | None = None
        self._background: Background | None = None
        self._attachment: Attachment | None = None
        self._lock: WriterLock | None = None
        self._generation = -1
        self._untold: list[SaveOutcome] = []
        self._unarchived: dict[int, str] = {}  # of this rank's own copies
        self.leaving: Callable[[], bool] = lambda: False  # whether to wait for no copy

    def save(
        self,
        step: int,
        tensors: dict[str, torch.Tensor],
        extra: Extra,
        *,
        write: bool = True,
        archive: bool = True,
        local: bool = True,
        patient: bool = True,
    ) -> Path:
        """Write one checkpoint; plain tensors held by several ranks are replicas, written once.

        Each tier may be left out: the folder (``write``; in the background only), its copy in the
        archive, the nodes' own disks (``local``). A prompt snapshot that is not waited for
        (``patient``) is left out where the keeper is late.
        """
        final = checkpoint_path(self.folder, step, extra.generation)
        if self._background is not None and self._arranged is not None:
            order = msgspec.structs.replace(
                self._order(final, self._arranged, step, extra),
                write=write,
                archive=self.archive if write and archive else None,
                local=self.local if local else None,
                prompt=self.prompt,
            )
            self._hand_over(tensors, order, step, patient)
        else:
            self._save_now(final, tensors, step, extra, archive=archive, local=local)
        return final

    def _hand_over(
        self, tensors: dict[str, torch.Tensor], order: SaveOrder, step: int, patient: bool
    ) -> None:
        """To the keeper, which writes it; to another one where that is gone."""
        assert self._background is not None
        try:
            self._background.save(tensors, order, patient=patient)
        except KeeperLostError as error:
            self._background.forget(step)
            self._start_anew(error)
            self._background.save(tensors, order)

    def _save_now(
        self,
        final: Path,
        tensors: dict[str, torch.Tensor],
        step: int,
        extra: Extra,
        *,
        archive: bool,
        local: bool,
    ) -> None:
        """Write it while training waits; collective."""
        try:
            with self._ranks.together(final):
                self._open(extra.generation, step)
                _refuse_existing(final)
        except CheckpointError as error:
            raise _not_saved(error) from error
        arranged = arrange(self._ranks, final, tensors)
        order = self._order(final, arranged, step, extra)
        if local and self.local is not None:
            here = msgspec.structs.replace(order, local=self.local)
            try:
                write_local(here, arranged.snapshot.stream(tensors))
            except OSError as error:
                log.error("step %d is not on the node's disk: %s", step, error)
        try:
            with self._ranks.together(final):
                sidecar = write_shard(order, arranged.snapshot.stream(tensors))
            with self._ranks.together(final):
                if current_rank() == 0 and not try_commit(order):
                    raise CheckpointError(final, "sidecars are missing although all were written")
            if archive and self.archive is not None:
                order = msgspec.structs.replace(order, archive=self.archive)
                tell = lambda _, problem: log.error("%s", problem)  # noqa: E731
                if problem := copy_patiently(Copy(order, sidecar), tell, self.leaving):
                    self._unarchived[step] = problem
        except CheckpointError as error:
            if current_rank() == 0 and not (final / MANIFEST_FILE).exists():
                shutil.rmtree(final, ignore_errors=True)
            raise _not_saved(error) from error

    def prepare_background(
        self,
        tensors: dict[str, torch.Tensor],
        *,
        generation: int,
        step: int,
        device: torch.device,
        buffers: int = 2,
        lease_seconds: float = 300.0,
        home: Path | None = None,
        replicate: bool = False,
        buddy_shift: int = 0,
        spare: str = "",
        prompt: bool = False,
        overlap: bool = False,
    ) -> bool:
        """Have later saves of these tensors go through a keeper; False where it has no memory.

        Collective, once: memory is allocated and the ranks learn who writes what. Replicas go to
        the node ``buddy_shift`` further in rank order, or (0) to one in another failure domain; of
        ranks that are all on one node, to the keeper of a ``spare`` one (host:port).
        With ``overlap`` a save returns while it still copies; the caller promises to call
        ``before_update`` before the tensors change.
        """
        self.prompt = prompt
        with self._ranks.together(self.folder):
            self._open(generation, step)
        self._arranged = arrange(self._ranks, self.folder, tensors)
        home = home or home_of(str(self.folder))
        keeping = KeeperOptions(home, lease_seconds, buffers, device, overlap)
        lock = -1 if self._lock is None else self._lock.descriptor
        shard_bytes = self._arranged.snapshot.bytes
        self._attachment = Attachment(self._ranks, self.folder, keeping, shard_bytes, lock)
        kept, problem = None, ""
        try:
            kept = self._attachment.attach(step)
        except NoKeeperError as error:
            problem = str(error)
        except OSError as error:
            if os.environ.get("PHALANX_KEEPER"):  # whoever supervises it starts another
                gone = "the keeper process of this node is gone"
                raise KeeperLostError(self.folder, gone, "see why it was killed") from error
            problem = str(error)
        problems = [each for each in self._ranks.gather(problem) if each]
        if problems or kept is None:
            log.warning("saves will stop training while they write: %s", problems[0])
            if kept is not None:
                kept.close()
            return False
        if replicate:
            self._attachment.pair(kept, buddy_shift, spare)
        self._background = self._over(kept)
        return True

    def _start_anew(self, error: KeeperLostError) -> None:
        """Another keeper for this rank alone: training goes on."""
        assert self._background is not None and self._attachment is not None
        if os.environ.get("PHALANX_KEEPER"):  # whoever supervises it knows better
            raise error
        log.error("%s\n  another one is started", error)
        self.poll()  # tells what is lost
        self._background.abandon()
        self._background = None  # its memory goes before more is taken
        self._background = self._over(self._attachment.attach_anew())

    def _over(self, kept: KeeperClient) -> Background:
        assert self._attachment is not None and self._arranged is not None
        keeping = self._attachment.keeping
        snapshot = self._arranged.snapshot
        return Background(self.folder, kept, snapshot, keeping.device, overlap=keeping.overlap)

    def _order(self, final: Path, arranged: Arrangement, step: int, extra: Extra) -> SaveOrder:
        return SaveOrder(
            path=str(final),
            policy=self.policy,
            draft=arranged.draft(step, extra),
            sidecar=arranged.sidecar(step, extra),
            table=arranged.own_table,
            bytes_per_second=self.bytes_per_second,
            delay_seconds=self.stagger_seconds * current_rank() / world_size(),
            total_bytes=arranged.total_bytes,
        )

    @property
    def in_background(self) -> bool:
        """Whether saves return before they are complete."""
        return self._background is not None

    @property
    def late(self) -> bool:
        """Whether this rank's last prompt snapshot is not safe within its deadline."""
        return self._background is not None and self._background.late

    def some_rank_late(self) -> bool:
        """Whether any rank's last prompt snapshot is; collective.

        While one is nobody saves: what all of them hold must not be overwritten.
        """
        return self._ranks.any_of(self.late)

    @property
    def flush_seconds(self) -> float:
        """How long this rank's last background save took to be written."""
        return 0.0 if self._background is None else self._background.flush_seconds

    @property
    def waited_seconds(self) -> float:
        """How long the last update before which a copy was under way waited for it."""
        return 0.0 if self._background is None else self._background.waited_seconds

    def take_waited(self) -> float:
        """Seconds that updates waited for copies, as far as known and not taken before."""
        return 0.0 if self._background is None else self._background.take_waited()

    def agreed(self, value: T) -> T:
        """Rank 0's value; collective."""
        return self._ranks.agreed(value)

    def largest(self, values: list[float]) -> list[float]:
        """The largest on any rank, of each; collective."""
        return [max(each) for each in zip(*self._ranks.gather(values), strict=True)]

    def add_score(self, step: int, loss: float) -> None:
        """Remember a validation loss, for the retention of the best."""
        if current_rank() == 0 and math.isfinite(loss):
            add_score(self.folder, step, loss)

    def before_update(self) -> None:
        """To be called before tensors change: a copy that still runs comes first."""
        if self._background is not None:
            self._background.before_update()

    def poll(self) -> list[SaveOutcome]:
        """What became of background saves since the last call; costs nothing to ask."""
        found, self._untold = self._untold, []
        return found if self._background is None else found + self._background.poll()

    def finish(self) -> list[SaveOutcome]:
        """Wait for background saves; raises on every rank if the newest failed on any.

        Then ``poll`` still tells what became of each.
        """
        if self._background is None:
            return []
        background, outcomes = self._background, []
        try:
            with self._ranks.together(self.folder):
                background.wait_durable()
                outcomes = background.poll()
                if failure := background.failure():
                    raise failure
        except CheckpointError as error:
            self._clear_failed(background.failed_path)
            self._untold = outcomes
            raise _not_saved(error) from error
        with self._ranks.together(self.folder):
            outcomes += background.wait_complete(self.leaving)
        return outcomes

    def try_archive(self) -> None:
        """Refuse an archive that takes no copies, before anything depends on it; collective."""
        if self.archive is not None:
            with self._ranks.together(self.archive.url):
                if current_rank() == 0:
                    try_out(self.archive)

    def not_archived(self) -> dict[int, str]:
        """Steps whose copy was given up or is not finished, and why; collective."""
        known = {} if self._background is None else self._background.unarchived
        told = self._ranks.gather({**self._unarchived, **known})
        return {step: why for each in told for step, why in each.items()}

    def _clear_failed(self, own: str) -> None:
        """What other ranks wrote of a save that failed is of no use; collective."""
        for path in sorted({path for path in self._ranks.gather(own) if path}):
            if current_rank() == 0 and not (Path(path) / MANIFEST_FILE).exists():
                shutil.rmtree(path, ignore_errors=True)

    def wait_acknowledged(self) -> None:
        """Until this rank's last prompt snapshot is sealed, here and at the buddy."""
        if self._background is not None:
            self._background.wait_acknowledged()

    def abandon(self) -> None:
        """Leave without a word, as if this rank were killed: keepers hold on to what they have."""
        if self._background is not None:
            self._background.abandon()
            self._background = None
        self.close()

    def close(self) -> None:
        """Let another job write here; a keeper finishes what it was given."""
        if self._background is not None:
            self._background.close()
            self._background = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _open(self, generation: int, step: int) -> None:
        """Take the folder, sweep what a killed job left in it, and shut out older gangs."""
        if current_rank() != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._lock is None and self.exclusive:
            self._lock = WriterLock(self.folder)
            sweep(self.folder)
        if generation != self._generation:
            raise_fence(self.folder, generation, step)
            self._generation = generation


def _not_saved(error: CheckpointError) -> CheckpointError:
    """What helps whoever cannot save; another checkpoint to load does not."""
    if error.fix:
        return error
    folder = Path(error.path).parent
    fix = (
        f"see why {folder} cannot be written, or set runs to another disk; then continue from what "
        'is saved, or still in memory, with checkpoint.resume = "auto"'
    )
    return type(error)(error.path, error.problems, fix, error.errno)


def _refuse_existing(final: Path) -> None:
    if current_rank() == 0 and (final / MANIFEST_FILE).exists():
        problem = "this step is saved already by this generation"
        raise CheckpointError(final, problem, "save with a higher generation, or remove it first")
