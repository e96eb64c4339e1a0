"""What is computed again in backward instead of kept, and the compilation of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from phalanx.config import ConfigError, Job
from phalanx.model import Block, ForwardContext, Layer, Transformer
from phalanx.parallel.mesh import Mesh

_aten, _functional = torch.ops.aten, torch.ops._c10d_functional
# Graphs of one block's code: forms of layers × training or validation × with or without bit-equal
# kernels. Past torch's limit of 8 it would fail, or go on uncompiled.
MOST_GRAPHS = 64
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
        # Gathers are made again: they are large, and a sum over ranks is what must not be.
        _functional.reduce_scatter_tensor.default,
        _functional.all_to_all_single.default,
    }
)
EXPENSIVE_NAMES = ("phalanx::matmul", "phalanx::matmul_fp8")  # exist on CUDA builds only


def _policy(_: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = isinstance(op, torch._ops.OpOverload) and op._schema.name in EXPENSIVE_NAMES
    expensive = ours or op in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_policy)


def apply_recompute(part: Transformer, mode: str) -> None:
    """Wrap every block's forward: ``full`` keeps its input only, ``selective`` also matmuls.

    In a MoE block, selective covers the attention: experts are sharded as a unit of their own,
    and FSDP's gathers must not run inside a region that counts operations.
    """
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = _contexts
    for layer in part.layers.values():
        block = cast(Layer, layer)
        covered = _attention(block) if mode == "selective" and block.moe is not None else block
        covered.forward = _recomputed(covered.forward, options)


def _recomputed(forward: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    """A function of ours: the compiler begins with none of torch's own, such as ``checkpoint``."""

    def run(*inputs: Any) -> Tensor:
        out: Tensor = checkpoint(forward, *inputs, **options)
        return out

    return run


def _attention(block: Layer) -> nn.Module:
    """What selective recompute covers of a block with experts."""
    if isinstance(block, Block):
        return block.attention
    rule = f"{type(block).__name__} has experts, and nothing says what of it is recomputed"
    raise ConfigError("memory.recompute", '"selective"', rule, 'set it to "full" or "none"')


def apply_activation_offload(part: Transformer, pin: bool) -> None:
    """Keep what backward needs of every block in host memory."""
    for block in part.layers.values():
        block.forward = _offloaded(block.forward, pin)


def _offloaded(forward: Callable[..., Tensor], pin: bool) -> Callable[..., Tensor]:
    def run(x: Tensor, context: ForwardContext) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=pin):
            return forward(x, context)

    # The hooks that it sets cannot be compiled; what is inside can.
    apart: Callable[..., Tensor] = torch.compiler.disable(run, recursive=False)
    return apart


def compiles(job: Job, mesh: Mesh) -> bool:
    """Where told to, else on CUDA where it helps; a split backward cannot be compiled.

    The plain bf16 block consists of our own kernels and matmuls: compiling it gains nothing. What
    dropout draws is many small operations.
    """
    model, split = job.model, job.parallel.schedule == "zero-bubble" and job.parallel.pipeline > 1
    dense = model.moe is None and model.latent is None and model.mlp == "swiglu"
    fused = dense and not model.qk_norm and not model.dropout
    fused = fused and job.precision.compute == "bfloat16"
    helps = job.parallel.async_tensor or not fused
    automatic = mesh.device.type == "cuda" and helps and not split and not model.module
    return job.train.compile == "on" or (job.train.compile == "auto" and automatic)


def apply_compile(part: Transformer) -> None:
    """Compile each block by itself: one graph serves all equal blocks."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, MOST_GRAPHS)
    for block in part.layers.values():
        whole = isinstance(block, Block) and block.moe is None  # others may have breaks
        block.compile(fullgraph=whole)
