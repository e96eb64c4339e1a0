"""Folders of torch.distributed.checkpoint (DCP), in and out, one tensor in memory at a time.

DCP knows tensors alone. Whatever else a run needs to continue to the bit lies beside them in a
file of ours, with checksums of the tensors, which DCP has none of.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from phalanx.checkpoint.format.manifest import (
    MANIFEST_FILE,
    BadCheckpointError,
    CheckpointError,
    Extra,
    seal,
    unseal,
)
from phalanx.checkpoint.format.tier import open_source
from phalanx.checkpoint.read.load import StoredTensors
from phalanx.checkpoint.tools.convert import (
    MODEL_PREFIX,
    LazyTensors,
    Report,
    extra_of,
    generators_of,
    reported,
)
from phalanx.checkpoint.tools.dcp_metadata import UnsafeMetadataError, read_metadata
from phalanx.checkpoint.tools.rewrite import SHARD_BYTES, write_whole
from phalanx.data import Cursor
from phalanx.data.corpus.checksum import crc32c
from phalanx.data.durable_files import write_synced

DCP_FILE = ".metadata"  # in every DCP folder
CARRIED_FILE = "phalanx.json"  # in those that we wrote
CARRIED_VERSION = 1
MISSING = "step, tokens, data cursor, mesh, configuration and random generators"
NAMES_SHOWN = 5


class CarriedState(msgspec.Struct, frozen=True, kw_only=True):
    """What a DCP folder cannot hold of a checkpoint."""

    version: int = CARRIED_VERSION
    step: int
    extra: Extra
    generators: tuple[bytes, ...] = ()  # of the run's ranks, in their order
    sums: dict[str, int] = {}  # crc32c of every tensor; none: nothing is known
    origin: str = ""


def export_dcp(path: Path | str, folder: Path, report: Report = lambda _: None) -> int:
    """Write a checkpoint as a DCP folder, all of it; the number of its tensors.

    After an error nothing of it is left.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(folder, "is there already and not empty", "name a new folder")
    source = open_source(path)
    state = LazyTensors(StoredTensors(source), "", report=report)
    planner = _Reading(state)
    # A file a tensor: DCP's writer holds on to all that goes into one file.
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    manifest = source.manifest
    try:
        with readable_errors(folder):
            save_dcp(state.outlines(), storage_writer=writer, planner=planner, no_dist=True)
        carried = CarriedState(
            step=manifest.step,
            extra=extra_of(manifest),
            generators=tuple(generators_of(source)),
            sums=planner.sums,
            origin=manifest.origin,
        )
        write_synced(folder / CARRIED_FILE, seal(msgspec.json.encode(carried)))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return len(state)


class _Reading(DefaultSavePlanner):
    """Plans with tensors that have no bytes, and reads each when it is to be written."""

    def __init__(self, state: LazyTensors) -> None:
        super().__init__()
        self._state = state
        self.sums: dict[str, int] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        name = write_item.index.fqn
        whole = self._state[name]
        self.sums[name] = _sum(whole)
        return whole


