"""Between checkpoints and Hugging Face folders. The weights must fit into host memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from phalanx.checkpoint.checkpointer import Checkpointer
from phalanx.checkpoint.folder import latest
from phalanx.checkpoint.loader import stored_tensors
from phalanx.checkpoint.manifest import CheckpointError, Extra, read_manifest
from phalanx.config import Model, resolve_model
from phalanx.data import Cursor
from phalanx.model.hf import config_from_hf, export_hf, load_hf

MODEL_PREFIX = "model."  # of the weights among a checkpoint's tensors
ROUTER_SUFFIX = ".router.weight"


def export_checkpoint(path: Path, folder: Path, dtype: torch.dtype, max_shard_bytes: int) -> int:
    """Write a checkpoint's weights as a Hugging Face folder; the number of parameters."""
    manifest = read_manifest(path)
    if "model" not in manifest.config:
        raise CheckpointError(path, "its manifest does not say which model this is")
    model = resolve_model(msgspec.convert(manifest.config["model"], Model))
    stored = {
        key: torch.empty(shape, dtype=stored_dtype)
        for key, (shape, stored_dtype) in stored_tensors(path).items()
        if key.startswith(MODEL_PREFIX)
    }
    Checkpointer(path.parent).load(path, stored)
    state = {key.removeprefix(MODEL_PREFIX): tensor for key, tensor in stored.items()}
    context = manifest.config.get("data", {}).get("sequence", 0)
    export_hf(state, model, folder, dtype, max_shard_bytes, context)
    return sum(tensor.numel() for tensor in state.values())


def import_checkpoint(folder: Path, out: Path) -> Path:
    """Write a Hugging Face folder's weights as the checkpoint of step 0, without optimizer."""
    if latest(out) is not None:
        raise CheckpointError(out, "holds a checkpoint already", "name another folder")
    model = config_from_hf(folder)
    tensors = {MODEL_PREFIX + fqn: tensor for fqn, tensor in load_hf(folder)}
    for name, router in list(tensors.items()):
        if name.endswith(ROUTER_SUFFIX):  # the folder has no selection bias, a trainer does
            bias = name.removesuffix("weight") + "expert_bias"
            tensors[bias] = torch.zeros(len(router), dtype=torch.float32)
    extra = Extra(
        tokens=0,
        cursor=Cursor(),
        mesh={},
        config_hash="",
        config={"model": msgspec.to_builtins(model)},
    )
    return Checkpointer(out).save(0, tensors, extra)
