"""One rank's share of a model, with every configured axis applied, and its forward-backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from phalanx.config import Job, micro_batches, parameter_group, stage_jobs
from phalanx.config.own_code import import_code
from phalanx.data import Batch
from phalanx.model import (
    Dropout,
    Router,
    ScorePeaks,
    Transformer,
    declarations,
    draw,
    key_of,
    make_model,
    prepare_post_training,
    width_factors,
)
from phalanx.model.post_training.preference import without_notes
from phalanx.parallel.context import apply_context_parallel, local_positions
from phalanx.parallel.expert import apply_expert_parallel, share_balance_statistics
from phalanx.parallel.fsdp import DdpGradients, PeerWaitTimer, apply_fsdp, sync_gradients
from phalanx.parallel.gradient_sums import GradientSums
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline import Pipeline, SharedEmbedding, stages_of_rank
from phalanx.parallel.precision import MainGradients, cast_parameters, compute_dtype
from phalanx.parallel.recompute import (
    apply_activation_offload,
    apply_compile,
    apply_recompute,
    compiles,
)
from phalanx.parallel.tensor import apply_tensor_parallel, enable_async_tensor_parallel
from phalanx.parallel.virtual import VirtualGradients, losses_by_replica
from phalanx.parallel.weight import Weight, local_part
from phalanx.plan.memory.stages import stage_layers


class Timer(PeerWaitTimer, Protocol):
    """What the engine asks of whoever measures a step."""

    def phase(self, name: Any) -> AbstractContextManager[None]: ...


class _Inputs(NamedTuple):
    """A micro-batch on the device, cut to the positions that this rank holds."""

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None
    samples: Tensor | None  # their numbers, where the model drops something

    @property
    def named(self) -> dict[str, Tensor]:
        """What only some models are given."""
        return {} if self.samples is None else {"samples": self.samples}


def build_parts(job: Job, mesh: Mesh) -> list[Transformer]:
    """This rank's model parts on the meta device, with every axis applied but no memory."""
    model, parallel = job.model, job.parallel
    numbers = stages_of_rank(parallel, mesh.coordinates["pipeline"])
    total = parallel.pipeline * len(numbers)
    layers = stage_layers(model, job.data.sequence, total)
    import_code(job.code)
    with torch.device("meta"):
        parts = [make_model(model, layers[n], embed=n == 0, head=n == total - 1) for n in numbers]
    for part in parts:
        _parallelize(prepare_post_training(part, job), job, mesh)
    return parts


def _parallelize(part: Transformer, job: Job, mesh: Mesh) -> None:
    """Apply the axes, innermost first; each sees the module as the one before left it."""
    if job.precision.fp8:
        from phalanx.parallel.float8 import apply_float8

        for block in part.layers.values():
            apply_float8(block)
    if (tensor := mesh.axis("tensor")) is not None:
        apply_tensor_parallel(part, tensor)
        if job.parallel.async_tensor:
            enable_async_tensor_parallel(tensor)
    if mesh.sparse is not None and job.parallel.expert > 1:
        apply_expert_parallel(part, mesh.sparse["expert"])
    if job.model.moe is not None and mesh.sequence_group is not None:
        share_balance_statistics(part, mesh.sequence_group)
    if (context := mesh.group("context")) is not None:
        apply_context_parallel(part, context, job.parallel.context_method)
    apply_recompute(part, job.memory.recompute)
    if job.memory.offload_activations:
        apply_activation_offload(part, pin=mesh.device.type == "cuda")
    if compiles(job, mesh):
        apply_compile(part)
    if mesh.uses_fsdp:
        apply_fsdp(part, mesh, job)
    else:
        cast_parameters(part, compute_dtype(job.precision))


