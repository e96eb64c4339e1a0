"""Load a checkpoint, written on any mesh, as a model for inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from phalanx.checkpoint import CheckpointError
from phalanx.checkpoint.format.tier import open_source
from phalanx.checkpoint.read.load import StoredTensors
from phalanx.checkpoint.tools.convert import (
    AVERAGE_PREFIX,
    FAST_PREFIX,
    MODEL_PREFIX,
    evaluated_weights,
    refuse_without_average,
    trained_config,
)
from phalanx.config import ConfigError, Job, Model, OwnCode, Parallel, resolve, resolve_model
from phalanx.config.own_code import import_code
from phalanx.config.rules.mesh import mesh_problems
from phalanx.model import Router, Transformer, make_model
from phalanx.parallel.precision import cast_parameters
from phalanx.parallel.tensor import apply_tensor_parallel
from phalanx.parallel.weight import local_part
from phalanx.train.evaluate.text import TextCodec, open_codec

DEFAULT_SEQUENCE = 2048  # where nobody says what a model was trained on


class LoadedModel:
    """A model with a checkpoint's weights, whole or tensor-parallel over a group."""

    def __init__(self, model: Transformer, checkpoint: str, step: int, sequence: int) -> None:
        self.model, self.checkpoint, self.step = model, checkpoint, step
        self.sequence = sequence  # tokens that it sees at most
        self.codec: TextCodec | None = None
        self.settings: dict[str, Any] = {}  # of the job that made it
        self.tensor = 1  # ranks that split each matrix

    @property
    def device(self) -> torch.device:
        return self.model.token_weight.device


def load_model(
    checkpoint: Path | str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tensor: int = 1,
    sequence: int = 0,
    tokenizer: Path | None = None,
    average: bool = False,
) -> LoadedModel:
    """Load a checkpoint's model; with ``tensor`` > 1 all ranks of a group call this.

    ``sequence``: tokens that it sees at most; 0: as many as its job trained on. ``average``: with
    the moving average of the weights in their place.
    """
    source = open_source(checkpoint)
    settings = trained_config(source.manifest)
    if "model" not in settings:
        problem = "its manifest does not contain the model's settings"
        raise CheckpointError(checkpoint, problem, "take one that a run or an import wrote")
    if settings.get("adapter", {}).get("kind", "none") != "none":
        problem = "its adapters are not merged into its weights"
        raise CheckpointError(checkpoint, problem, "merge them first with `phalanx convert merge`")
    import_code(msgspec.convert(settings.get("code", {}), OwnCode))
    config = resolve_model(msgspec.convert(settings["model"], Model))
    model = _on_device(config, dtype, device, _mesh(config, device, tensor))
    stored = StoredTensors(source)
    if average:
        refuse_without_average(stored)
    _fill(model, stored, checkpoint, AVERAGE_PREFIX if average else MODEL_PREFIX)
    if settings.get("optimizer", {}).get("kind") == "schedule-free":
        _evaluate(model, stored, settings["optimizer"]["beta1"])
    model.eval().requires_grad_(False)
    model.prepare(torch.arange(1, device=device))
    trained_on = settings.get("data", {}).get("sequence", 0)
    length = sequence or trained_on or DEFAULT_SEQUENCE
    loaded = LoadedModel(model, str(checkpoint), source.manifest.step, length)
    loaded.codec, loaded.settings = open_codec(settings, tokenizer), settings
    loaded.tensor = tensor
    return loaded


def _mesh(config: Model, device: torch.device, tensor: int) -> DeviceMesh | None:
    """The tensor-parallel mesh; None if the model is whole."""
    if tensor == 1:
        return None
    world = dist.get_world_size()
    axes = Parallel(data=world // tensor, tensor=tensor)
    problems = mesh_problems(resolve(Job(model=config, parallel=axes), world), world)
    if refused := [each for each in problems if each.key == "parallel.tensor"]:
        raise ConfigError.of(refused)
    names = ("data", "tensor")
    return init_device_mesh(device.type, (world // tensor, tensor), mesh_dim_names=names)["tensor"]


def _on_device(
    config: Model, dtype: torch.dtype, device: torch.device, mesh: DeviceMesh | None
) -> Transformer:
    """The model on the device with uninitialised weights."""
    with torch.device("meta"):
        model = make_model(config)
    if mesh is not None:
        apply_tensor_parallel(model, mesh)
    cast_parameters(model, dtype)
    model.to_empty(device=device)
    model.tie()  # each module got memory of its own
    return model


def _fill(model: Transformer, stored: StoredTensors, checkpoint: Path | str, prefix: str) -> None:
    """Load every weight, by the name that follows ``prefix``; refuse a checkpoint with tensors that
    the model does not have."""
    wanted: dict[str, Tensor] = dict(model.named_parameters())
    present = {
        name.removeprefix(MODEL_PREFIX)
        for name in stored.tensors()
        if name.startswith(MODEL_PREFIX)
    }
    biases: dict[str, Tensor] = {}  # never averaged
    for name, module in model.named_modules():
        if isinstance(module, Router):
            module.load.zero_()
            module.expert_bias.zero_()
            if f"{name}.expert_bias" in present:
                biases[f"{name}.expert_bias"] = module.expert_bias
    tied = {"head.weight"} if model.config.tied_embedding else set()
    if unknown := sorted(present - wanted.keys() - biases.keys() - tied):
        problem = f"the model of its settings has no {', '.join(unknown[:3])}"
        raise CheckpointError(checkpoint, problem, "evaluate it with the Phalanx that wrote it")
    tensors = {prefix + name: tensor for name, tensor in wanted.items()}
    tensors |= {MODEL_PREFIX + name: tensor for name, tensor in biases.items()}
    stored.check(tensors)
    stored.fill(tensors)


@torch.no_grad()
def _evaluate(model: Transformer, stored: StoredTensors, beta1: float) -> None:
    """The weights that Schedule-Free AdamW evaluates, from trained and fast ones."""
    known = stored.tensors()
    for name, weight in model.named_parameters():
        if FAST_PREFIX + name not in known:
            continue
        trained, fast = (torch.empty_like(weight, dtype=torch.float32) for _ in range(2))
        stored.fill({MODEL_PREFIX + name: trained})
        stored.fill({FAST_PREFIX + name: fast})
        mean = evaluated_weights(local_part(trained), local_part(fast), beta1)
        local_part(weight).copy_(mean)
