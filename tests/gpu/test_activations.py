"""What a block keeps on a real device, against the planner's count."""

from __future__ import annotations

import gc
from typing import Any, cast

import numpy as np
import pytest
import torch

from phalanx.config import Model, Moe, resolve_model
from phalanx.model import Block, ForwardContext, Transformer
from phalanx.model.rope import rope_tables
from phalanx.parallel.recompute import apply_recompute
from phalanx.plan import Mapping, Software, Workload
from phalanx.plan.grid import grid_of
from phalanx.plan.memory.kept_activations import block_bytes
from phalanx.plan.workload import RECOMPUTES

pytestmark = pytest.mark.gpu

SEQUENCE = 4096
SHAPE: dict[str, Any] = {"dim": 4096, "layers": 4, "heads": 32, "kv_heads": 8, "vocab": 1024}
DENSE = resolve_model(Model(**SHAPE, ffn=14336))
EXPERTS = resolve_model(Model(**SHAPE, ffn=14336, moe=Moe(experts=8, top_k=2, ffn=4096)))


def kept_by_a_block(model: Model, recompute: str) -> float:
    """Bytes that stay allocated after forward for each further block."""
    gc.collect()  # what an earlier model left in circles must not go while we count
    part = Transformer(model).to("cuda", torch.bfloat16)
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    apply_recompute(part, recompute)
    cos, sin = rope_tables(model, torch.arange(SEQUENCE, device="cuda"))
    context = ForwardContext(cos, sin, None, None, torch.tensor(1.0, device="cuda"))
    x = torch.randn(1, SEQUENCE, model.dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    held = []
    for layer in part.layers.values():
        x = cast(Block, layer)(x, context)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    return (held[-1] - held[0]) / (len(held) - 1)


@pytest.mark.parametrize(
    ("model", "recompute", "within"),
    [
        (DENSE, "none", 0.05),
        (DENSE, "selective", 0.05),
        (DENSE, "full", 0.05),
        (EXPERTS, "none", 0.25),  # eager: the compiler keeps less between the experts' products
        (EXPERTS, "full", 0.05),
    ],
)
def test_a_block_keeps_what_the_planner_counts(model: Model, recompute: str, within: float) -> None:
    workload = Workload(model=model, sequence=SEQUENCE, global_batch=1)
    level = np.array([RECOMPUTES.index(recompute)])
    moe = model.moe is not None
    counted = block_bytes(workload, grid_of([Mapping()]), Software(), level, moe=moe)[0]
    assert kept_by_a_block(model, recompute) == pytest.approx(counted, rel=within)
