"""Parameters that a rank holds, before and after ZeRO, exactly as the trainer cuts them.

Tensor parallelism cuts rows or columns of the large matrices, expert parallelism whole experts;
FSDP then cuts the first dimension of what is left into ceil(rows / shards) rows a rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from phalanx.config import Adapter, Model, is_gated, shares_embedding
from phalanx.plan.grid import Ints
from phalanx.plan.memory.model_counts import prediction_layers


@dataclass(frozen=True)
class Tensor:
    """One parameter: its shape, and which axis cuts which dimension."""

    rows: int
    columns: int
    cut: str = ""  # "rows" or "columns" by tensor, "expert" by expert (rows), "" by neither


@lru_cache(maxsize=256)
def block_tensors(model: Model, moe: bool) -> tuple[Tensor, ...]:
    """Every parameter of one block."""
    return (*_attention_tensors(model), *_feed_forward(model, moe), *_norms(model))


def embedding_tensors(model: Model) -> tuple[Tensor, ...]:
    """What rides on the first stage."""
    return (Tensor(model.vocab, model.dim, "rows"),)


def head_tensors(model: Model) -> tuple[Tensor, ...]:
    """What rides on the last stage: the final norm, the head unless it is tied, and what layers
    that predict tokens further on have beside a block.
    """
    norm = Tensor(model.dim, 1)
    head = () if model.tied_embedding else (Tensor(model.vocab, model.dim, "rows"),)
    merge = (Tensor(model.dim, 2 * model.dim), norm, norm, norm)
    return (norm, *head, *merge * prediction_layers(model))


def copied_tensors(model: Model) -> tuple[Tensor, ...]:
    """What a pipeline's last stage has of the first one's weights: no master, and no moments."""
    return embedding_tensors(model) if shares_embedding(model) else ()


@lru_cache(maxsize=256)
def adapter_tensors(model: Model, moe: bool, adapter: Adapter | None) -> tuple[Tensor, ...]:
    """What adapters add to one block: of each matrix, or of those that are stored as one."""
    if adapter is None:
        return ()
    rows = {
        "q_proj": model.heads * model.head_dim,
        "k_proj": model.kv_heads * model.head_dim,
        "v_proj": model.kv_heads * model.head_dim,
    }
    stored: list[tuple[list[int], int, bool]] = [
        ([size for name, size in rows.items() if name in adapter.targets], model.dim, False),
        ([model.dim] * ("o_proj" in adapter.targets), model.heads * model.head_dim, True),
    ]
    if not moe:
        up = [model.ffn] * sum(name in adapter.targets for name in ("gate_proj", "up_proj"))
        stored += [(up, model.dim, False)]
        stored += [([model.dim] * ("down_proj" in adapter.targets), model.ffn, True)]
    tensors: list[Tensor] = []
    for sizes, inputs, columns in stored:
        if sizes:
            low = len(sizes) * adapter.rank
            tensors.append(Tensor(low, inputs, "columns" if columns else ""))
            tensors.append(Tensor(sum(sizes), adapter.rank, "" if columns else "rows"))
            if adapter.kind == "dora":
                tensors.append(Tensor(sum(sizes), 1))
    return tuple(tensors)


def held(tensors: tuple[Tensor, ...], tensor: Ints, expert: Ints) -> Ints:
    """Elements that one rank computes with."""
    total = np.zeros_like(tensor)
    for part in tensors:
        rows, columns = _local(part, tensor, expert)
        total = total + rows * columns
    return total


def sharded(
    tensors: tuple[Tensor, ...], tensor: Ints, expert: Ints, shards: Ints, expert_shards: Ints
) -> Ints:
    """Elements that the first rank of a group keeps when ZeRO divides them."""
    total = np.zeros_like(tensor)
    for part in tensors:
        rows, columns = _local(part, tensor, expert)
        over = expert_shards if part.cut == "expert" else shards
        total = total + -(-rows // over) * columns
    return total


def _local(part: Tensor, tensor: Ints, expert: Ints) -> tuple[Ints, Ints]:
    rows, columns = np.full_like(tensor, part.rows), np.full_like(tensor, part.columns)
    if part.cut == "rows":
        return rows // tensor, columns
    if part.cut == "columns":
        return rows, columns // tensor
    if part.cut == "expert":
        return rows // expert, columns
    return rows, columns


def _attention_tensors(model: Model) -> tuple[Tensor, ...]:
    latent = model.latent
    if latent is None:
        rows = (model.heads + 2 * model.kv_heads) * model.head_dim
        vectors = (
            Tensor(rows if model.attention_bias else 0, 1, "rows"),
            Tensor(model.dim if model.attention_out_bias else 0, 1),
            Tensor(model.heads if model.attention_sinks else 0, 1, "rows"),
        )
        return (
            *(each for each in vectors if each.rows),
            Tensor(rows, model.dim, "rows"),
            Tensor(model.dim, model.heads * model.head_dim, "columns"),
        )
    query_rows = model.heads * (latent.content_head_dim + latent.rope_head_dim)
    up_rows = model.heads * (latent.content_head_dim + latent.value_head_dim)
    query_down = (Tensor(latent.query_rank, model.dim),) if latent.query_rank else ()
    return (
        *query_down,
        Tensor(query_rows, latent.query_rank or model.dim, "rows"),
        Tensor(latent.key_value_rank + latent.rope_head_dim, model.dim),
        Tensor(up_rows, latent.key_value_rank, "rows"),
        Tensor(model.dim, model.heads * latent.value_head_dim, "columns"),
    )


def _feed_forward(model: Model, moe: bool) -> tuple[Tensor, ...]:
    if moe:
        experts = model.moe
        assert experts is not None
        routed: tuple[Tensor, ...] = (
            Tensor(experts.experts, model.dim),  # router
            Tensor(experts.experts, 2 * experts.ffn * model.dim, "expert"),
            Tensor(experts.experts, model.dim * experts.ffn, "expert"),
        )
        if experts.biases:
            routed += (
                Tensor(experts.experts, 1),
                Tensor(experts.experts, 2 * experts.ffn, "expert"),
                Tensor(experts.experts, model.dim, "expert"),
            )
        if not experts.shared_ffn:
            return routed
        shared = (
            Tensor(2 * experts.shared_ffn, model.dim),
            Tensor(model.dim, experts.shared_ffn),
        )
        gate = (Tensor(1, model.dim),) if experts.shared_gate else ()
        return (*routed, *shared, *gate)
    up = 2 * model.ffn if is_gated(model) else model.ffn
    return (Tensor(up, model.dim, "rows"), Tensor(model.dim, model.ffn, "columns"))


def _norms(model: Model) -> tuple[Tensor, ...]:
    around = (Tensor(model.dim, 1),) * (4 if model.norm == "sandwich" else 2)
    latent = model.latent
    if latent is not None:
        query = (Tensor(latent.query_rank, 1),) if latent.query_rank else ()
        return (*around, *query, Tensor(latent.key_value_rank, 1))
    if not model.qk_norm:
        return around
    wide = (model.heads, model.kv_heads) if model.qk_norm_over == "all" else (1, 1)
    return (*around, *(Tensor(count * model.head_dim, 1) for count in wide))
