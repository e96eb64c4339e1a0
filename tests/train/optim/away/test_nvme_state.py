"""AdamW whose state is in a file: the same bits as in memory, however often it is cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.config import Optimizer, StateFormat
from phalanx.parallel import Weight
from phalanx.train.optim.away import nvme_state
from phalanx.train.optim.guard import GradientVerdict
from phalanx.train.optim.optimizer import AdamW

SHAPES = {"embed.weight": (700, 256), "layers.0.mlp.down.weight": (130, 384), "norm.weight": (77,)}
STRETCH = 1 << 17  # elements: the least of which 8-bit scales fill a page


@pytest.fixture(autouse=True)
def many_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_state, "STRETCH", STRETCH)


def weights(dtype: torch.dtype) -> list[Weight]:
    found, generator = [], torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        master = torch.randn(shape, generator=generator)
        parameter = nn.Parameter(master.to(dtype))
        same = parameter.detach() if dtype == torch.float32 else master
        found.append(Weight(name, parameter, same, copies=1))
    return found


class Training:
    """Steps on drawn gradients; the third is skipped."""

    def __init__(
        self,
        folder: Path | None,
        state: StateFormat = "float32",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.weights = weights(dtype)
        offload = folder is not None
        self.optimizer = AdamW(self.weights, Optimizer(state=state), offload, folder)

    def steps(self, first: int, past: int) -> None:
        for step in range(first, past):
            generator = torch.Generator().manual_seed(step)
            for weight in self.weights:
                drawn = torch.randn(weight.parameter.shape, generator=generator)
                weight.parameter.grad = drawn.to(weight.parameter.dtype)
            skip = torch.tensor(step == 2)
            self.optimizer.step(0.01, GradientVerdict(torch.tensor(0.5), skip, skip))

    def state(self) -> dict[str, Tensor]:
        """The live tensors, as checkpoints ask for them."""
        self.optimizer.settle()
        masters = {f"model.{weight.name}": weight.master for weight in self.weights}
        return masters | self.optimizer.tensors()

    def load(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state().items():
            tensor.copy_(state[name])
        for weight in self.weights:
            weight.publish()

    def bits(self) -> dict[str, Tensor]:
        local = {f"local.{weight.name}": weight.local for weight in self.weights}
        return {name: tensor.clone() for name, tensor in (self.state() | local).items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_state_in_memory(tmp_path: Path, dtype: torch.dtype) -> None:
    here, away = Training(None, dtype=dtype), Training(tmp_path, dtype=dtype)
    for training in (here, away):
        training.steps(0, 5)
    assert differing(here.bits(), away.bits()) == []
    assert all(weight.master is not weight.local for weight in away.weights)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("state", ["float32", "bfloat16", "int8"])
def test_a_run_that_is_cut_goes_on_with_the_same_bits(tmp_path: Path, state: StateFormat) -> None:
    whole = Training(tmp_path, state)
    whole.steps(0, 4)
    kept = whole.bits()
    whole.steps(4, 7)
    resumed = Training(tmp_path, state)
    resumed.steps(0, 1)  # what it had is replaced
    resumed.load(kept)
    resumed.steps(4, 7)
    assert differing(whole.bits(), resumed.bits()) == []


def test_the_page_cache_gives_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Training(None)
    monkeypatch.setattr(nvme_state.StateFile, "_agrees", lambda *_: False)
    away = Training(tmp_path)
    for training in (here, away):
        training.steps(0, 4)
    assert differing(here.bits(), away.bits()) == []


def test_reads_run_ahead_of_the_update_and_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Training(tmp_path)
    asked: list[int] = []
    update, read = AdamW._update, nvme_state._HostBuffer.begin_read
    seen: list[int] = []

    def begin_read(self: Any, stretch: Any) -> None:
        asked.append(stretch.group)
        read(self, stretch)

    def note(self: AdamW, *arguments: Any) -> None:
        seen.append(len(asked))
        update(self, *arguments)

    monkeypatch.setattr(nvme_state._HostBuffer, "begin_read", begin_read)
    monkeypatch.setattr(AdamW, "_update", note)
    away.steps(0, 1)
    assert asked == [0, 0, 1, 2] and seen == [3, 4, 4, 4]


def test_what_cannot_be_written_ends_the_run_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    away = Training(tmp_path)
    away.steps(0, 1)
    away.state()
    monkeypatch.setattr(os, "pwritev", fail)
    away.steps(1, 2)
    with pytest.raises(OSError, match=r"optimizer state in .* cannot be written"):
        away.state()


def test_what_cannot_be_read_ends_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    away = Training(tmp_path)
    monkeypatch.setattr(os, "preadv", lambda *_: 0)
    with pytest.raises(OSError, match="no byte was moved"):
        away.steps(0, 1)


def test_frozen_weights_stay_where_they_are(tmp_path: Path) -> None:
    away = Training(tmp_path)
    away.weights[1].frozen = True
    before = away.bits()
    away.steps(0, 2)
    changed = differing(before, away.bits())
    assert "model.layers.0.mlp.down.weight" not in changed and "model.embed.weight" in changed
