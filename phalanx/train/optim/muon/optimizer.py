"""Muon's step: momentum where blocks are, orthogonalisation where matrices were given to, updates.

Momentum is sharded as weights are. Buckets of matrices follow one another: while one is
orthogonalised, the next travels to its owners and the results of the one before travel back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from phalanx.config import Optimizer as Settings
from phalanx.model import is_orthogonalized
from phalanx.parallel import Weight
from phalanx.train.optim.away.host_state import HostState, host_share, rounded
from phalanx.train.optim.base import WeightOptimizer
from phalanx.train.optim.groups import update_rule
from phalanx.train.optim.guard import GradientVerdict
from phalanx.train.optim.muon.exchange import BlockExchange, Received
from phalanx.train.optim.muon.matrices import MatrixLayout
from phalanx.train.optim.muon.newton_schulz import (
    even_size,
    orthogonalize_stacks,
    working_dtype,
)
from phalanx.train.optim.muon.partition import (
    MatrixShare,
    PartitionRecord,
    buckets,
    record,
    share_out,
)


class _Bucket(NamedTuple):
    """Matrices that travel together, and the weights that begin and end with them."""

    exchange: BlockExchange
    begins: list[int]
    ends: list[int]


class _Step(NamedTuple):
    """One step's blocks [stack, rows, columns], by number of the weight."""

    verdict: GradientVerdict
    peak_share: float  # of the learning rate
    directions: dict[int, Tensor]  # momentum that looks ahead
    updates: dict[int, Tensor]  # fp32


