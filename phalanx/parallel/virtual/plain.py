"""Gradients of parameters that are whole on every rank, added up over virtual replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.parallel.virtual import tree


class PlainGradients:
    """Takes the gradients of each micro-batch in fp32; the sum of a step is ``main_grad``."""

    def __init__(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None, bucket_mb: float
    ) -> None:
        self._parameters, self._group = parameters, group
        self._bucket = max(1, int(bucket_mb * (1 << 20) / 4))  # elements
        self._leaves: list[Tensor | None] = [None] * len(parameters)
        self._sums = [tree.TreeSum() for _ in parameters]

    def end_micro_batch(self) -> None:
        """Add the gradients that backward left to those of the running virtual replica."""
        for i, parameter in enumerate(self._parameters):
            gradient, leaf = parameter.grad, self._leaves[i]
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            if leaf is None:
                self._leaves[i] = gradient.float()
            else:
                leaf.add_(gradient)
            parameter.grad = None

    def end_virtual_replica(self, *, last: bool) -> None:
        """After the last one of a step every parameter has its ``main_grad``."""
        for i, total in enumerate(self._sums):
            leaf, self._leaves[i] = self._leaves[i], None
            assert leaf is not None
            total.add(leaf)
        if last:
            self._finish([total.take() for total in self._sums])

    def _finish(self, gradients: list[Tensor]) -> None:
        if self._group is not None:
            gradients = self._reduced(gradients, self._group)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.main_grad = gradient  # type: ignore[attr-defined]

    def _reduced(self, gradients: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
        """Summed over ranks, as many at once as a bucket holds."""
        reduced: list[Tensor] = []
        while len(reduced) < len(gradients):
            bucket: list[Tensor] = []
            for gradient in gradients[len(reduced) :]:
                if bucket and sum(map(Tensor.numel, bucket)) + gradient.numel() > self._bucket:
                    break
                bucket.append(gradient)
            flat = tree.all_reduce(torch.cat([each.reshape(-1) for each in bucket]), group)
            parts = flat.split([each.numel() for each in bucket])
            reduced += [part.view(each.shape) for part, each in zip(parts, bucket, strict=True)]
        return reduced

    def clear(self) -> None:
        """Drop the gradients of a finished step."""
        for parameter in self._parameters:
            parameter.main_grad = None  # type: ignore[attr-defined]
