"""Attention within packed documents on a GPU: exact, fused, and compiled once."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

from phalanx.model.attention import CausalAttention, document_mask, plain_attention, window_mask
from phalanx.parallel import context

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
HEADS, KV_HEADS, WIDTH = 8, 2, 64


def inputs(sequence: int) -> list[Tensor]:
    """Queries, keys and values [1, seq, heads, width]."""
    torch.manual_seed(0)
    shapes = [(1, sequence, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    made = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return [tensor.requires_grad_() for tensor in made]


def documents(sequence: int, length: int) -> Tensor:
    return (torch.arange(sequence, device="cuda") // length)[None].int()


def attend(tensors: list[Tensor], numbers: Tensor) -> list[Tensor]:
    """Result and gradients."""
    out = CausalAttention()(*tensors, document_mask(numbers))
    return [out, *torch.autograd.grad(out, tensors, torch.ones_like(out))]


def textbook(tensors: list[Tensor], numbers: Tensor) -> list[Tensor]:
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    q, k, v = (tensor.transpose(1, 2) for tensor in wide)
    same = numbers[:, None, :, None] == numbers[:, None, None, :]
    visible = same & torch.ones_like(same[0, 0]).tril()
    out = F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True).transpose(1, 2)
    return [out, *torch.autograd.grad(out, wide, torch.ones_like(out))]


@pytest.mark.parametrize("length", [7, 100, 1000])
def test_documents_see_only_themselves(length: int) -> None:
    tensors, numbers = inputs(512), documents(512, length)
    for found, expected in zip(attend(tensors, numbers), textbook(tensors, numbers), strict=True):
        assert float((found.float() - expected).norm() / expected.norm()) < 1e-2


def test_no_score_is_kept_and_nothing_is_compiled_again() -> None:
    sequence = 8192
    tensors = inputs(sequence)
    attend(tensors, documents(sequence, 300))
    graphs = counters["stats"]["unique_graphs"]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(tensors, documents(sequence, 777))
    held = torch.cuda.max_memory_allocated() - before
    assert held < HEADS * sequence * sequence, "less than one byte a score"
    assert counters["stats"]["unique_graphs"] == graphs


def test_backward_may_pass_twice_where_a_schedule_splits_it() -> None:
    torch._dynamo.reset()
    tensors, numbers = inputs(256), documents(256, 100)
    with torch._functorch.config.patch(donated_buffer=False):
        out = CausalAttention()(*tensors, document_mask(numbers))
        slope = torch.ones_like(out)
        first = torch.autograd.grad(out, tensors[0], slope, retain_graph=True)
        again = torch.autograd.grad(out, tensors, slope)
    assert torch.equal(first[0], again[0])


def test_capped_scores_and_sinks_equal_the_textbook() -> None:
    tensors = [*inputs(512), torch.randn(HEADS, device="cuda").requires_grad_()]
    mask = window_mask(512, 512, tensors[0].device, blocks=True)
    out = CausalAttention(softcap=2.0)(*tensors[:3], mask, tensors[3])
    found = [out, *torch.autograd.grad(out, tensors, torch.ones_like(out))]
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    q, k, v = (tensor.transpose(1, 2) for tensor in wide[:3])
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 1) for tensor in (k, v))
    plain = plain_attention(q, k, v, None, WIDTH**-0.5, 2.0, wide[3]).transpose(1, 2)
    expected = [plain, *torch.autograd.grad(plain, wide, torch.ones_like(plain))]
    for mine, theirs in zip(found, expected, strict=True):
        assert float((mine.float() - theirs).norm() / theirs.norm()) < 1e-2


def played_ring(tensors: list[Tensor], numbers: Tensor, size: int) -> list[Tensor]:
    """Result and gradients of ring attention, the turns of all ranks made here one by one."""
    q, k, v = (tensor.detach().transpose(1, 2).contiguous() for tensor in tensors)
    places = [context.local_positions("ring", q.shape[2], r, size).cuda() for r in range(size)]
    out, total = torch.zeros_like(q, dtype=torch.float32), torch.zeros(q.shape[:3], device="cuda")
    slopes = [torch.zeros_like(each, dtype=torch.float32) for each in (q, k, v)]
    for backward in (False, True):
        for rank, here in enumerate(places):
            merged = torch.zeros_like(q[:, :, here], dtype=torch.float32)
            sums = torch.full(merged.shape[:-1], -torch.inf, device="cuda")
            for step in range(size):
                source = (rank - step) % size
                queries, keys = context._visible(len(here), rank, source)
                hidden = context._hidden(numbers, rank, source, size, queries, keys)
                own, theirs = here[queries], places[source][keys]
                block = (q[:, :, own], k[:, :, theirs], v[:, :, theirs])
                if not backward:
                    part, weight = context._attend(*block, step == 0, None, hidden)
                    context._merge(merged[:, :, queries], sums[:, :, queries], part, weight)
                    continue
                known = (out[:, :, own].to(q.dtype), total[:, :, own])
                ones = torch.ones_like(block[0])
                found = context._attend_backward(ones, *block, *known, step == 0, None, hidden)
                for slope, at, added in zip(slopes, (own, theirs, theirs), found, strict=True):
                    slope[:, :, at] += added
            if not backward:
                out[:, :, here], total[:, :, here] = merged, sums
    return [each.transpose(1, 2) for each in (out, *slopes)]


@pytest.mark.parametrize("length", [7, 100, 1000])
@pytest.mark.parametrize("size", [2, 4])
def test_the_ring_hides_other_documents(size: int, length: int) -> None:
    tensors, numbers = inputs(512), documents(512, length)
    found = played_ring(tensors, numbers, size)
    for one, other in zip(found, textbook(tensors, numbers), strict=True):
        assert float((one.float() - other).norm() / other.norm()) < 1e-2
