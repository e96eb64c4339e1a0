"""Between checkpoints and other people's folders, one tensor in memory at a time.

Hugging Face safetensors, torch.distributed.checkpoint (DCP), and other divisions into shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from phalanx.checkpoint.folder import latest
from phalanx.checkpoint.load import Stored
from phalanx.checkpoint.manifest import CheckpointError, Extra, Manifest
from phalanx.checkpoint.rewrite import SHARD_BYTES, write_whole
from phalanx.checkpoint.tier import open_source
from phalanx.config import Model, resolve_model
from phalanx.data import Cursor
from phalanx.model.hf import config_from_hf, export_hf, load_hf

MODEL_PREFIX = "model."  # of the weights among a checkpoint's tensors
ROUTER_SUFFIX = ".router.weight"
DCP_FILE = ".metadata"  # in every DCP folder

Report = Callable[[int], None]  # bytes done


class Lazy(Mapping[str, Tensor]):
    """A checkpoint's tensors, each read and proved when it is asked for, and not kept."""

    def __init__(self, stored: Stored, prefix: str, report: Report = lambda _: None) -> None:
        self._stored, self._prefix, self._report = stored, prefix, report
        self._known = {
            name.removeprefix(prefix): kind
            for name, kind in stored.tensors().items()
            if name.startswith(prefix)
        }

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype = self._known[name]
        whole = torch.empty(shape, dtype=dtype)
        self._stored.fill({self._prefix + name: whole})
        self._report(whole.numel() * whole.element_size())
        return whole

    def shapes(self) -> dict[str, torch.Size]:
        """Without reading anything."""
        return {name: shape for name, (shape, _) in self._known.items()}

    def outlines(self) -> dict[str, Tensor]:
        """Tensors of the right shapes and types without bytes."""
        return {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in self._known.items()
        }

    def bytes(self) -> int:
        """Of all tensors."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self._known.values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def export_checkpoint(
    path: Path | str,
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
    report: Report = lambda _: None,
) -> int:
    """Write a checkpoint's weights as a Hugging Face folder; the number of parameters."""
    source = open_source(path)
    manifest = source.manifest
    if "model" not in manifest.config:
        raise CheckpointError(path, "its manifest does not say which model this is")
    model = resolve_model(msgspec.convert(manifest.config["model"], Model))
    state = Lazy(Stored(source), MODEL_PREFIX, report)
    context = manifest.config.get("data", {}).get("sequence", 0)
    export_hf(state, model, folder, dtype, max_shard_bytes, context)
    return sum(shape.numel() for shape in state.shapes().values())


def import_checkpoint(
    folder: Path,
    out: Path,
    shard_bytes: int = SHARD_BYTES,
    report: Report = lambda _: None,
) -> Path:
    """Write a Hugging Face folder's weights as the checkpoint of step 0, without optimizer."""
    if latest(out) is not None:
        raise CheckpointError(out, "holds a checkpoint already", "name another folder")
    model = config_from_hf(folder)
    extra = Extra(
        tokens=0,
        cursor=Cursor(),
        mesh={},
        config_hash="",
        config={"model": msgspec.to_builtins(model)},
    )
    weights = _reported(_with_biases(load_hf(folder)), report)
    return write_whole(out, 0, weights, extra, shard_bytes)


def _reported(
    tensors: Iterator[tuple[str, Tensor]], report: Report
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        report(tensor.numel() * tensor.element_size())


def _with_biases(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Our names, and for each router the selection bias that a trainer has and a folder has not."""
    for fqn, tensor in weights:
        yield MODEL_PREFIX + fqn, tensor
        if fqn.endswith(ROUTER_SUFFIX):
            bias = MODEL_PREFIX + fqn.removesuffix("weight") + "expert_bias"
            yield bias, torch.zeros(len(tensor), dtype=torch.float32)


def export_dcp(path: Path | str, folder: Path, report: Report = lambda _: None) -> int:
    """Write all tensors of a checkpoint as a DCP folder, one in memory at a time; their number."""
    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(folder, "is not empty", "name a new folder")
    state = Lazy(Stored(open_source(path)), "", report)
    # A file a tensor: DCP's writer holds on to all that goes into one file.
    writer = FileSystemWriter(folder, single_file_per_rank=False)
    save_dcp(state.outlines(), storage_writer=writer, planner=_Reading(state), no_dist=True)
    return len(state)


class _Reading(DefaultSavePlanner):
    """Plans with tensors that have no bytes, and reads each when it is to be written."""

    def __init__(self, state: Lazy) -> None:
        super().__init__()
        self._state = state

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._state[write_item.index.fqn]


def import_dcp(
    folder: Path,
    out: Path,
    step: int = 0,
    shard_bytes: int = SHARD_BYTES,
    report: Report = lambda _: None,
) -> Path:
    """Write the tensors of a DCP folder as a checkpoint, one at a time; the first Phalanx's too."""
    if not (folder / DCP_FILE).is_file():
        raise CheckpointError(folder, f"has no {DCP_FILE}: it is no DCP folder")
    metadata = FileSystemReader(folder).read_metadata()
    tensors = {
        name: item
        for name, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }
    if not tensors:
        raise CheckpointError(folder, "holds no tensors")

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, item in tensors.items():
            whole = torch.empty(item.size, dtype=item.properties.dtype)
            load_dcp({name: whole}, checkpoint_id=folder, no_dist=True)
            yield name, whole

    extra, found_step = _extra_of(folder)
    return write_whole(out, step or found_step, _reported(read(), report), extra, shard_bytes)


def reshard(path: Path | str, out: Path, shards: int, report: Report = lambda _: None) -> Path:
    """Write a checkpoint anew in about so many shards, one of them in memory at a time."""
    source = open_source(path)
    state = Lazy(Stored(source), "", report)
    manifest: Manifest = source.manifest
    extra = Extra(
        tokens=manifest.tokens,
        cursor=manifest.cursor,
        mesh=manifest.mesh,
        config_hash=manifest.config_hash,
        generation=manifest.generation,
        config=manifest.config,
    )
    tensors = ((name, state[name]) for name in state)
    return write_whole(out, manifest.step, tensors, extra, -(-state.bytes() // shards))


def _extra_of(folder: Path) -> tuple[Extra, int]:
    """What the manifest of the first Phalanx said, if there is one."""
    try:
        old: dict[str, Any] = msgspec.json.decode((folder / "manifest.json").read_bytes())
        extra = Extra(
            tokens=int(old["tokens"]),
            cursor=msgspec.convert(old["cursor"], Cursor),
            mesh=old["mesh"],
            config_hash=old["config_hash"],
            generation=old.get("generation", 0),
            config=old.get("config", {}),
        )
        return extra, int(old["step"])
    except (OSError, KeyError, TypeError, msgspec.MsgspecError):
        return Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash=""), 0
