"""Which collectives of gloo run: some names of theirs make its threads spoil the heap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from phalanx.parallel.collectives import gather, scatter_sum
from phalanx.parallel.gloo import use_plain_all_gathers
from phalanx.train.parity.prove import train
from tests.parallel.test_parity import make_job
from tests.ranks import run_ranks


def collectives_of(work: Callable[[], Any]) -> set[str]:
    """The operations of process groups that run inside."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        work()
    return {event.key for event in profile.key_averages() if event.key.startswith("c10d::")}


def forward_and_backward(collective: Callable[..., Tensor], dim: int) -> Tensor:
    x = torch.ones(2, 4, requires_grad=True)
    collective(x, dim, dist.group.WORLD).sum().backward()
    assert x.grad is not None
    return x.grad


def test_no_gather_takes_the_path_that_spoils_the_heap() -> None:
    def rank() -> list[set[str]]:
        use_plain_all_gathers()
        mesh = init_device_mesh("cpu", (2,))
        part = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        return [
            collectives_of(lambda: forward_and_backward(gather, 1)),
            collectives_of(lambda: forward_and_backward(scatter_sum, 1)),
            collectives_of(lambda: part.full_tensor().sum()),
        ]

    for found in run_ranks(2, rank)[0]:
        assert "c10d::_allgather_base_" in found
        assert not [name for name in found if name.startswith("c10d::allgather_into_tensor")]


def test_a_mesh_trains_without_that_path() -> None:
    sections = {"model": {"layers": 1}, "train": {"steps": 1, "micro_batch": 8}}
    job = make_job(2, {"parallel": {"tensor": 2}, **sections})
    found = run_ranks(2, lambda: collectives_of(lambda: train(job)))[0]
    assert "c10d::_allgather_base_" in found
    assert not [name for name in found if name.startswith("c10d::allgather_into_tensor")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_plain_gather_says_what_torchs_own_does(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    def rank() -> tuple[Tensor, Tensor]:
        size = torch.Size(shape).numel()
        x = (torch.arange(size) + 10 * dist.get_rank()).to(dtype).view(shape)

        def gathered() -> Tensor:
            functional = torch.ops._c10d_functional
            name = dist.group.WORLD.group_name  # type: ignore[union-attr]
            return functional.wait_tensor(functional.all_gather_into_tensor(x, 2, name)).clone()

        theirs = gathered()
        use_plain_all_gathers()
        return theirs, gathered()

    for theirs, ours in run_ranks(2, rank):
        assert theirs.shape == ours.shape and torch.equal(theirs, ours)
