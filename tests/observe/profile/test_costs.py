"""FLOPs by shapes, against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from phalanx.observe.profile.costs import bytes_of, flops_of, product_of
from phalanx.observe.profile.events import Operation

FLOAT = ("float", "float", "float")


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("mm", ((3, 5), (5, 7))),
        ("addmm", ((7,), (3, 5), (5, 7))),
        ("bmm", ((2, 3, 5), (2, 5, 7))),
        ("baddbmm", ((2, 3, 7), (2, 3, 5), (2, 5, 7))),
    ],
)
def test_products_count_as_torch_counts_them(
    name: str, shapes: tuple[tuple[int, ...], ...]
) -> None:
    operands = [torch.ones(shape) for shape in shapes]
    with FlopCounterMode(display=False) as counter:
        result = getattr(torch, name)(*operands)
    operation = Operation(f"aten::{name}", shapes, FLOAT)
    assert flops_of(operation) == counter.get_total_flops()
    moved = sum(x.numel() for x in operands) + result.numel()
    assert bytes_of(operation) == 4 * moved


def test_causal_attention_is_half_of_what_torch_counts() -> None:
    query, key = (1, 2, 8, 4), (1, 2, 16, 4)
    operands = (query, key, key)
    forward = Operation("aten::_scaled_dot_product_flash_attention", operands, FLOAT)
    assert 2 * flops_of(forward) == sdpa_flop_count(*operands)
    backward = Operation("aten::_scaled_dot_product_cudnn_attention_backward", (query, *operands))
    assert 2 * flops_of(backward) == sdpa_backward_flop_count(query, *operands)


@pytest.mark.parametrize(
    ("values", "left", "right"),
    [
        (("", "", "False", "False"), (3, 5), (5, 7)),
        (("", "", "False", "True"), (3, 5), (7, 5)),
        (("", "", "True", "False"), (5, 3), (5, 7)),
    ],
)
def test_our_own_product_says_what_it_turns(
    values: tuple[str, ...], left: tuple[int, int], right: tuple[int, int]
) -> None:
    product = product_of(Operation("phalanx::matmul", (left, right), FLOAT[:2], values))
    assert product is not None
    assert (product.rows, product.inner, product.columns) == (3, 5, 7)
