"""When the gradients of a model part are summed: after which micro-batch, and what then."""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule

from phalanx.config import Job, VirtualReplicas, reduces_once, virtual_replicas
from phalanx.parallel.fsdp import sync_gradients
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.virtual.fsdp import sum_fsdp_gradients
from phalanx.parallel.virtual.plain import PlainGradients


class VirtualGradients:
    """Adds up the gradients of a part: micro-batches one after the other within a virtual replica,
    virtual replicas as the leaves of one tree, wherever they are computed.
    """

    def __init__(self, part: nn.Module, job: Job, mesh: Mesh) -> None:
        replicas = virtual_replicas(job, mesh.data_index)
        assert replicas is not None
        self.replicas: VirtualReplicas = replicas
        self._part, self._zero = part, job.parallel.zero
        self._micro_batches = self._each = 1
        self._plain: PlainGradients | None = None
        # FSDP's sharded ones; while weights are gathered the modules name others.
        self._parameters = list(part.parameters())
        if mesh.uses_fsdp:
            once = reduces_once(job) and mesh.sizes["shard"] > 1
            self._units = sum_fsdp_gradients(part, mesh.group("replicate"), scatter_once=once)
        else:
            self._plain = PlainGradients(
                self._parameters, mesh.stage_group, job.parallel.ddp_bucket_mb
            )

    def begin(self, micro_batches: int) -> None:
        """A step of so many micro-batches on this rank."""
        self._micro_batches, self._each = micro_batches, micro_batches // len(self.replicas.own)

    def before_backward(self, micro_batch: int) -> None:
        """Have FSDP reduce what this micro-batch completes."""
        if self._plain is None:
            last = self.is_last(micro_batch)
            sync_gradients(
                cast(FSDPModule, self._part), self._zero, last=last, reduce=self.ends(micro_batch)
            )
            self.arrange(micro_batch)

    def arrange(self, micro_batch: int) -> None:
        """Tell the units what the next reduction is."""
        if self._plain is None:
            for unit in self._units:
                unit.last = self.is_last(micro_batch)

    def after_backward(self, micro_batch: int) -> None:
        """Take what backward left, and what FSDP made of all but the last virtual replica."""
        if self._plain is not None:
            self._plain.end_micro_batch()
            if self.ends(micro_batch):
                self._plain.end_virtual_replica(last=self.is_last(micro_batch))
        elif self.ends(micro_batch) and not self.is_last(micro_batch):
            for parameter in self._parameters:
                parameter.grad = None

    def clear(self) -> None:
        """Drop the gradients of a finished step."""
        if self._plain is not None:
            self._plain.clear()

    def ends(self, micro_batch: int) -> bool:
        """Whether this micro-batch is the last of its virtual replica."""
        return (micro_batch + 1) % self._each == 0

    def is_last(self, micro_batch: int) -> bool:
        """Whether this micro-batch is the last of the step."""
        return micro_batch == self._micro_batches - 1
