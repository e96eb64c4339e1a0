"""Import and export of Hugging Face safetensors folders, one tensor at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from phalanx.config import Model
from phalanx.model.hf.config import config_from_hf, config_to_hf, kind_of, read_config
from phalanx.model.hf.files import INDEX_FILE, SINGLE_FILE, HfError, tensor_files
from phalanx.model.hf.layout import Rule, TensorSource, copies, rules

MOST_OPEN_FILES = 2  # parts of one of our tensors are mostly in one file, or in neighbours
COMPARED_ROWS = 4096  # at once, of an embedding and its head
COMPUTED_SUFFIXES = (".rotary_emb.inv_freq",)  # in old files; follows from the configuration


def load_hf(folder: Path, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield our tensors (all, or those in ``names``) as stored, holding one at a time."""
    model = config_from_hf(folder)
    files = tensor_files(folder)
    chosen = [(rule, _choose(folder, rule, files)) for rule in rules(model, _kind(folder))]
    used = {name for _, source in chosen for name, _ in source.pieces}
    used |= {name for rule in copies(model) for name, _ in _pieces(rule)}
    if model.tied_embedding:
        used.add("lm_head.weight")  # some writers store the tied copy too
    for name in files:
        if name not in used and not name.endswith(COMPUTED_SUFFIXES):
            raise HfError(folder, f"tensor {name} has no place in the model that config.json names")
    if model.tied_embedding and "lm_head.weight" in files:
        _refuse_other_head(folder, files)
    handles: dict[str, Any] = {}
    for rule, source in chosen:
        if names is None or rule.fqn in names:
            pieces = [_read(folder, files, handles, *piece) for piece in source.pieces]
            yield rule.fqn, source.fuse(pieces)


def export_hf(
    state: Mapping[str, Tensor],
    model: Model,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 5 * 10**9,
    context: int = 0,
) -> None:
    """Write full tensors as a folder that transformers loads; config.json is written last.

    Where the folder cannot be written, what was begun is removed again.
    """
    exported = [rule for rule in rules(model, kind_of(model)) if _is_stored(rule, model)]
    _check_state(state, exported, model)
    exported += copies(model)
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
            raise HfError(folder, "already holds a model: name an empty folder")
        _write_files(state, exported, folder, dtype, max_shard_bytes, written)
        for path in written:
            make_readable(path)
        written.append(folder / "config.json")
        written[-1].write_text(json.dumps(config_to_hf(model, dtype, context), indent=2))
    except (OSError, SafetensorError) as error:
        for path in written:
            path.unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        fix = "name a folder that you may write, on a disk with room"
        raise HfError(folder, f"cannot be written: {reason}; {fix}") from error


def exporter(model: Model, dtype: torch.dtype) -> Callable[[str, Tensor], dict[str, Tensor]]:
    """What makes of one of our tensors those that a Hugging Face folder has in its place."""
    rules_of: dict[str, list[Rule]] = {}
    for rule in (*rules(model, kind_of(model)), *copies(model)):
        if _is_stored(rule, model):
            rules_of.setdefault(rule.fqn, []).append(rule)

    def export(fqn: str, whole: Tensor) -> dict[str, Tensor]:
        return {
            name: _own_copy(part, rule.keep or dtype)
            for rule in rules_of.get(fqn, ())
            for (name, _), part in zip(
                _pieces(rule), rule.sources[0].split(whole.detach()), strict=True
            )
        }

    return export


