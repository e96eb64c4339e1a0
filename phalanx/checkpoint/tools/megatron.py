"""Weights of a Megatron-core checkpoint (``torch_dist``) in, one of our tensors at a time.

Such a folder is one of torch.distributed.checkpoint, whose tensors hold all layers: of each only
the part that is asked for is read. What it says of the model stands in a pickle of Megatron's own
classes, which is not opened: the model is named by whoever imports.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from phalanx.checkpoint.format.folder import latest
from phalanx.checkpoint.format.manifest import CheckpointError, Extra
from phalanx.checkpoint.tools.convert import Report, reported, with_expert_biases
from phalanx.checkpoint.tools.dcp import DCP_FILE, DcpReader, readable_errors
from phalanx.checkpoint.tools.rewrite import SHARD_BYTES, write_whole
from phalanx.config import Model, has_expert_bias
from phalanx.data import Cursor
from phalanx.model.megatron import MegatronRule, StoredPart, megatron_rules, unknown_features

TRACKER_FILE = "latest_checkpointed_iteration.txt"
EMBEDDING = "embedding.word_embeddings.weight"
# Not weights of the model, or what follows from them.
OTHERS = re.compile(r"^(optimizer|opt_param_scheduler|rng_state|rerun_state)|_extra_state|inv_freq")
NAMES_SHOWN = 5

WRONG_MODEL_FIX = "name the model that this is (--model)"

Chosen = list[tuple[MegatronRule, tuple[StoredPart, ...]]]


def import_megatron(
    folder: Path,
    out: Path,
    model: Model,
    *,
    shard_bytes: int = SHARD_BYTES,
    report: Report = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write the weights as the checkpoint of step 0 of a resolved ``model``, without optimizer.

    ``note`` is told what was cut off or left out.
    """
    if latest(out) is not None:
        raise CheckpointError(out, "holds a checkpoint already", "name another folder")
    if unknown := unknown_features(model):
        problem = f"Megatron's form of {', '.join(unknown)} is not known here"
        raise CheckpointError(folder, problem, "export it to Hugging Face, and import that folder")
    source = MegatronFolder(newest_iteration(folder))
    chosen = source.choose(model)
    if source.others:
        note(f"left out: {source.others:,} entries that are no weights (optimizer, generators, …)")
    if (padding := source.stored[EMBEDDING].size[0] - model.vocab) > 0:
        note(f"cut off: {padding:,} rows that fill the vocabulary up to {model.vocab + padding:,}")
    weights = with_expert_biases(source.tensors(chosen), has_expert_bias(model.moe))
    config = {"model": msgspec.to_builtins(model)}
    extra = Extra(tokens=0, cursor=Cursor(), mesh={}, config_hash="", config=config)
    origin = f"the Megatron checkpoint {source.path}"
    return write_whole(out, 0, reported(weights, report), extra, shard_bytes, origin=origin)


def newest_iteration(folder: Path) -> Path:
    """The folder of one iteration: itself, or the one that a run's folder names."""
    if (folder / DCP_FILE).is_file():
        return folder
    tracker = folder / TRACKER_FILE
    if not tracker.is_file():
        fix = f"name a folder with {DCP_FILE} (iter_…), or the run's with {TRACKER_FILE}"
        raise CheckpointError(folder, "is no checkpoint of Megatron-core", fix)
    text = tracker.read_text(encoding="utf-8", errors="replace").strip()
    newest = folder / (f"iter_{int(text):07d}" if text.isdecimal() else "release")
    if any(newest.glob("mp_rank_*")):
        problem = f"{newest.name} is of Megatron's older format (mp_rank_…)"
        fix = "save it once more with --ckpt-convert-format torch_dist, and import that"
        raise CheckpointError(folder, problem, fix)
    if not (newest / DCP_FILE).is_file():
        problem = f"{TRACKER_FILE} says {text[:40]!r}, but {newest.name} has no {DCP_FILE}"
        raise CheckpointError(folder, problem, "name the folder of an iteration (iter_…)")
    return newest


