"""Parameters as the optimizer and checkpoints see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from phalanx.model import REPLICATED, Declaration


@dataclass
class Weight:
    """One parameter as the optimizer and checkpoints see it: the block that this rank holds."""

    name: str
    parameter: nn.Parameter
    master: Tensor  # fp32; the parameter's own memory where that is fp32
    copies: int  # ranks that hold this same block
    declaration: Declaration = REPLICATED
    frozen: bool = False  # it stays as it is
    first_row: int = 0  # of the whole parameter that the block begins with
    width_rate: float = 1.0  # factor on the rate at which AdamW learns it

    @property
    def local(self) -> Tensor:
        return local_part(self.parameter)

    @property
    def gradient(self) -> Tensor:
        """The block's gradient of the finished step."""
        main: Tensor | None = getattr(self.parameter, "main_grad", None)
        if main is not None:
            return main
        if self.parameter.grad is None:
            return torch.zeros_like(self.master, device=self.local.device)  # masters may be away
        return local_part(self.parameter.grad)

    def like(self, block: Tensor) -> Tensor:
        """``block`` with the layout of the whole parameter, as checkpoints want it.

        It may have one element for several neighbours of a row.
        """
        p = self.parameter
        if not isinstance(p, DTensor):
            return block
        shape, stride = p.shape, p.stride()
        if block.shape != self.master.shape:
            row = shape[-1] * block.shape[-1] // self.master.shape[-1]
            shape = torch.Size((*shape[:-1], row))
            stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            block, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride
        )

    def publish(self) -> None:
        """Bring the master's values to the weight that computes."""
        if self.master.data_ptr() != self.local.data_ptr():
            self.local.copy_(self.master, non_blocking=True)


def local_part(x: Tensor) -> Tensor:
    """The block of a tensor that is on this rank."""
    return x._local_tensor if isinstance(x, DTensor) else x.detach()
