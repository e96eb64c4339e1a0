"""What ranks add up of a step beside its gradients: the loss and the gradient norm."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.parallel import Engine, all_sum, exact_scalars
from phalanx.train.optim.guard import squared_norm


def loss_and_norm(engine: Engine, share: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient norm of the step, without the loss scale; the same on every rank.

    ``share`` is what ``engine.run`` returned.
    """
    mesh = engine.mesh
    if engine.virtual:
        # Copies hold the same gradients: those of the first one count.
        first = mesh.coordinates["replicate"] == 0
        gradients = (w.gradient for w in engine.weights if first and not w.frozen)
        total, squares = exact_scalars(share / scale, gradients)
        return total, squares.sqrt().float() / scale
    share = share / mesh.parallel.tensor  # tensor-parallel ranks know the same loss
    squares = squared_norm(engine.weights).to(mesh.device)
    total, squares = all_sum(torch.stack((share / scale, squares))).unbind()
    return total, squares.sqrt() / scale


def loss_and_tokens(engine: Engine, share: Tensor, real_tokens: int) -> tuple[float, float]:
    """Of held-out samples: the sum of their losses, and of the tokens that have a label.

    ``share`` is this rank's part of the losses, ``real_tokens`` those of this rank's samples.
    """
    mesh = engine.mesh
    tokens = torch.ones((), device=mesh.device) * real_tokens / mesh.ranks_per_sample
    if engine.virtual:
        total, _ = exact_scalars(share, ())
        return float(total), float(all_sum(tokens))
    total, count = all_sum(torch.stack((share / mesh.parallel.tensor, tokens))).tolist()
    return total, count
