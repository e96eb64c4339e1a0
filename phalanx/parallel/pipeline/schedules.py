"""The stages of a rank, and the schedules that run them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from phalanx.config import Parallel
from phalanx.model import Transformer
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.precision import move_to_main
from phalanx.parallel.virtual import VirtualGradients
from phalanx.plan.memory.stages import rank_stages

SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleZBVZeroBubble}

Schedule = PipelineScheduleSingle | PipelineScheduleMulti


def stages_of_rank(parallel: Parallel, rank: int) -> list[int]:
    """Stage numbers of a pipeline rank: looped, or as a V for the zero-bubble schedule."""
    return rank_stages(parallel.schedule, parallel.pipeline, parallel.virtual_stages, rank)


def holder_of_stage(parallel: Parallel, stage: int) -> int:
    """The pipeline rank that holds a stage; the last one is stage -1."""
    number = stage % (parallel.pipeline * parallel.virtual_stages)
    holders = range(parallel.pipeline)
    return next(rank for rank in holders if number in stages_of_rank(parallel, rank))


class _Stage(PipelineStage):
    """PyTorch's stage, made fit for the zero-bubble schedule and for virtual replicas."""

    virtual: VirtualGradients | None = None

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **named: Any) -> None:
        """The end of a virtual replica completes a sum; that of the last the schedule reduces."""
        super().backward_one_chunk(bwd_chunk_id, *args, **named)
        if (virtual := self.virtual) is not None:
            virtual.arrange(bwd_chunk_id)
            if virtual.ends(bwd_chunk_id) and not virtual.is_last(bwd_chunk_id):
                self.perform_reduce_grad(1)
            virtual.after_backward(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """A split backward assigns weight gradients itself, so no hook of a parameter runs."""
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        for parameter in self.submod.parameters():
            move_to_main(parameter)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """At the turn of the V two stages share a rank, and Gloo cannot send to itself."""
        own = dist.get_rank(self.group)
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != own]


def _make_stage(
    part: Transformer, number: int, total: int, mesh: Mesh, tokens: Tensor, hidden: Tensor
) -> _Stage:
    """A stage that is told what it receives and sends.

    Left to find out, torch runs every stage once on memory that nobody filled, in training mode:
    whatever a forward pass counts (the loads of experts) would count that too.
    """
    between = torch.empty_like(hidden, device="meta").requires_grad_()
    loss = torch.empty(1, device="meta").requires_grad_()
    return _Stage(
        part,
        number,
        total,
        mesh.device,
        input_args=torch.empty_like(tokens, device="meta") if number == 0 else between,
        output_args=loss if number == total - 1 else between,
        group=mesh.group("pipeline"),
    )


class Pipeline:
    """The stages of this rank under their schedule."""

    def __init__(
        self,
        parts: list[Transformer],
        mesh: Mesh,
        tokens: Tensor,
        hidden: Tensor,
        virtual: list[VirtualGradients],
    ) -> None:
        """``tokens`` and ``hidden``: a micro-batch at the first stage, and between stages.

        ``virtual``: of each part, where there are virtual replicas.
        """
        parallel = mesh.parallel
        numbers = stages_of_rank(parallel, mesh.coordinates["pipeline"])
        total = parallel.pipeline * len(numbers)
        self._held: list[Any] = [
            _make_stage(part, number, total, mesh, tokens, hidden)
            for part, number in zip(parts, numbers, strict=True)
        ]
        for stage, gradients in zip(self._held, virtual, strict=False):
            stage.virtual = gradients
        self.parallel, self.group, self.stages = parallel, mesh.group("pipeline"), total
        self.parts = dict(zip(numbers, parts, strict=True))
        self.is_first, self.is_last = 0 in numbers, total - 1 in numbers
        if parallel.schedule == "zero-bubble":
            # Backward passes through compiled attention twice: it may not reuse what it was given.
            torch._functorch.config.donated_buffer = False
        self._micro_batch = len(tokens)
        self._schedules: dict[int, Schedule] = {}

    def train(
        self,
        tokens: Tensor,
        labels: Tensor,
        documents: Tensor | None,
        named: Mapping[str, Tensor],
    ) -> Tensor:
        """Forward and backward over all micro-batches; the losses on the rank of the last stage.

        Tensors are [micro-batches * micro-batch, seq], losses [micro-batches], elsewhere zero.
        ``named``: what some models get beside them, one for each sample.
        """
        losses: list[Tensor] = []
        keywords: dict[str, Any] = {"labels": labels, **named}
        if documents is not None:
            keywords["documents"] = documents
        if any(part.embed_copy is not None for part in self.parts.values()):
            keywords["tokens"] = tokens  # beside what comes from the stage before
        inputs = (tokens,) if self.is_first else ()
        target = labels if self.is_last else None
        micro_batches = len(labels) // self._micro_batch
        schedule = self._schedule(micro_batches)
        schedule.step(*inputs, target=target, losses=losses, **keywords)
        if not self.is_last:
            return torch.zeros(micro_batches, device=labels.device)
        return torch.stack([loss.detach().sum() for loss in losses])

    def evaluate(
        self, tokens: Tensor, labels: Tensor, documents: Tensor | None, hidden: Tensor
    ) -> Tensor:
        """Forward of one micro-batch through all stages; what the head gives, elsewhere zero.

        ``hidden`` has the shape and type of what stages hand on.
        """
        x = tokens
        for number in range(self.stages):
            is_local = number in self.parts
            if is_local and number > 0 and number - 1 not in self.parts:
                x = torch.empty_like(hidden)
                dist.recv(x, self._global_rank(number - 1), self.group)
            if is_local:
                x = self.parts[number](x, labels, documents)
            if is_local and number + 1 < self.stages and number + 1 not in self.parts:
                dist.send(x.contiguous(), self._global_rank(number + 1), self.group)
        return x if self.is_last else torch.zeros((), device=labels.device)

    def _schedule(self, micro_batches: int) -> Schedule:
        """Made for a number of micro-batches, which changes where the global batch does."""
        if micro_batches not in self._schedules:
            schedule = self.parallel.schedule
            options: dict[str, Any] = {"loss_fn": _loss, "scale_grads": False}
            self._schedules[micro_batches] = (
                SINGLE[schedule](self._held[0], micro_batches, **options)
                if schedule in SINGLE
                else MULTI[schedule](self._held, micro_batches, **options)
            )
        return self._schedules[micro_batches]

    def _global_rank(self, stage: int) -> int:
        """Who holds a stage."""
        assert self.group is not None
        return dist.get_global_rank(self.group, holder_of_stage(self.parallel, stage))


def _loss(output: Tensor, _: Tensor) -> Tensor:
    """The last stage computes the loss itself."""
    return output.sum()