def import_dcp(
    folder: Path,
    out: Path,
    shard_bytes: int = SHARD_BYTES,
    report: Report = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write a DCP folder as a checkpoint; what it lacks or what is left out is told to ``note``.

    Folders that we exported, or that the first Phalanx saved, continue where they were.
    """
    reader = DcpReader(folder)
    items = reader.read_metadata().state_dict_metadata
    tensors = {n: item for n, item in items.items() if isinstance(item, TensorStorageMetadata)}
    if not tensors:
        raise CheckpointError(folder, "holds no tensors")
    if others := [name for name in items if name not in tensors]:
        note(f"left out, since they are no tensors: {_named(others)}")
    carried = _read_carried(folder)
    origin = carried.origin if carried is not None else f"the DCP folder {folder}"
    if carried is None:
        _refuse_foreign_names(folder, list(tensors))
        carried = CarriedState(
            step=0, extra=Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="")
        )
        note(f"{folder} says nothing of {MISSING}: {WEIGHTS_FIX}")
    if lost := sorted(carried.sums.keys() - tensors.keys()):
        raise BadCheckpointError(folder, f"{DCP_FILE} lacks {_named(lost)}", _CHANGED_FIX)
    whole = _proved(folder, reader, tensors, carried.sums)
    return write_whole(
        out,
        carried.step,
        reported(whole, report),
        carried.extra,
        shard_bytes,
        generators=carried.generators,
        origin=origin,
    )


def _refuse_foreign_names(folder: Path, names: list[str]) -> None:
    """Tensors that no model here asks for would be missed when training starts, hours later."""
    for program, known, fix in FOREIGN_NAMES:
        if found := [name for name in names if known.search(name)]:
            problem = f"its tensors have names of {program} ({_named(found)}), and another layout"
            raise CheckpointError(folder, problem, fix)
    if not any(name.startswith(MODEL_PREFIX) for name in names):
        problem = f"none of its tensors is a model's here: {_named(names)}"
        fix = f"name weights as ours, {MODEL_PREFIX}layers.0.attention.qkv.weight, or import a "
        raise CheckpointError(folder, problem, fix + "Hugging Face folder")


# Fused and rotated otherwise than ours: a new name alone would make another model of them.
FOREIGN_NAMES = (
    (
        "Megatron-core",
        re.compile(r"\.self_attention\.linear_qkv\.|embedding\.word_embeddings\."),
        "import it by phalanx convert import-megatron, which asks for its model",
    ),
    (
        "Hugging Face",
        re.compile(r"\.self_attn\.|embed_tokens\.|lm_head\.|\.block_sparse_moe\."),
        "save it as safetensors with save_pretrained, and import that folder",
    ),
    (
        "torchtitan",
        re.compile(r"tok_embeddings\.|\.attention\.w[qkvo]\.|\.feed_forward\.w[123]\."),
        "export it with torchtitan's convert_to_hf.py, and import that folder",
    ),
)
WEIGHTS_FIX = "a run can start from its weights (checkpoint.weights_only = true), not continue it"
_CHANGED_FIX = (
    f"restore the folder; if its tensors were changed on purpose, remove {CARRIED_FILE}, "
    "and they are imported without their place in the run"
)


def _proved(
    folder: Path,
    reader: DcpReader,
    tensors: dict[str, TensorStorageMetadata],
    sums: dict[str, int],
) -> Iterator[tuple[str, Tensor]]:
    for name, item in tensors.items():
        whole = torch.empty(item.size, dtype=item.properties.dtype)
        with readable_errors(folder, name):
            load_dcp({name: whole}, storage_reader=reader, no_dist=True)
        if sums and sums.get(name) != _sum(whole):
            problem = f"{name} is corrupt: it is not what was exported"
            raise BadCheckpointError(folder, problem, _CHANGED_FIX)
        yield name, whole


class DcpReader(FileSystemReader):
    """Reads what all tensors share once, not once a tensor, and without unpickling it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if not (self._folder / DCP_FILE).is_file():
            raise CheckpointError(self._folder, f"has no {DCP_FILE}: it is no DCP folder")
        if self._metadata is None:
            try:
                self._metadata = read_metadata(self._folder / DCP_FILE)
            except OSError:
                raise
            except UnsafeMetadataError as error:
                problem = f"{DCP_FILE} {error}"
                raise BadCheckpointError(self._folder, problem, "restore the folder") from None
            except Exception as error:  # a pickle that is broken raises anything
                problem = f"{DCP_FILE} cannot be read: {type(error).__name__}: {error}"
                raise BadCheckpointError(self._folder, problem) from None
        return self._metadata


def _read_carried(folder: Path) -> CarriedState | None:
    """What we, or the first Phalanx, wrote beside the tensors; None in other people's folders."""
    try:
        content = unseal(folder, CARRIED_FILE, (folder / CARRIED_FILE).read_bytes())
    except FileNotFoundError:
        return _read_first(folder)
    try:
        carried = msgspec.json.decode(content, type=CarriedState)
    except msgspec.DecodeError as error:
        raise BadCheckpointError(folder, f"{CARRIED_FILE} is corrupt: {error}") from None
    if carried.version != CARRIED_VERSION:
        problem = f"{CARRIED_FILE} has version {carried.version}, this Phalanx reads 1"
        raise CheckpointError(folder, problem, "import it with the Phalanx that wrote it")
    return carried


def _read_first(folder: Path) -> CarriedState | None:
    """What the manifest of the first Phalanx said, if there is one."""
    try:
        old: dict[str, Any] = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes())
        extra = Extra(
            tokens=int(old["tokens"]),
            cursor=msgspec.convert(old["cursor"], Cursor),
            mesh=old["mesh"],
            config_hash=old["config_hash"],
            generation=old.get("generation", 0),
            config=old.get("config", {}),
        )
        return CarriedState(step=int(old["step"]), extra=extra)
    except (OSError, KeyError, TypeError, msgspec.MsgspecError):
        return None


@contextmanager
def readable_errors(folder: Path, name: str = "") -> Iterator[None]:
    """DCP's errors without the tracebacks around them, and no word about our having no group.

    With the ``name`` of a tensor, whatever goes wrong is the fault of what is read.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"torch\.distributed is disabled")
            yield
    except CheckpointException as error:
        wrapped = next(iter(error.failures.values()))[0]
        cause = next((e for e in _chain(wrapped) if isinstance(e, OSError | CheckpointError)), None)
        if name:
            problem = f"{name} cannot be read: {getattr(cause, 'strerror', '') or wrapped}"
            raise BadCheckpointError(folder, problem, "restore the folder") from None
        raise cause or CheckpointError(folder, f"cannot be written: {wrapped}") from None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what led to it: a full disk hides behind a file that ends too early."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _sum(tensor: Tensor) -> int:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return crc32c(flat.numpy().data)


def _named(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
