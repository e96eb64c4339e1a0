"""The embedding of the first stage, of which the last one computes with a copy.

A tied head is the embedding, and layers that predict tokens further on look tokens up. The first
stage holds the weight: its master, its moments, its place in checkpoints. The last one gets its
values before each pass, and hands back what its copy adds to the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.config import Job, shares_embedding
from phalanx.model import Transformer
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.schedules import holder_of_stage
from phalanx.parallel.weight import Weight, local_part

EMBEDDING = "embed.weight"


@dataclass
class SharedEmbedding:
    """This rank's end of it, or both where the first and the last stage are on one rank."""

    own: Weight | None  # on the rank of the first stage
    copy: Weight | None  # on the rank of the last one
    peer: int  # the rank of the other end
    mesh: Mesh

    @classmethod
    def of(
        cls, parts: list[Transformer], weights: list[Weight], job: Job, mesh: Mesh
    ) -> SharedEmbedding | None:
        """None on ranks that have nothing to do with it."""
        if job.parallel.pipeline == 1 or not shares_embedding(job.model):
            return None
        own = next((weight for weight in weights if weight.name == EMBEDDING), None)
        copy = next((found for part in parts if (found := _copy(part)) is not None), None)
        if own is None and copy is None:
            return None
        group = mesh.group("pipeline")
        assert group is not None
        other = holder_of_stage(job.parallel, -1 if own is not None else 0)
        return cls(own, copy, dist.get_global_rank(group, other), mesh)

    @torch.no_grad()
    def refresh(self) -> None:
        """The copy takes the values of the weight, whoever changed them."""
        own, copy = self.own, self.copy
        value = self._carried(
            None if own is None else own.local, None if copy is None else copy.local
        )
        if copy is not None and value is not None:
            copy.local.copy_(value)

    @torch.no_grad()
    def return_gradient(self) -> None:
        """The weight gets what the copy adds to its gradient of a finished step."""
        own, copy = self.own, self.copy
        end = own if own is not None else copy
        assert end is not None
        if not end.parameter.requires_grad:
            return
        gradient = self._carried(
            None if copy is None else copy.gradient, None if own is None else own.gradient
        )
        if own is not None and gradient is not None:
            own.gradient.add_(gradient)

    def _carried(self, source: Tensor | None, target: Tensor | None) -> Tensor | None:
        """What is at the source, where the target is."""
        if source is not None and target is not None:
            return source
        kept = source if source is not None else target
        assert kept is not None
        # What is in host memory travels through the device.
        carried = kept.contiguous().to(self.mesh.device)
        if source is None:
            carried = torch.empty_like(carried)
        move = dist.isend if source is not None else dist.irecv
        group = self.mesh.group("pipeline")
        for work in dist.batch_isend_irecv([dist.P2POp(move, carried, self.peer, group)]):
            work.wait()
        return carried if source is None else None


def _copy(part: Transformer) -> Weight | None:
    names = part.embedding_copies()
    for name, parameter in part.named_parameters():
        if name in names:
            return Weight(name, parameter, local_part(parameter), copies=1)
    return None
