"""What tensor parallelism keeps for backward: the planner's count rests on it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from phalanx.config import Model, Moe, resolve_model
from phalanx.model import Block, ForwardContext, Transformer
from phalanx.model.rope import rope_tables
from phalanx.parallel.dryrun import pretended_group
from phalanx.parallel.tensor import apply_tensor_parallel

SEQUENCE, TENSOR = 64, 4
SHAPE: dict[str, Any] = {"dim": 96, "layers": 1, "heads": 8, "kv_heads": 4, "vocab": 128}
DENSE = resolve_model(Model(**SHAPE, ffn=512))
EXPERTS = resolve_model(Model(**SHAPE, ffn=512, moe=Moe(experts=8, top_k=2, ffn=32)))


def saved_shapes(model: Model) -> list[tuple[int, ...]]:
    """Shapes of what autograd keeps of one block on one of four tensor-parallel ranks."""
    with pretended_group(0, TENSOR):
        part = Transformer(model)
        for parameter in part.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        apply_tensor_parallel(part, init_device_mesh("cpu", (TENSOR,)))
        block = cast(Block, part.layers["0"])
        cos, sin = rope_tables(model, torch.arange(SEQUENCE))
        context = ForwardContext(cos, sin, None, None, torch.tensor(1.0))
        x = torch.randn(1, SEQUENCE // TENSOR, model.dim, requires_grad=True)
        shapes: list[tuple[int, ...]] = []

        def pack(tensor: Tensor) -> Tensor:
            shapes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(x, context)
        assert dist.is_initialized()
    return shapes


@pytest.mark.parametrize(("model", "branches"), [(DENSE, 2), (EXPERTS, 1)])
def test_the_gathered_input_of_each_branch_is_kept_whole(model: Model, branches: int) -> None:
    whole = [shape for shape in saved_shapes(model) if shape[-2:] == (SEQUENCE, model.dim)]
    assert len(whole) == branches
