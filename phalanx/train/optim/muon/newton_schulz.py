"""Orthogonalisation of matrices by Newton-Schulz steps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

STEPS = 5
# Of the odd polynomial a x + b x^3 + c x^5 that each step applies to the singular values.
A, B, C = 3.4445, -4.7750, 2.0315
BATCH_ELEMENTS = 64 << 20  # that are orthogonalised together at most


def working_dtype(device: torch.device) -> torch.dtype:
    """In which the steps are computed."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def flops(rows: int, columns: int) -> int:
    """Of orthogonalising one matrix."""
    short, long = sorted((rows, columns))
    return STEPS * (4 * short * short * long + 2 * short**3)


def even_size(rows: int, columns: int) -> float:
    """What makes the entries of orthogonal matrices of all shapes equally large."""
    return float(max(1.0, rows / columns) ** 0.5)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix, of an even size; works on stacks of matrices as well."""
    x = newton_schulz(matrix.to(working_dtype(matrix.device)))
    return x.to(matrix.dtype) * even_size(*matrix.shape[-2:])


def newton_schulz(matrix: Tensor) -> Tensor:
    """The steps alone. A stack's matrices are computed together."""
    x = matrix.view(-1, *matrix.shape[-2:])
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return (x.mT if tall else x).reshape(matrix.shape)


def orthogonalize_stacks(stacks: list[Tensor], *, together: bool) -> list[Tensor]:
    """The polar factors of the matrices of each stack [n, rows, columns], still unscaled.

    ``together`` takes equal shapes at once, which a GPU likes. By itself, what a matrix comes to
    does not depend on which others this rank has.
    """
    if not together:
        return [torch.stack([newton_schulz(each) for each in stack]) for stack in stacks]
    results: list[Tensor] = []
    for batch in _batches(stacks):
        done = newton_schulz(torch.cat(batch) if len(batch) > 1 else batch[0])
        results += done.split([len(stack) for stack in batch])
    return results


def _batches(stacks: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one shape."""
    batch: list[Tensor] = []
    for stack in stacks:
        full = sum(each.numel() for each in batch) + stack.numel() > BATCH_ELEMENTS
        if batch and (full or batch[0].shape[1:] != stack.shape[1:]):
            yield batch
            batch = []
        batch.append(stack)
    if batch:
        yield batch
