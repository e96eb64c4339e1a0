"""Data parallelism: FSDP2 at each ZeRO level, its replicated form (HSDP), and DDP.

Gradients are summed, never averaged: the loss is already weighted over the global batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.parallel import DistributedDataParallel

from phalanx.config import Job, shares_embedding
from phalanx.model import Layer, PredictionLayer, Transformer
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.precision import compute_dtype


def apply_fsdp(part: Transformer, mesh: Mesh, job: Job) -> None:
    """Shard a model part block by block; ``parallel.zero`` decides what is kept gathered.

    ZeRO 1 and 2 keep the weights gathered from forward to backward. They differ in
    ``sync_gradients``: 1 reduces gradients once a step, 2 and 3 after each micro-batch.
    """
    reduce_dtype = torch.float32 if job.parallel.reduce_dtype == "float32" else None
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(job.precision),
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,  # rotary tables and the token weight stay fp32
    )
    offload = OffloadPolicy()
    if job.memory.offload == "parameters":
        offload = CPUOffloadPolicy(pin_memory=mesh.device.type == "cuda")
    common: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
    dense, experts = mesh.fsdp, mesh.sparse and mesh.expert_fsdp
    if job.train.virtual_replicas:  # their sums over copies are ours, not FSDP's
        assert mesh.dense is not None
        dense, experts = mesh.dense["shard"], mesh.sparse and mesh.sparse["expert_shard"]

    def shard(modules: Any, over: DeviceMesh, *, again: bool = True) -> None:
        # Dropping gathered weights after forward frees nothing where there is one shard.
        drop = again and job.parallel.zero == 3 and over.size(-1) > 1
        fully_shard(modules, mesh=over, reshard_after_forward=drop, **common)

    blocks = [cast(Layer, block) for block in part.layers.values()]
    for block in blocks:
        if block.moe is not None:
            assert experts is not None
            shard(block.moe.experts, experts)
        shard(block, dense)
    both = part.token_table is not None and part.head is not None
    shared = both and shares_embedding(part.config)  # gathered with the whole, and as long
    if part.embed is not None and not shared:
        shard(part.embed, dense)
        # Its backward adds into rows that the tokens name and never reads the weight.
        cast(FSDPModule, part.embed).set_unshard_in_backward(False)
    if part.norm is not None and part.head is not None and not shared:
        # The head is needed again at once by backward: gathering it twice buys nothing.
        shard([part.norm, part.head], dense, again=False)
    shard(part, dense)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    # Validation leaves out what predicts further on: a gather ahead of it would be of old weights.
    trunk = [block for block in blocks if not isinstance(block, PredictionLayer)]
    _prefetch(part, trunk, job.parallel.prefetch_layers)
    if mesh.device.type == "cpu":
        _gather_in_background(part)


def _prefetch(part: Transformer, blocks: list[Layer], depth: int) -> None:
    """Gather ``depth`` units ahead of the one that runs, in both directions."""
    candidates: tuple[object, ...] = (part.embed, *blocks, part.head)
    units = [unit for unit in candidates if isinstance(unit, FSDPModule)]
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(_with_experts(units[i + 1 : i + 1 + depth]))
        behind = units[max(0, i - depth) : i][::-1]
        # Without a list FSDP prefetches by itself; the unit that runs is gathered already.
        unit.set_modules_to_backward_prefetch(_with_experts(behind) or [unit])


def _with_experts(units: list[FSDPModule]) -> list[FSDPModule]:
    modules: list[FSDPModule] = []
    for unit in units:
        modules.append(unit)
        moe = getattr(unit, "moe", None)
        if moe is not None:
            modules.append(moe.experts)
    return modules


def _gather_in_background(part: nn.Module) -> None:
    """Gloo has no streams: an asynchronous gather is what overlaps there."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module._set_unshard_async_op(True)


def sync_gradients(part: FSDPModule, zero: int, *, last: bool, reduce: bool) -> None:
    """Say, before a micro-batch, what its backward communicates."""
    part.set_is_last_backward(last)
    part.set_requires_gradient_sync(reduce)
    part.set_requires_all_reduce(last)
    part.set_reshard_after_backward(last or zero == 3)


class PeerWaitTimer(Protocol):
    """Is told when this rank begins to wait for others, and when that is over."""

    def wait_begins(self) -> Any: ...
    def wait_ends(self, begun: Any) -> None: ...


class DdpGradients:
    """DDP with summed gradients that are accumulated and reduced in fp32 if so configured.

    After its first step DDP arranges its buckets anew, and three ranks or more then add up in
    another order: a run that was resumed would differ in its last bits. Where a job is to be
    deterministic each parameter is therefore reduced by itself.
    """

    def __init__(self, part: Transformer, job: Job, group: dist.ProcessGroup | None) -> None:
        with warnings.catch_warnings():
            # torch 2.13 has another name for broadcast_buffers, which 2.11 does not know.
            warnings.simplefilter("ignore", FutureWarning)
            self.module = DistributedDataParallel(
                part,
                process_group=group,
                bucket_cap_mb=job.parallel.ddp_bucket_mb,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
                init_sync=False,  # every rank drew the same weights
            )
        self.group, self._apart = group, job.train.deterministic
        self._waits: PeerWaitTimer | None = (
            None  # whoever wants to know how long we wait for others
        )
        self._waiting: Any = None
        self.module.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    @contextmanager
    def watched(self, waits: PeerWaitTimer) -> Iterator[None]:
        """A backward pass: from its last bucket on nothing is left but to wait for the sums."""
        self._waits, self._waiting = waits, None
        try:
            yield
        finally:
            waits.wait_ends(self._waiting)
            self._waits = None

    def _reduce(self, bucket: Any) -> Any:
        """Sum one bucket over ranks, with what earlier micro-batches left in fp32."""
        future = self._sum_bucket(bucket)
        if self._waits is not None and bucket.is_last():
            self._waiting = self._waits.wait_begins()
        return future

    def _sum_bucket(self, bucket: Any) -> Any:
        buffer = bucket.buffer()
        if not any(hasattr(p, "main_grad") for p in bucket.parameters()):
            return self._sum(buffer, bucket.gradients()).then(lambda _: buffer)
        wide = buffer.float()
        views = _views(wide, bucket.parameters())
        for parameter, view in zip(bucket.parameters(), views, strict=True):
            view += parameter.main_grad

        def keep(future: Any) -> Any:
            future.value()
            for parameter, view in zip(bucket.parameters(), views, strict=True):
                parameter.main_grad.copy_(view)
            return buffer

        return self._sum(wide, views).then(keep)

    def _sum(self, buffer: Tensor, parts: list[Tensor]) -> Any:
        """Sum a bucket over ranks in place, at once or part by part."""
        if not self._apart:
            return dist.all_reduce(buffer, group=self.group, async_op=True).get_future()
        works = [dist.all_reduce(part, group=self.group, async_op=True) for part in parts]
        return torch.futures.collect_all([work.get_future() for work in works])


def _views(flat: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    sizes = [p.numel() for p in parameters]
    return [part.view(p.shape) for part, p in zip(flat.split(sizes), parameters, strict=True)]
