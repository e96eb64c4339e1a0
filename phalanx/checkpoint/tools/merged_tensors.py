"""Weights with their adapters in them, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from phalanx.config import Adapter, Job, Model, resolve_model
from phalanx.model import make_model, prepare_post_training
from phalanx.model.post_training.adapters import MARK, AdapterLayout, adapters_of, merged


class ShapedTensors(Protocol):
    """Tensors by name, whose shapes are known before they are read."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def shapes(self) -> dict[str, torch.Size]: ...


class MergedTensors(Mapping[str, Tensor]):
    """A state without its adapters: what they add is in the weights beside them."""

    def __init__(self, state: ShapedTensors, layouts: Mapping[str, AdapterLayout]) -> None:
        self._state, self._layouts = state, layouts
        self._shapes = {n: shape for n, shape in state.shapes().items() if MARK not in n}

    def __getitem__(self, name: str) -> Tensor:
        weight, layer = self._state[name], name.removesuffix(".weight")
        if layer == name or layer not in self._layouts:
            return weight
        return merged(weight, self._layouts[layer], adapter_tensors(self._state, layer))

    def shapes(self) -> dict[str, torch.Size]:
        """Without reading anything."""
        return self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def adapter_tensors(state: ShapedTensors, layer: str) -> dict[str, Tensor]:
    """The parameters of one layer's adapter, by their own names."""
    prefix = layer + MARK
    names = [name for name in state.shapes() if name.startswith(prefix)]
    return {name.removeprefix(prefix): state[name] for name in names}


def adapter_layouts(config: Mapping[str, Any]) -> dict[str, AdapterLayout]:
    """The adapters of a checkpoint, from its settings, by the name of their layer."""
    adapter = msgspec.convert(config.get("adapter", {}), Adapter)
    if adapter.kind == "none":
        return {}
    model = resolve_model(msgspec.convert(config["model"], Model))
    with torch.device("meta"):
        whole = prepare_post_training(make_model(model), Job(model=model, adapter=adapter))
    return {layer: each.layout for layer, each in adapters_of(whole).items()}
