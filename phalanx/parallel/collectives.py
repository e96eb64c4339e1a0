"""Differentiable collectives on local tensors, and weights that are slices.

Parallel parameters are stored as DTensors, so that FSDP2 and checkpoints know their layout;
arithmetic runs on their local part with the communication written out here.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, distribute_tensor

# torch 2.13 renamed these; 2.11 and 2.12 have the old names only.
_all_gather = getattr(functional, "all_gather_single_autograd", None) or (
    functional.all_gather_tensor_autograd
)
_reduce_scatter = getattr(functional, "reduce_scatter_single_autograd", None) or (
    functional.reduce_scatter_tensor_autograd
)


class UnknownParameterError(Exception):
    """Parameters of which an axis was not told what a rank holds of them and adds to them."""

    def __init__(self, axis: str, names: list[str]) -> None:
        super().__init__(
            f"{axis} parallelism does not know {', '.join(names)}: each rank would train a copy on "
            "part of its gradient. Declare it where it is made (phalanx.model.declare), or set "
            f"parallel.{axis} = 1"
        )


def all_sum(x: Tensor) -> Tensor:
    """Sum over all ranks, in place; the tensor itself when there is only one."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(x)
    return x


def gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Concatenate the ranks' parts along dim; backward sums and scatters."""
    gathered: Tensor = _all_gather(x.contiguous(), dim, group)
    return gathered


def scatter_sum(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks and keep this rank's part along dim; backward gathers."""
    part: Tensor = _reduce_scatter(x.contiguous(), "sum", dim, group)
    return part


def exchange(
    x: Tensor, group: dist.ProcessGroup, output: list[int] | None, sent: list[int] | None
) -> Tensor:
    """All-to-all along dim 0, equal parts or given sizes; backward sends gradients back."""
    received: Tensor = functional.all_to_all_single_autograd(x.contiguous(), output, sent, group)
    return received


class _SumGradientOfShare(Function):
    """Sum over ranks whose backward passes on the gradient of this rank's own share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, for a value that every rank then uses identically in the loss."""
    total: Tensor = _SumGradientOfShare.apply(x, group)  # type: ignore[no-untyped-call]
    return total


def shard_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, *, partial: bool = False
) -> None:
    """Store a parameter as a DTensor over ``mesh`` while the module goes on using local tensors.

    ``partial`` says that each rank sees only part of the gradient of a replicated parameter.
    """
    parameter = module._parameters[name]
    assert parameter is not None
    if not isinstance(parameter, DTensor):  # else another module that shares it was here before
        whole, trained = parameter.data, parameter.requires_grad
        parameter = nn.Parameter(distribute_tensor(whole, mesh, [placement]), trained)
        module._parameters[name] = parameter
    base = type(module)
    grads = (Partial(),) if partial else (placement,)

    def local(self: nn.Module) -> Any:
        value = self._parameters[name]
        # FSDP puts its own, further divided DTensor here while the parameter is not gathered.
        if isinstance(value, DTensor) and value.device_mesh == mesh:
            return value.to_local(grad_placements=grads)
        return value

    # A property shadows nn.Module's attribute lookup, so the module's own forward needs no change.
    module.__class__ = type(base.__name__, (base,), {name: property(local)})