class MegatronFolder:
    """The weights of one iteration, found by their names without any prefix."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = DcpReader(path)
        items = self._reader.read_metadata().state_dict_metadata
        weights = {
            name: item
            for name, item in items.items()
            if isinstance(item, TensorStorageMetadata) and not OTHERS.search(name)
        }
        embedding = next((name for name in weights if name.endswith(EMBEDDING)), None)
        if embedding is None:
            problem = f"holds no {EMBEDDING}: it is no GPT model of Megatron-core"
            raise CheckpointError(path, problem, "name the folder of a model's checkpoint")
        self._prefix = embedding.removesuffix(EMBEDDING)
        self.stored = {name.removeprefix(self._prefix): item for name, item in weights.items()}
        self.others = len(items) - len(weights)

    def choose(self, model: Model) -> Chosen:
        """What makes each tensor of a model; an error where this is another model."""
        chosen = [(rule, self._form(rule)) for rule in megatron_rules(model)]
        parts = [piece for _, form in chosen for piece in form]
        used = {piece.name for piece in parts}
        if unused := [name for name in self.stored if name not in used]:
            more = f" and {len(unused) - NAMES_SHOWN} more" if len(unused) > NAMES_SHOWN else ""
            raise self._another(f"has {', '.join(unused[:NAMES_SHOWN])}{more}; the model has not")
        for piece in parts:
            if piece.indices and self.stored[piece.name].size[0] != model.layers:
                layers = self.stored[piece.name].size[0]
                raise self._another(f"has {layers} layers of {piece.name}, not {model.layers}")
        return chosen

    def tensors(self, chosen: Chosen) -> Iterator[tuple[str, Tensor]]:
        """Ours, one after another."""
        for rule, form in chosen:
            yield rule.fqn, rule.fuse([self._read(part) for part in form])

    def _form(self, rule: MegatronRule) -> tuple[StoredPart, ...]:
        for form in rule.forms:
            if all(part.name in self.stored for part in form):
                for part in form:
                    self._check_shape(part, padded=rule.padded)
                return form
        raise self._another(f"has no {rule.forms[0][0].name} (for {rule.fqn})")

    def _check_shape(self, piece: StoredPart, *, padded: bool) -> None:
        shape = tuple(self.stored[piece.name].size[len(piece.indices) :])
        more_rows = padded and len(shape) == len(piece.shape) and shape[0] > piece.shape[0]
        if shape != piece.shape and not (more_rows and shape[1:] == piece.shape[1:]):
            raise self._another(f"has {piece.name} of the shape {shape}, not {piece.shape}")

    def _another(self, problem: str) -> CheckpointError:
        return CheckpointError(self.path, problem, WRONG_MODEL_FIX)

    def _read(self, piece: StoredPart) -> Tensor:
        """A part of a stored tensor; nothing else of it is read."""
        item, name = self.stored[piece.name], self._prefix + piece.name
        whole = torch.empty(
            (*(1 for _ in piece.indices), *piece.shape), dtype=item.properties.dtype
        )
        offsets = torch.Size([*piece.indices, *(0 for _ in piece.shape)])
        planner = _PartPlanner(name, item, offsets, whole)
        with readable_errors(self.path, name):
            load_dcp({name: whole}, storage_reader=self._reader, planner=planner, no_dist=True)
        return whole.reshape(piece.shape)


class _PartPlanner(DefaultLoadPlanner):
    """Reads the part of a stored tensor that begins at some offsets into ``whole``."""

    def __init__(
        self, name: str, item: TensorStorageMetadata, offsets: torch.Size, whole: Tensor
    ) -> None:
        super().__init__()
        self._name, self._item, self._whole = name, item, whole
        self._chunk = ChunkStorageMetadata(offsets=offsets, sizes=whole.shape)

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(create_read_items_for_chunk_list(self._name, self._item, [self._chunk]))

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._whole
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for dim, (start, length) in enumerate(spans):
            target = target.narrow(dim, start, length)
        return target.detach()
