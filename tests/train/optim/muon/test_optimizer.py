"""Muon over ranks: blocks of any layout come to what one process comes to, bit by bit."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from phalanx.config import Optimizer
from phalanx.model.declare import Declaration
from phalanx.parallel import Weight
from phalanx.parallel.weight import local_part
from phalanx.train.optim.guard import GradientVerdict
from phalanx.train.optim.muon import Muon
from phalanx.train.optim.optimizer import build_optimizer
from tests.shared_ranks import SharedRanks

STEPS = 3  # the second is skipped


class Parameter(NamedTuple):
    """One of a small model."""

    shape: tuple[int, ...]
    fused: tuple[int, ...] = ()
    split: Placement = Replicate()  # over ranks of a tensor axis


PARAMETERS = {
    "layers.0.qkv": Parameter((32, 12), (8, 4, 4), Shard(0)),
    "layers.0.out": Parameter((12, 16), (), Shard(1)),
    "layers.0.gate_up": Parameter((40, 12), (20, 20)),
    "layers.0.few_rows": Parameter((5, 12)),
    "layers.0.experts": Parameter((5, 12, 8), (6, 6)),
    "layers.0.frozen": Parameter((8, 8)),
    "norm": Parameter((12,)),
}
# Sizes of the axes; FSDP shards over the last but a tensor axis, and copies over the one before.
LAYOUTS = {
    "ddp": ((4,), False),
    "fsdp": ((4,), False),
    "hsdp": ((2, 2), False),
    "fsdp-tensor": ((2, 2), True),
}


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(layout: str) -> dict[str, nn.Parameter]:
    """Of one process with an empty name, else this rank's blocks."""
    whole = {name: drawn(one.shape, 3) for name, one in PARAMETERS.items()}
    if layout in ("", "ddp"):
        return {name: nn.Parameter(value) for name, value in whole.items()}
    sizes, tensor = LAYOUTS[layout]
    names = ("data", "tensor") if tensor else ("copies", "shards")[-len(sizes) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    module = nn.Module()
    for name, value in whole.items():
        made: Tensor = value
        if tensor:
            made = distribute_tensor(value, mesh["tensor"], [PARAMETERS[name].split])
        module.register_parameter(name.replace(".", "_"), nn.Parameter(made))
    fully_shard(module, mesh=mesh["data"] if tensor else mesh)
    return {name: getattr(module, name.replace(".", "_")) for name in whole}


def train(layout: str) -> dict[str, Tensor]:
    """Weights and state after some steps, whole; on this rank of a group or alone."""
    weights = []
    for name, parameter in parameters(layout).items():
        orthogonal = None if len(parameter.shape) < 3 else True
        said = Declaration(fused=PARAMETERS[name].fused, orthogonal=orthogonal)
        weight = Weight(name, parameter, local_part(parameter), 1, said)
        weight.frozen = name.endswith("frozen")
        weights.append(weight)
    group = dist.group.WORLD if layout else None
    made = build_optimizer(weights, Optimizer(kind="muon"), offload=False, group=group)
    assert isinstance(made, Muon)
    for step in range(STEPS):
        for weight in weights:
            whole, p = drawn(tuple(weight.parameter.shape), 10 + step), weight.parameter
            weight.parameter.grad = distribute_like(whole, p) if isinstance(p, DTensor) else whole
        skip = torch.tensor(step == 1)
        made.step(3e-4, GradientVerdict(torch.tensor(0.5), skip, skip))
    state = {weight.name: weight.like(weight.master) for weight in weights} | made.tensors()
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in state.items()
    }


def distribute_like(whole: Tensor, parameter: DTensor) -> DTensor:
    """With the block that a rank's parameter is; FSDP's own order of axes has no such function."""
    numbers = torch.arange(whole.numel(), dtype=torch.float64).view(whole.shape)
    mesh, placements = parameter.device_mesh, parameter.placements
    rows = list(range(mesh.ndim))[::-1]
    local = numbers
    for axis in rows:
        placement = placements[axis]
        if (dim := getattr(placement, "dim", None)) is not None:
            parts = list(local.chunk(mesh.size(axis), dim))
            at = mesh.get_local_rank(axis)
            empty = local.narrow(dim, 0, 0)
            local = parts[at] if at < len(parts) else empty
    block = whole.view(-1)[local.long()]
    return DTensor.from_local(
        block, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_come_to_what_one_process_comes_to(layout: str, shared_ranks: SharedRanks) -> None:
    expected = train("")
    for found in shared_ranks.run(4, train, layout):
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
