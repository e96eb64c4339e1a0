"""Saving and loading the state of all ranks, over torch's distributed checkpoint.

A save goes into a temporary folder; when every rank has written, synced and checksummed its
files, rank 0 adds the manifest and renames the folder. What has the final name is complete.
"""

from __future__ import annotations

import datetime
import logging
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from phalanx.checkpoint.manifest import (
    MANIFEST_FILE,
    VERSION,
    CheckpointError,
    Extra,
    Manifest,
    Shard,
    encode,
    read_manifest,
    verify_shard,
)

PARTIAL = ".partial"  # suffix of a folder that is being written
REPLACED = ".replaced"  # suffix of a checkpoint that a newer one of the same step displaces
PROBLEMS_SHOWN = 8

log = logging.getLogger(__name__)
T = TypeVar("T")


class Checkpointer:
    """Writes checkpoints into one folder and keeps the newest ``keep`` of them (0: all).

    ``save`` and ``load`` are collective: every rank calls them, and all succeed or all raise.
    """

    def __init__(self, folder: Path, keep: int = 0) -> None:
        self.folder = folder
        self.keep = keep
        self._group: dist.ProcessGroup | None = None

    def save(self, step: int, tensors: dict[str, torch.Tensor], extra: Extra) -> Path:
        """Write one checkpoint; plain tensors held by several ranks are replicas, written once."""
        final = self.folder / f"step-{step:08d}"
        partial = final.with_name(final.name + PARTIAL)
        try:
            with self._together(final):
                self._prepare(partial)
            with self._together(final):
                self._write(partial, tensors)
            with self._together(final):
                own = _seal_own_files(partial, extra.rng)
            shards = [shard for of_rank in self._gather(own) for shard in of_rank]
            with self._together(final):
                if _rank() == 0:
                    _commit(_manifest(step, extra, shards), partial, final)
        except CheckpointError:
            if _rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        if _rank() == 0:
            self._prune(final)
        return final

    def load(self, path: Path, tensors: dict[str, torch.Tensor]) -> Manifest:
        """Prove a checkpoint and fill ``tensors`` in place, whatever mesh it was saved from."""
        with self._together(path):
            manifest = read_manifest(path)
        with self._together(path):
            _verify_share(path, manifest)
        with self._together(path):
            _check_shapes(path, tensors)
        with self._together(path):
            self._read(path, tensors)
            rng = _own_rng(path, manifest)
        return msgspec.structs.replace(manifest, rng=rng)

    def _prepare(self, partial: Path) -> None:
        """Sweep what a killed save or removal left behind, and make the temporary folder."""
        if _rank() != 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"step-*{PARTIAL}"):
            shutil.rmtree(leftover)
        for replaced in self.folder.glob(f"step-*{REPLACED}"):
            if replaced not in list_checkpoints(self.folder):
                _remove(replaced)
        partial.mkdir()

    def _write(self, partial: Path, tensors: dict[str, torch.Tensor]) -> None:
        writer = _Writer(partial, sync_files=True)
        with _plain_errors():
            save_tensors(tensors, storage_writer=writer, process_group=self._cpu_group())

    def _read(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        reader = FileSystemReader(path)
        with _plain_errors():
            # A copy: torch rebinds the entries of the dict it is given.
            load_tensors(dict(tensors), storage_reader=reader, process_group=self._cpu_group())

    def _prune(self, newest: Path) -> None:
        """Remove all but the newest ``keep``; never the one just written."""
        if self.keep <= 0:
            return
        kept = list_checkpoints(self.folder)[-self.keep :]
        for path in list_checkpoints(self.folder):
            if path in kept or path == newest:
                continue
            try:
                _remove(path)
            except OSError as error:  # the save itself has succeeded
                log.warning("cannot remove the old checkpoint %s: %s", path, error)

    @contextmanager
    def _together(self, path: Path) -> Iterator[None]:
        """Work that succeeds on every rank, or ends in the same CheckpointError on every rank."""
        failure: CheckpointError | None = None
        try:
            yield
        except CheckpointError as error:
            failure = error
        except Exception as error:  # whatever it is, the other ranks must learn of it
            log.debug("checkpoint %s failed on rank %d", path, _rank(), exc_info=True)
            failure = CheckpointError(path, _described(error))
        failures = [each for each in self._gather(failure) if each is not None]
        if failures:
            raise _merged(path, failures)

    def _gather(self, value: T) -> list[T]:
        if not dist.is_initialized():
            return [value]
        values = [value] * _world_size()
        dist.all_gather_object(values, value, group=self._cpu_group())
        return values

    def _cpu_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks: agreement must not depend on the health of a GPU."""
        if not dist.is_initialized() or dist.get_backend() == "gloo":
            return None
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group


class _Writer(FileSystemWriter):
    """torch's writer; a full disk is reported as such, not as a broken archive."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause = error.__context__
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            if cause is None:
                raise
            raise OSError(cause.errno, cause.strerror) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, oldest step first."""
    found: dict[int, Path] = {}
    for path in sorted(folder.glob("step-*"), reverse=True):
        # A replaced one counts only when its successor did not arrive; it sorts after it.
        match = re.fullmatch(rf"step-(\d+)({re.escape(REPLACED)})?", path.name)
        if match and (path / MANIFEST_FILE).is_file():
            found[int(match[1])] = path
    return [found[step] for step in sorted(found)]


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step, if there is one."""
    checkpoints = list_checkpoints(folder)
    return checkpoints[-1] if checkpoints else None


def stored_tensors(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Full shape and type of every tensor in a checkpoint."""
    metadata = FileSystemReader(path).read_metadata()
    return {
        key: (entry.size, entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _seal_own_files(partial: Path, rng: bytes) -> list[Shard]:
    """Add this rank's generators and describe every file that this rank wrote."""
    rank = _rank()
    rng_file = partial / _rng_name(rank)
    _write_synced(rng_file, rng)
    own = [*sorted(partial.glob(f"__{rank}_*.distcp")), rng_file]
    if rank == 0:
        own.append(partial / ".metadata")
    return [Shard.of(file) for file in own]


def _commit(manifest: Manifest, partial: Path, final: Path) -> None:
    _write_synced(partial / MANIFEST_FILE, encode(manifest))
    _sync_folder(partial)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        if replaced.exists():
            _remove(replaced)
        final.rename(replaced)
    partial.rename(final)
    _sync_folder(final.parent)
    if replaced.exists():
        _remove(replaced)


def _manifest(step: int, extra: Extra, shards: list[Shard]) -> Manifest:
    return Manifest(
        version=VERSION,
        step=step,
        generation=extra.generation,
        tokens=extra.tokens,
        cursor=extra.cursor,
        mesh=extra.mesh,
        world_size=_world_size(),
        config_hash=extra.config_hash,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        shards=tuple(shards),
        config=extra.config,
    )


def _verify_share(path: Path, manifest: Manifest) -> None:
    """Check every n-th file by size, so that the ranks read about the same number of bytes."""
    by_size = sorted(manifest.shards, key=lambda shard: (-shard.bytes, shard.file))
    share = by_size[_rank() :: _world_size()]
    problems = [problem for shard in share if (problem := verify_shard(path, shard))]
    if problems:
        raise CheckpointError(path, problems, _older_than(path))


def _check_shapes(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    stored = stored_tensors(path)
    problems = []
    for key, tensor in tensors.items():
        if key not in stored:
            problems.append(f"{key} {tuple(tensor.shape)} is not in the checkpoint")
        elif stored[key][0] != tensor.shape:
            shapes = f"{tuple(stored[key][0])}, the model has {tuple(tensor.shape)}"
            problems.append(f"{key} has the shape {shapes}")
    if problems:
        fix = "load into the model that was saved, or start from another checkpoint"
        raise CheckpointError(path, problems, fix)


def _own_rng(path: Path, manifest: Manifest) -> bytes:
    if manifest.world_size != _world_size():
        return b""
    return (path / _rng_name(_rank())).read_bytes()


def _older_than(path: Path) -> str:
    beside = list_checkpoints(path.parent)
    older = beside[: beside.index(path)] if path in beside else []
    return f"load the older {older[-1]}" if older else "there is no older checkpoint beside it"


def _merged(path: Path, errors: list[CheckpointError]) -> CheckpointError:
    """One error for all ranks, each problem once, in rank order."""
    problems = list(dict.fromkeys(problem for error in errors for problem in error.problems))
    hidden = len(problems) - PROBLEMS_SHOWN
    shown = [*problems[:PROBLEMS_SHOWN], f"and {hidden} more"] if hidden > 0 else problems
    return CheckpointError(path, shown, errors[0].fix)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn torch's gathered failures into one line each, without its single-process warning."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as failure:
        causes = {f"rank {rank}: {_described(e)}" for rank, (e, _) in failure.failures.items()}
        raise OSError("; ".join(sorted(causes))) from failure


def _described(error: BaseException) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _remove(path: Path) -> None:
    """Remove a checkpoint so that a crash in the middle leaves nothing that looks complete."""
    doomed = path.with_name(path.name + PARTIAL)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rng_name(rank: int) -> str:
    return f"rng-{rank:05d}.bin"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
