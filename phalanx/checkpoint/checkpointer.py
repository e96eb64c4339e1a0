"""Saving and loading the state of all ranks.

A synchronous save returns when the checkpoint is complete. An asynchronous one returns when
the state is copied; a keeper process writes it, and what became of it is told later.
"""

from __future__ import annotations

import datetime
import logging
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from phalanx.checkpoint.background import Background
from phalanx.checkpoint.commit import Order, try_commit, write_shard
from phalanx.checkpoint.describe import Description, current_rank, world_size
from phalanx.checkpoint.folder import (
    WriterLock,
    checkpoint_path,
    list_checkpoints,
    mark_bad,
    raise_fence,
    scan,
    sweep,
)
from phalanx.checkpoint.geometry import Group, form_groups
from phalanx.checkpoint.kept import Kept, NoKeeperError, Outcome, forget_address, start_keeper
from phalanx.checkpoint.load import Stored
from phalanx.checkpoint.manifest import (
    MANIFEST_FILE,
    VERSION,
    BadCheckpointError,
    CheckpointError,
    Extra,
    Manifest,
    read_manifest,
)
from phalanx.checkpoint.shard import Sidecar
from phalanx.checkpoint.snapshot import Snapshot

PROBLEMS_SHOWN = 8

log = logging.getLogger(__name__)
T = TypeVar("T")


class Arrangement(NamedTuple):
    """What the ranks know of each other before they write."""

    description: Description
    snapshot: Snapshot
    groups: tuple[Group, ...]
    session: str