class Engine:
    """Builds the parts, draws their weights, and runs steps over them."""

    def __init__(self, job: Job, mesh: Mesh) -> None:
        self.job, self.mesh = job, mesh
        self.micro_batches = max(micro_batches(stage.job) for stage in stage_jobs(job))  # at most
        self.parts = build_parts(job, mesh)
        for part in self.parts:
            part.to_empty(device="cpu" if mesh.offloads_parameters else mesh.device)
            part.tie()  # each module got memory of its own
        self.weights = list(self._draw_weights(job.train.seed))
        self.shared_embedding = SharedEmbedding.of(self.parts, self.weights, job, mesh)
        self._prepare_positions()
        for part in self.parts:
            for name, module in part.named_modules():
                if isinstance(module, Router | ScorePeaks):
                    module.reset(mesh.device)
                if isinstance(module, Dropout):
                    module.reset(key_of(job.train.seed, name), mesh.device)
        strict = self.parts if job.train.virtual_replicas else []
        self.virtual = [VirtualGradients(part, job, mesh) for part in strict]
        self.main_gradients = self._main_gradients()
        self.gradient_sums: GradientSums | None = None  # made when somebody asks for one
        self.ddp: DdpGradients | None = None
        if mesh.uses_ddp and not self.virtual:
            self.ddp = DdpGradients(self.parts[0], job, mesh.stage_group)
        self.pipeline = self._make_pipeline()

    def enter(self, stage: Job) -> None:
        """Go on with samples of another length, at positions that may be scaled otherwise."""
        self.job = stage
        for part in self.parts:
            part.config = stage.model
        self._prepare_positions()
        self.pipeline = self._make_pipeline()

    def run(self, batches: list[Batch], token_weight: Tensor, timer: Timer) -> Tensor:
        """Forward and backward of this rank's micro-batches; returns its share of the loss.

        ``token_weight`` [] is the weight of one real token of the global batch. The share is [], or
        by virtual replica.
        """
        self._begin(token_weight, train=True)
        inputs = [self._to_device(batch) for batch in batches]
        for virtual in self.virtual:
            virtual.begin(len(inputs))
        if self.pipeline is not None:
            with timer.phase("backward"):  # the schedule interleaves forward and backward
                whole = _Inputs(*(_joined(part) for part in zip(*inputs, strict=True)))
                losses_here = self.pipeline.train(
                    whole.tokens, whole.labels, whole.documents, whole.named
                )
                if self.shared_embedding is not None:
                    self.shared_embedding.return_gradient()
                return self.share(losses_here.unbind())
        losses = []
        for i, each in enumerate(inputs):
            with self._synchronization(i, len(inputs)), self._summation(i):
                with timer.phase("forward"):
                    loss = self._loss(each)
                with timer.phase("backward"):
                    self._backward(loss, timer)
            for virtual in self.virtual:
                virtual.after_backward(i)
            losses.append(loss.detach().squeeze(0))
        return self.share(losses)

    def share(self, losses: Sequence[Tensor]) -> Tensor:
        """This rank's share of the loss: one sum, or one for each virtual replica."""
        if self.virtual:
            return losses_by_replica(torch.stack(list(losses)), self.virtual[0].replicas)
        return torch.stack(list(losses)).sum()

    def _backward(self, loss: Tensor, timer: Timer) -> None:
        """Gradients; DDP waits for its last buckets in C++, where only we know when."""
        if self.ddp is None:
            loss.backward()
            return
        with self.ddp.watched(timer):
            loss.backward()

    def sum_gradients(self) -> GradientSums:
        """What adds up gradients before they are reduced; of FSDP, and of whole models only."""
        if self.gradient_sums is None:
            assert self.mesh.uses_fsdp and self.pipeline is None
            self.gradient_sums = GradientSums(self.parts[0], self.mesh.device)
        return self.gradient_sums

    def recompute(self, batch: Batch, token_weight: Tensor) -> Tensor:
        """What the gradients of a micro-batch add up to, before a step; they are thrown away.

        Nothing that the step computes or counts changes by it. Collective: weights are gathered.
        """
        sums, loads = self.sum_gradients(), self._router_loads()
        kept = [load.clone() for load in loads]
        self._begin(token_weight, train=True)
        with self._synchronization(0, 1), sums.taken(discard=True), without_notes(self.parts[0]):
            self._loss(self._to_device(batch)).backward()
        self.clear_gradients()
        for load, before in zip(loads, kept, strict=True):
            load.copy_(before)
        return sums.total.clone()

    @torch.no_grad()
    def evaluate(self, batches: list[Batch], token_weight: Tensor) -> list[Tensor]:
        """What the head gives for each micro-batch, without gradients; zero where it is not."""
        self._begin(token_weight, train=False)
        inputs = [self._to_device(batch) for batch in batches]
        if self.pipeline is not None:
            outputs = [
                self.pipeline.evaluate(*each[:3], self._hidden(each.tokens)) for each in inputs
            ]
        else:
            outputs = [self.parts[0](*each[:3]) for each in inputs]
        for module in self._modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # no backward follows that would drop the gathered weights
        return outputs

    def clear_gradients(self) -> None:
        if self.main_gradients is not None:
            self.main_gradients.clear()
        for virtual in self.virtual:
            virtual.clear()
        for parameter in self._parameters():
            parameter.grad = None

    def _begin(self, token_weight: Tensor, *, train: bool) -> None:
        for part in self.parts:
            if part.training != train:
                part.train(train)
            part.token_weight.copy_(token_weight)
        if self.shared_embedding is not None:
            self.shared_embedding.refresh()

    @property
    def _module(self) -> nn.Module:
        return self.ddp.module if self.ddp is not None else self.parts[0]

    def _loss(self, inputs: _Inputs) -> Tensor:
        loss: Tensor = self._module(*inputs[:3], **inputs.named)
        return loss

    def _tokens(self) -> Tensor:
        """An empty tensor like the tokens of a micro-batch that this rank holds."""
        shape = (self.job.train.micro_batch, len(self.positions))
        return torch.empty(shape, dtype=torch.int64, device="meta")

    def _hidden(self, tokens: Tensor) -> Tensor:
        """An empty tensor like those that pass between pipeline stages."""
        batch, sequence = tokens.shape
        shape = (batch, sequence // self.job.parallel.tensor, self.job.model.dim)
        dtype = compute_dtype(self.job.precision)
        return torch.empty(shape, dtype=dtype, device=self.mesh.device)

    def _synchronization(self, micro_batch: int, count: int) -> AbstractContextManager[Any]:
        """Arrange what this micro-batch's backward communicates."""
        for virtual in self.virtual:
            virtual.before_backward(micro_batch)
            return nullcontext()
        last, zero = micro_batch == count - 1, self.job.parallel.zero
        if self.main_gradients is not None:
            self.main_gradients.drain = not (last and self.ddp is not None)
        if self.ddp is not None:
            return nullcontext() if last else self.ddp.module.no_sync()
        if isinstance(self.parts[0], FSDPModule):
            sync_gradients(self.parts[0], zero, last=last, reduce=last or zero >= 2)
        return nullcontext()

    def _summation(self, micro_batch: int) -> AbstractContextManager[None]:
        sums = self.gradient_sums
        return nullcontext() if sums is None else sums.of(micro_batch)

    def _router_loads(self) -> list[Tensor]:
        return [module.load for module in self._modules() if isinstance(module, Router)]

    def _to_device(self, batch: Batch) -> _Inputs:
        tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
        documents = None if batch.documents is None else torch.from_numpy(batch.documents)
        if self.job.parallel.context > 1:
            # Documents stay whole: attention sees the whole sequence where they are allowed.
            tokens, labels = tokens[:, self.positions], labels[:, self.positions]
        drops = self.job.model.dropout > 0 and batch.samples is not None
        samples = torch.from_numpy(batch.samples) if drops else None
        return _Inputs(*(self._move(each) for each in (tokens, labels, documents, samples)))

    def _move(self, x: Any) -> Any:
        if x is None or self.mesh.device.type == "cpu":
            return x
        return x.pin_memory().to(self.mesh.device, non_blocking=True)

    def _local_positions(self) -> Tensor:
        parallel = self.job.parallel
        rank = self.mesh.coordinates["context"]
        method = parallel.context_method if parallel.context > 1 else "ulysses"
        return local_positions(method, self.job.data.sequence, rank, parallel.context)

    def _draw_weights(self, seed: int) -> Iterator[Weight]:
        """Fill every parameter's block; the same values whatever the mesh."""
        for part in self.parts:
            declared = dict(declarations(part))
            copied = part.embedding_copies()
            for name, parameter in part.named_parameters():
                if name in copied:
                    continue  # another stage holds the weight itself
                local = local_part(parameter)
                shape, offset, copies = self._block(parameter)
                master = local
                if local.dtype != torch.float32 and parameter.requires_grad:
                    master = torch.empty_like(local, dtype=torch.float32)
                said, key = declared[name], key_of(seed, name)
                draw(master, said, self.job.model, key=key, shape=shape, offset=offset)
                group = parameter_group(self.job.optimizer, name)
                frozen = not parameter.requires_grad or (group is not None and group.freeze)
                rate = width_factors(said, self.job.model, len(shape)).rate
                weight = Weight(name, parameter, master, copies, said, frozen, offset[0], rate)
                weight.publish()
                yield weight

    def _block(self, parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Shape of the whole parameter, where this rank's block lies, and how many hold it."""
        shape = tuple(parameter.shape)
        if not isinstance(parameter, DTensor):
            return shape, (0,) * len(shape), self.mesh.stage_ranks
        mesh, placements = parameter.device_mesh, parameter.placements
        _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
        distinct = 1
        for axis, placement in enumerate(placements):
            distinct *= mesh.size(axis) if placement.is_shard() or _strided(placement) else 1
        return shape, tuple(offset), self.mesh.stage_ranks // distinct

    def _prepare_positions(self) -> None:
        self.positions = self._local_positions()
        for part in self.parts:
            part.prepare(self.positions.to(self.mesh.device))

    def _make_pipeline(self) -> Pipeline | None:
        if self.job.parallel.pipeline == 1:
            return None
        tokens = self._tokens()
        return Pipeline(self.parts, self.mesh, tokens, self._hidden(tokens), self.virtual)

    def _main_gradients(self) -> MainGradients | None:
        """fp32 accumulation, where parameters are low-precision and gradients meet others."""
        if (
            self.virtual
            or self.mesh.uses_fsdp
            or compute_dtype(self.job.precision) == torch.float32
        ):
            return None
        reduced = self.mesh.uses_ddp and self.job.parallel.reduce_dtype == "float32"
        if self.micro_batches == 1 and not reduced:
            return None
        return MainGradients(self._parameters())

    def _parameters(self) -> list[nn.Parameter]:
        """All that gradients are made of."""
        copy = self.shared_embedding.copy if self.shared_embedding is not None else None
        weights = self.weights if copy is None else [*self.weights, copy]
        return [weight.parameter for weight in weights]

    def _modules(self) -> Iterator[nn.Module]:
        for part in self.parts:
            yield from part.modules()


def _joined(parts: tuple[Any, ...]) -> Any:
    return None if parts[0] is None else torch.cat(parts)


def _strided(placement: object) -> bool:
    return type(placement).__name__ == "_StridedShard"