class Muon(WeightOptimizer):
    """Muon for some matrices, and another optimizer for the ``rest`` of the weights."""

    def __init__(
        self,
        matrices: list[Weight],
        rest: WeightOptimizer | None,
        settings: Settings,
        offload: bool,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.matrices, self.rest, self.settings = matrices, rest, settings
        alone = dist.get_rank() if dist.is_initialized() else 0
        self._ranks = [alone] if group is None else dist.get_process_group_ranks(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        self._shares = self._share_out(matrices)
        self._buckets = self._make_buckets(group)
        self._host: HostState | None = None
        self.momentum = []
        device = matrices[0].local.device if matrices else torch.device("cpu")
        self._together = device.type == "cuda"
        if offload and device.type == "cuda":
            size = sum(2 * rounded(4 * weight.master.numel()) for weight in matrices)
            self._host = HostState(size, device, host_share())
        for weight in matrices:
            momentum = torch.zeros_like(weight.master)
            if self._host is not None:
                weight.master = self._host.take_in(weight.master)
                momentum = self._host.take_in(momentum)
            self.momentum.append(momentum)

    def _share_out(self, matrices: list[Weight]) -> list[MatrixShare]:
        """Of the weights that are trained; others keep their momentum."""
        known: dict[object, MatrixLayout] = {}
        self._layouts = []
        for weight in matrices:
            parameter = weight.parameter
            key: tuple[object, ...] = (parameter.shape,)
            if isinstance(parameter, DTensor):
                key += (id(parameter.device_mesh), parameter.placements)
            if key not in known:
                known[key] = MatrixLayout(parameter, self._ranks)
            self._layouts.append(known[key])
        fused = [weight.declaration.fused for weight in matrices]
        trained = [number for number, weight in enumerate(matrices) if not weight.frozen]
        return share_out(self._layouts, fused, trained, len(self._ranks))

    def _make_buckets(self, group: dist.ProcessGroup | None) -> list[_Bucket]:
        runs = list(buckets(self._shares, len(self._ranks)))
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, run in enumerate(runs):
            for share in run:
                first.setdefault(share.matrices.weight, at)
                last[share.matrices.weight] = at
        device = self.matrices[0].local.device if runs else torch.device("cpu")
        return [
            _Bucket(
                BlockExchange(run, self._layouts, self._rank, group, device),
                [number for number, begun in first.items() if begun == at],
                [number for number, ended in last.items() if ended == at],
            )
            for at, run in enumerate(runs)
        ]

    @property
    def partition(self) -> PartitionRecord:
        """Which rank orthogonalises what."""
        return record(self._shares, [weight.name for weight in self.matrices], self._ranks)

    @torch.no_grad()
    def step(self, learning_rate: float, verdict: GradientVerdict) -> None:
        """``learning_rate`` is AdamW's; Muon's follows the same schedule."""
        if self.rest is not None:
            self.rest.step(learning_rate, verdict)
        if self._host is not None:
            self._host.begin()
        step = _Step(verdict, learning_rate / self.settings.learning_rate, {}, {})
        _staggered(self._work(bucket, step) for bucket in self._buckets)

    def _work(self, bucket: _Bucket, step: _Step) -> Iterator[None]:
        """Of one bucket, up to where something begins to travel, and on from there."""
        for number in bucket.begins:
            step.directions[number] = self._direction(number, step.verdict)
        leaving = bucket.exchange.gather(step.directions)
        yield
        stacks = bucket.exchange.gathered(leaving, step.directions)
        stacks = orthogonalize_stacks(stacks, together=self._together)
        coming = bucket.exchange.give_back(stacks, next(iter(step.directions.values())))
        yield
        for received in bucket.exchange.returned(coming, stacks):
            self._collect(received, step)
        for number in bucket.ends:
            self._apply(number, step)

    def _direction(self, number: int, verdict: GradientVerdict) -> Tensor:
        """Take the gradient into the momentum; where the momentum goes on to from there."""
        weight, beta = self.matrices[number], self.settings.muon_momentum
        device = weight.local.device
        gradient = weight.gradient.float() * verdict.multiplier.to(device)
        for momentum in self._at_hand(self.momentum[number]):
            moved = torch.add(gradient, momentum, alpha=beta)
            # where, not a product: the gradient of a skipped step may be infinite.
            torch.where(verdict.skip.to(device), momentum, moved, out=momentum)
            ahead = torch.add(gradient, momentum, alpha=beta, out=moved)
        return ahead.to(working_dtype(device)).view(self._block_shape(number))

    def _collect(self, received: Received, step: _Step) -> None:
        """Keep what was received of a block's update until all of it is here."""
        matrices = received.share.matrices
        number = matrices.weight
        value = received.value.float() * even_size(matrices.rows, matrices.columns)
        if received.piece.is_block:
            step.updates[number] = value
            return
        if number not in step.updates:
            step.updates[number] = value.new_empty(self._block_shape(number))
        received.piece.put(step.updates[number], value)

    def _apply(self, number: int, step: _Step) -> None:
        """Update a weight; the parts of it that are here, if any, are complete."""
        weight, settings = self.matrices[number], self.settings
        del step.directions[number]
        update = step.updates.pop(number, None)
        if update is None:
            return
        rule = update_rule(weight, settings)
        rate = step.peak_share * settings.muon_learning_rate * rule.rate_factor
        for master in self._at_hand(weight.master):
            moved = torch.mul(master, 1 - rate * rule.weight_decay)
            moved.add_(update.view(master.shape), alpha=-rate)
            torch.where(step.verdict.skip.to(master.device), master, moved, out=master)
            if weight.local.data_ptr() != master.data_ptr():
                weight.local.copy_(master)

    def _block_shape(self, number: int) -> tuple[int, int, int]:
        return self._layouts[number].blocks[self._rank].shape

    def _at_hand(self, home: Tensor) -> Iterator[Tensor]:
        """Once, where the gradient is; what lives in host memory goes back afterwards."""
        if self._host is None:
            yield home
            return
        for _, _, _, copies in self._host.passing([(home,)], whole=True):
            yield copies[0].view(home.shape)

    def settle(self) -> None:
        if self.rest is not None:
            self.rest.settle()
        if self._host is not None:
            self._host.settle()

    def tensors(self) -> dict[str, Tensor]:
        state = self.rest.tensors() if self.rest is not None else {}
        for weight, momentum in zip(self.matrices, self.momentum, strict=True):
            state[f"optimizer.momentum.{weight.name}"] = weight.like(momentum)
        return state


def takes(weight: Weight) -> bool:
    """Whether a weight is Muon's."""
    return is_orthogonalized(weight.name, weight.parameter.ndim, weight.declaration)


def _staggered(works: Iterable[Iterator[None]]) -> None:
    """Each begins when the one before it has taken its first stretch, and all go on in turn."""
    running: list[Iterator[None]] = []
    for work in works:
        running.insert(0, work)
        running = _gone_on(running)
    while running:
        running = _gone_on(running)


def _gone_on(running: Sequence[Iterator[None]]) -> list[Iterator[None]]:
    """Those that have not ended with their next stretch."""
    return [work for work in running if next(work, running) is None]
