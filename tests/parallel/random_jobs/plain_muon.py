"""Muon by the textbook: which weights are its matrices, and their orthogonalisation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from phalanx.config import Model
from tests.parallel.random_jobs.plain_parts import gate_groups

OTHERS = ("router", "shared_gate", "bias", "sinks", "norm")


def is_hidden_matrix(name: str, weight: Tensor) -> bool:
    """Inside layers, and no router: those have few rows, each of its own meaning."""
    inside = name.startswith("layers.") and weight.ndim > 1
    return inside and not any(each in name for each in OTHERS)


def fused_rows(model: Model, name: str, rows: int) -> list[Tensor]:
    """The rows of each matrix that is stored in one."""
    widths: tuple[int, ...] = (rows,)
    if "attention.qkv" in name:
        each = model.heads // model.kv_heads * model.head_dim
        widths = (each, model.head_dim, model.head_dim)
    elif "experts.gate_up" in name:
        widths = (rows // 2, rows // 2)
    elif "gate_up" in name:
        width = rows // 2 // gate_groups(rows // 2)
        widths = (width, width)
    owner = torch.arange(len(widths)).repeat_interleave(torch.tensor(widths))
    owner = owner.repeat(rows // len(owner))
    return [(owner == number).nonzero()[:, 0] for number in range(len(widths))]


def orthogonal(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards the nearest orthogonal matrix, times an even size."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x - 4.7750 * square @ x + 2.0315 * square @ square @ x
    rows, columns = matrix.shape[-2:]
    even: Tensor = (x.mT if tall else x) * math.sqrt(max(1.0, rows / columns))
    return even