class Checkpointer:
    """Writes checkpoints into one folder and keeps the newest ``keep`` of them (0: all).

    ``save`` and ``load`` are collective: every rank calls them, and all succeed or all raise.
    After ``prepare_background``, ``save`` talks to no other rank and returns before the
    checkpoint is complete; ``poll`` and ``finish`` tell what became of it.
    """

    def __init__(self, folder: Path, keep: int = 0, bytes_per_second: float = 0.0) -> None:
        self.folder = folder
        self.keep = keep
        self.bytes_per_second = bytes_per_second  # limit of one rank's writing; 0: none
        self._arranged: Arrangement | None = None
        self._background: Background | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._group: dist.ProcessGroup | None = None
        self._lock: WriterLock | None = None
        self._generation = -1

    def save(self, step: int, tensors: dict[str, torch.Tensor], extra: Extra) -> Path:
        """Write one checkpoint; plain tensors held by several ranks are replicas, written once."""
        final = checkpoint_path(self.folder, step, extra.generation)
        if self._background is not None and self._arranged is not None:
            self._background.save(tensors, self._order(final, self._arranged, step, extra))
            return final
        with self._together(final):
            self._open(extra.generation, step)
            _refuse_existing(final)
        arranged = self._arrange(final, tensors)
        order = self._order(final, arranged, step, extra)
        try:
            with self._together(final):
                write_shard(order, arranged.snapshot.stream(tensors))
            with self._together(final):
                if current_rank() == 0 and not try_commit(order):
                    raise CheckpointError(final, "sidecars are missing although all were written")
        except CheckpointError:
            if current_rank() == 0 and not (final / MANIFEST_FILE).exists():
                shutil.rmtree(final, ignore_errors=True)
            raise
        return final

    def load(
        self, path: Path, tensors: dict[str, torch.Tensor], *, weights_only: bool = False
    ) -> Manifest:
        """Fill ``tensors`` in place, whatever mesh they were saved from; every byte is proved.

        With ``weights_only`` just the tensors under ``model.`` are read. After an error the
        tensors may be partly filled.
        """
        if weights_only:
            tensors = {name: t for name, t in tensors.items() if name.startswith("model.")}
        with self._together(path):
            manifest = read_manifest(path)
            stored = Stored(path, manifest)
            stored.check(tensors)
        with self._together(path), torch.no_grad():
            stored.fill(tensors)
            rng = b""
            if manifest.world_size == world_size():
                rng = stored.read_sidecar(current_rank()).rng
        return msgspec.structs.replace(manifest, rng=rng)

    def load_newest(
        self, path: Path, tensors: dict[str, torch.Tensor], *, weights_only: bool = False
    ) -> Manifest:
        """Load ``path`` or, where it is bad, the next older one beside it; bad ones are marked."""
        while True:
            try:
                return self.load(path, tensors, weights_only=weights_only)
            except BadCheckpointError as error:
                older = self._agreed(older_than(path))
                if current_rank() == 0:
                    mark_bad(path, error.problems)
                if older is None:
                    raise
                log.error("%s\n  falling back to %s", error, older)
                path = older

    def prepare_background(
        self,
        tensors: dict[str, torch.Tensor],
        *,
        generation: int,
        step: int,
        device: torch.device,
        slots: int = 2,
        lease_seconds: float = 30.0,
    ) -> bool:
        """Have later saves of these tensors go through a keeper; False where it has no memory.

        Collective, once: memory is allocated and the ranks learn who writes what.
        """
        with self._together(self.folder):
            self._open(generation, step)
        self._arranged = self._arrange(self.folder, tensors)
        address = self._keeper_address(lease_seconds)
        size, cuda = self._arranged.snapshot.bytes, device.type == "cuda"
        kept, problem = None, ""
        try:
            kept = Kept(address, current_rank(), size, slots, cuda)
        except (NoKeeperError, OSError) as error:
            problem = str(error)
        problems = [each for each in self._gather(problem) if each]
        if self._keeper is not None:
            forget_address(address)
        if problems or kept is None:
            log.warning("saves will stop training while they write: %s", problems[0])
            if kept is not None:
                kept.close()
            return False
        self._background = Background(self.folder, kept, self._arranged.snapshot, device)
        return True

    @property
    def in_background(self) -> bool:
        """Whether saves return before they are complete."""
        return self._background is not None

    def before_update(self) -> None:
        """To be called before tensors change: a copy that still runs comes first."""
        if self._background is not None:
            self._background.before_update()

    def poll(self) -> list[Outcome]:
        """What became of background saves since the last call; costs nothing to ask."""
        return [] if self._background is None else self._background.poll()

    def finish(self) -> list[Outcome]:
        """Wait for background saves; raises on every rank if the newest failed on any."""
        if self._background is None:
            return []
        background, found = self._background, []
        with self._together(self.folder):
            background.wait_durable()
            found = background.poll()
            if failure := background.failure():
                raise failure
        with self._together(self.folder):
            found += background.wait_complete()
        return found

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
        if self._lock is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = WriterLock(self.folder)
            sweep(self.folder)
        if generation != self._generation:
            raise_fence(self.folder, generation, step)
            self._generation = generation

    def _keeper_address(self, lease_seconds: float) -> str:
        """The first rank of each node starts its keeper."""
        hosts = self._gather(socket.gethostname())
        host = hosts[current_rank()]
        address = ""
        if hosts.index(host) == current_rank():
            try:
                address, self._keeper = start_keeper(lease_seconds)
            except OSError as error:  # the others learn of it when they cannot connect
                log.warning("no keeper can be started: %s", error)
        return self._gather(address)[hosts.index(host)]

    def _arrange(self, path: Path, tensors: dict[str, torch.Tensor]) -> Arrangement:
        """Learn what all ranks hold, as digests, and agree on the name of this writing."""
        with self._together(path):
            description = Description(tensors)
        own = (description.digest, description.stand.bases, secrets.token_hex(4))
        everyone = self._gather(own)
        groups = form_groups((digest, bases) for digest, bases, _ in everyone)
        mine = next(group for group in groups if group.table == description.digest)
        return Arrangement(description, Snapshot(description, mine), groups, everyone[0][2])

    def _order(self, final: Path, arranged: Arrangement, step: int, extra: Extra) -> Order:
        rank, snapshot = current_rank(), arranged.snapshot
        draft = Manifest(
            version=VERSION,
            step=step,
            generation=extra.generation,
            tokens=extra.tokens,
            cursor=extra.cursor,
            mesh=extra.mesh,
            world_size=world_size(),
            config_hash=extra.config_hash,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            session=arranged.session,
            groups=arranged.groups,
            config=extra.config,
        )
        sidecar = Sidecar(
            rank=rank,
            step=step,
            generation=extra.generation,
            session=arranged.session,
            shard_bytes=snapshot.bytes,
            header_bytes=len(snapshot.header),
            rng=extra.rng,
        )
        first = any(rank == group.ranks[0][0] for group in arranged.groups)
        return Order(
            path=str(final),
            keep=self.keep,
            draft=draft,
            sidecar=sidecar,
            table=arranged.description.encoded if first else b"",
            bytes_per_second=self.bytes_per_second,
        )

    @contextmanager
    def _together(self, path: Path) -> Iterator[None]:
        """Work that succeeds on every rank, or ends in the same CheckpointError on every rank."""
        failure: CheckpointError | None = None
        try:
            yield
        except CheckpointError as error:
            failure = error
        except Exception as error:  # whatever it is, the other ranks must learn of it
            log.debug("checkpoint %s failed on rank %d", path, current_rank(), exc_info=True)
            failure = CheckpointError(path, f"rank {current_rank()}: {described(error)}")
        failures = [each for each in self._gather(failure) if each is not None]
        if failures:
            raise merged(path, failures)

    def _gather(self, value: T) -> list[T]:
        if not dist.is_initialized():
            return [value]
        values = [value] * world_size()
        dist.all_gather_object(values, value, group=self._cpu_group())
        return values

    def _agreed(self, value: T) -> T:
        """Rank 0's value."""
        return self._gather(value)[0]

    def _cpu_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks: agreement must not depend on the health of a GPU."""
        if not dist.is_initialized() or dist.get_backend() == "gloo":
            return None
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group


def stored_tensors(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Full shape and type of every tensor in a checkpoint."""
    return Stored(path, read_manifest(path)).tensors()


def older_than(path: Path) -> Path | None:
    """The next older checkpoint beside one."""
    steps = {found.path: found.step for found in scan(path.parent)}
    beside = [p for p in list_checkpoints(path.parent) if steps[p] < steps.get(path, 0)]
    return beside[-1] if beside else None


def merged(path: Path, errors: list[CheckpointError]) -> CheckpointError:
    """One error for all ranks, each problem once, in rank order."""
    problems = list(dict.fromkeys(problem for error in errors for problem in error.problems))
    hidden = len(problems) - PROBLEMS_SHOWN
    shown = [*problems[:PROBLEMS_SHOWN], f"and {hidden} more"] if hidden > 0 else problems
    # One rank that cannot write is not to be taken for bytes that are wrong.
    bad = all(isinstance(error, BadCheckpointError) for error in errors)
    fix = errors[0].fix
    if bad and not fix:
        older = older_than(path)
        fix = f"load the older {older}" if older else "there is no older checkpoint beside it"
    return (BadCheckpointError if bad else CheckpointError)(path, shown, fix)


def described(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _refuse_existing(final: Path) -> None:
    if current_rank() == 0 and (final / MANIFEST_FILE).exists():
        problem = "this step is saved already by this generation"
        raise CheckpointError(final, problem, "save with a higher generation, or remove it first")