def make_readable(path: Path) -> None:
    """Give a file the mode that any new file has: safetensors keeps its own to their owner."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def _write_files(
    state: Mapping[str, Tensor],
    exported: Sequence[Rule],
    folder: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
    written: list[Path],
) -> None:
    """The weights in files of a limited size, with an index where there are several."""
    sizes = {
        name: _bytes(shape, rule.keep or dtype)
        for rule in exported
        for name, shape in _pieces(rule)
    }
    placed = _place(sizes, max_shard_bytes)
    last_of_file = {file: name for name, file in placed.items()}
    pending: dict[str, Tensor] = {}
    for rule in exported:
        parts = rule.sources[0].split(state[rule.fqn].detach())
        for (name, _), part in zip(_pieces(rule), parts, strict=True):
            pending[name] = _own_copy(part, rule.keep or dtype)
            if last_of_file[placed[name]] == name:
                written.append(folder / placed[name])
                save_file(pending, written[-1], metadata={"format": "pt"})
                pending = {}
    if len(last_of_file) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": placed}
        written.append(folder / INDEX_FILE)
        written[-1].write_text(json.dumps(index, indent=2))


def _kind(folder: Path) -> str:
    return str(read_config(folder)["model_type"])


def _choose(folder: Path, rule: Rule, files: Mapping[str, str]) -> TensorSource:
    for source in rule.sources:
        if source.pieces[0][0] in files:
            break
    else:
        source = rule.sources[0]
    for name, _ in source.pieces:
        if name not in files:
            raise HfError(folder, f"tensor {name} is missing (for {rule.fqn})")
    return source


def _read(
    folder: Path,
    files: Mapping[str, str],
    handles: dict[str, Any],
    name: str,
    shape: tuple[int, ...],
) -> Tensor:
    file = files[name]
    try:
        if file not in handles:
            if len(handles) == MOST_OPEN_FILES:  # each is mapped as a whole
                handles.pop(next(iter(handles)))
            handles[file] = safe_open(folder / file, framework="pt")
        tensor: Tensor = handles[file].get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise HfError(folder, f"tensor {name} cannot be read from {file}: {error}") from error
    if tensor.shape != shape:
        problem = f"tensor {name} has the shape {tuple(tensor.shape)}, config.json implies {shape}"
        raise HfError(folder, problem)
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        kind = str(tensor.dtype).removeprefix("torch.")
        problem = f"tensor {name} is of {kind}: weights in quantised form are not read"
        raise HfError(folder, problem)
    return tensor


def _refuse_other_head(folder: Path, files: Mapping[str, str]) -> None:
    """Raise HfError where the head is said to be the embedding and is stored as another matrix."""
    names = ("lm_head.weight", "model.embed_tokens.weight")
    try:
        with (
            safe_open(folder / files[names[0]], framework="pt") as one,
            safe_open(folder / files[names[1]], framework="pt") as two,
        ):
            head, embedding = one.get_slice(names[0]), two.get_slice(names[1])
            shape = head.get_shape()
            same = shape == embedding.get_shape() and all(
                torch.equal(head[at : at + COMPARED_ROWS], embedding[at : at + COMPARED_ROWS])
                for at in range(0, shape[0], COMPARED_ROWS)
            )
    except (OSError, SafetensorError) as error:
        raise HfError(folder, f"tensor {names[0]} cannot be read: {error}") from error
    if not same:
        problem = "config.json ties the embedding and the head, and lm_head.weight is another one"
        fix = "set tie_word_embeddings to false, or remove the tensor"
        raise HfError(folder, f"{problem} than {names[1]}: {fix}")


def _is_stored(rule: Rule, model: Model) -> bool:
    return not (model.tied_embedding and rule.fqn == "head.weight")


def _check_state(state: Mapping[str, Tensor], exported: list[Rule], model: Model) -> None:
    # A state that is read when it is asked for knows its shapes without.
    tensors = state.shapes() if hasattr(state, "shapes") else {n: t.shape for n, t in state.items()}
    for rule in exported:
        if rule.fqn not in tensors:
            raise HfError(None, f"tensor {rule.fqn} is missing from the state to export")
        if tensors[rule.fqn] != rule.shape:
            shapes = f"{tuple(tensors[rule.fqn])}, the model needs {rule.shape}"
            raise HfError(None, f"tensor {rule.fqn} has the shape {shapes}")
    expected = {rule.fqn for rule in exported} | (
        {"head.weight"} if model.tied_embedding else set()
    )
    for fqn in state:
        # The bias is a buffer of every router; kind_of has refused the models that use it.
        if fqn not in expected and not fqn.endswith(".moe.router.expert_bias"):
            raise HfError(None, f"tensor {fqn} is no part of the model to export")
    tied = model.tied_embedding and "head.weight" in state
    if tied and not torch.equal(state["head.weight"], state["embed.weight"]):
        raise HfError(None, "head.weight differs from embed.weight though they are tied")


def _pieces(rule: Rule) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return rule.sources[0].pieces


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _place(sizes: Mapping[str, int], max_shard_bytes: int) -> dict[str, str]:
    """File of each tensor: filled in order, none over the limit unless one tensor is."""
    shard_of: dict[str, int] = {}
    shard, filled = 1, 0
    for name, size in sizes.items():
        if filled and filled + size > max_shard_bytes:
            shard, filled = shard + 1, 0
        shard_of[name] = shard
        filled += size
    if shard == 1:
        return dict.fromkeys(sizes, SINGLE_FILE)
    return {name: f"model-{n:05d}-of-{shard:05d}.safetensors" for name, n in shard_of.items()}


def _own_copy(part: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy: safetensors refuses tensors that share memory."""
    return part.to("cpu", dtype, copy=True, memory_format=torch.contiguous_format)
