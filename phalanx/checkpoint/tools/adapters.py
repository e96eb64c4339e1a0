"""Trained adapters out of a checkpoint: merged into its weights, or as a folder of PEFT's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx.checkpoint.format.folder import latest
from phalanx.checkpoint.format.manifest import CheckpointError, Extra
from phalanx.checkpoint.format.tier import open_source
from phalanx.checkpoint.read.load import StoredTensors
from phalanx.checkpoint.tools.convert import MODEL_PREFIX, LazyTensors
from phalanx.checkpoint.tools.merged_tensors import (
    MergedTensors,
    adapter_layouts,
    adapter_tensors,
)
from phalanx.checkpoint.tools.rewrite import SHARD_BYTES, write_whole
from phalanx.config import Adapter, Model, resolve_model
from phalanx.data import Cursor
from phalanx.model.hf import HfError
from phalanx.model.hf.config import kind_of
from phalanx.model.hf.exchange import make_readable
from phalanx.model.hf.layout import rules
from phalanx.model.post_training.adapters import AdapterLayout, magnitude

PEFT_PREFIX = "base_model.model."  # of PEFT's wrapper around a model
PEFT_CONFIG, PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def merge_checkpoint(path: Path | str, out: Path, shard_bytes: int = SHARD_BYTES) -> Path:
    """Write a checkpoint's weights, adapters merged in, as that of step 0 without optimizer."""
    if latest(out) is not None:
        raise CheckpointError(out, "holds a checkpoint already", "name another folder")
    source = open_source(path)
    config = source.manifest.config
    layouts = _layouts(path, config)
    state = MergedTensors(LazyTensors(StoredTensors(source), MODEL_PREFIX), layouts)
    weights = ((MODEL_PREFIX + name, state[name]) for name in state)
    extra = Extra(
        tokens=0, cursor=Cursor(), mesh={}, config_hash="", config={"model": config["model"]}
    )
    return write_whole(out, 0, weights, extra, shard_bytes, origin=f"{path}, adapters merged")


def export_peft(
    path: Path | str, folder: Path, base: str = "", dtype: torch.dtype = torch.float32
) -> int:
    """Write a checkpoint's adapters as a folder that ``peft`` loads; the number of parameters.

    ``base`` is the model that they belong to, as PEFT shall find it; "": the run's own start.
    """
    source = open_source(path)
    config = source.manifest.config
    layouts = _layouts(path, config)
    model = resolve_model(msgspec.convert(config["model"], Model))
    adapter = msgspec.convert(config["adapter"], Adapter)
    state = LazyTensors(StoredTensors(source), MODEL_PREFIX)
    tensors = dict(_peft_tensors(state, model, layouts, dtype))
    base = base or config.get("checkpoint", {}).get("load_hf", "")
    _write(folder, tensors, peft_config(adapter, base))
    return sum(tensor.numel() for tensor in tensors.values())


def peft_config(adapter: Adapter, base: str) -> dict[str, Any]:
    """What ``adapter_config.json`` says of these adapters."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(adapter.targets),
        "use_dora": adapter.kind == "dora",
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _peft_tensors(
    state: LazyTensors, model: Model, layouts: dict[str, AdapterLayout], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Of each adapted matrix of a Hugging Face model its own parts, under PEFT's names."""
    for rule in rules(model, kind_of(model)):
        layer = rule.fqn.removesuffix(".weight")
        if layer == rule.fqn or (layout := layouts.get(layer)) is None:
            continue
        names = [name.removesuffix(".weight") for name, _ in rule.sources[0].pieces]
        adapted = [n for n, chosen in zip(names, layout.adapted, strict=True) if chosen]
        factors = adapter_tensors(state, layer)
        each = {"lora_A.weight": factors["a"].split(layout.rank)}
        each["lora_B.weight"] = tuple(layout.rows_of_each(factors["b"]))
        if "growth" in factors:
            lengths = magnitude(state[rule.fqn], factors["growth"])
            each["lora_magnitude_vector"] = tuple(layout.rows_of_each(lengths))
        for suffix, parts in each.items():
            for name, part in zip(adapted, parts, strict=True):
                yield f"{PEFT_PREFIX}{name}.{suffix}", part.to(dtype, copy=True).contiguous()


def _layouts(path: Path | str, config: dict[str, Any]) -> dict[str, AdapterLayout]:
    if "model" not in config or not (layouts := adapter_layouts(config)):
        fix = "name a checkpoint of a job with adapter.kind; others `export-hf` takes as they are"
        raise CheckpointError(path, "has no adapters", fix)
    return layouts


def _write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Both files; the configuration last, which says that the weights are complete."""
    if (folder / PEFT_CONFIG).exists():
        raise HfError(folder, "already holds adapters: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / PEFT_WEIGHTS, metadata={"format": "pt"})
        make_readable(folder / PEFT_WEIGHTS)
        (folder / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        (folder / PEFT_WEIGHTS).unlink(missing_ok=True)
        raise HfError(folder, f"cannot be written: {error.strerror or error}") from error
