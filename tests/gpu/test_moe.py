"""Experts on a GPU: the grouped kernel equals the loop, and routing never makes the host wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phalanx.config import Moe
from phalanx.model import ForwardContext, MoeLayer
from phalanx.model.moe import grouped_linear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DIM, FFN, EXPERTS = 64, 96, 8


def test_the_grouped_kernel_equals_the_loop() -> None:
    torch.manual_seed(0)
    counts = torch.tensor([5, 0, 300, 1, 0, 17, 64, 0], device="cuda")
    x = torch.randn(int(counts.sum()), DIM, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(EXPERTS, FFN, DIM, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(EXPERTS, FFN, device="cuda", dtype=torch.bfloat16)
    slope = torch.randn(len(x), FFN, device="cuda", dtype=torch.bfloat16)
    results = []
    for dtype in (torch.bfloat16, torch.float32):  # fp32 takes the loop
        a, w, b = (t.to(dtype).requires_grad_() for t in (x, weight, bias))
        out = grouped_linear(a, w, counts, b)
        results.append((out, *torch.autograd.grad(out, (a, w, b), slope.to(dtype))))
    for found, expected in zip(*results, strict=True):
        error = (found.float() - expected).norm() / expected.norm()
        assert error < 5e-3


@pytest.mark.parametrize("balance", ["auxiliary", "bias", "none"])
def test_routing_makes_no_host_synchronisation(balance: Any) -> None:
    torch.manual_seed(0)
    moe = Moe(experts=EXPERTS, top_k=2, ffn=FFN, shared_experts=1, balance=balance, biases=True)
    layer = MoeLayer(DIM, moe).to("cuda", torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 128, DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    empty, weight = torch.empty(0), torch.ones((), device="cuda")
    context = ForwardContext(empty, empty, None, torch.ones(2, 128, device="cuda").bool(), weight)
    layer(x, context).sum().backward()  # first calls may set things up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = layer(x, context)
        out.backward(out.detach())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(out).all()
