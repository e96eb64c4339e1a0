"""What is computed again in backward instead of kept, and the compilation of blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from phalanx.model import Block, Context, Transformer

_aten = torch.ops.aten
# Selective: keep what is expensive to make again, recompute the rest.
EXPENSIVE = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_mm.default,
        _aten._grouped_mm.default,
    }
)
COLLECTIVES = ("_c10d_functional", "c10d")


def _policy(_: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # A collective must not run twice: its result is kept, also for the sake of the network.
    if op in EXPENSIVE or getattr(op, "namespace", "") in COLLECTIVES:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def apply_recompute(part: Transformer, mode: str) -> None:
    """Wrap every block's forward: ``full`` keeps its input only, ``selective`` also matmuls."""
    if mode == "none":
        return
    for block in part.layers.values():
        forward = block.forward
        options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if mode == "selective":
            options["context_fn"] = _contexts
        block.forward = functools.partial(checkpoint, forward, **options)


def apply_activation_offload(part: Transformer, pin: bool) -> None:
    """Keep what backward needs of every block in host memory."""
    for block in part.layers.values():
        block.forward = _offloaded(block.forward, pin)


def _offloaded(forward: Callable[..., Tensor], pin: bool) -> Callable[..., Tensor]:
    def run(x: Tensor, context: Context) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            return forward(x, context)

    return run


def apply_compile(part: Transformer) -> None:
    """Compile each block by itself: one graph serves all equal blocks."""
    for block in part.layers.values():
        dense = cast(Block, block).moe is None
        block.compile(fullgraph=dense)
