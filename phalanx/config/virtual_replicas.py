"""Which virtual replicas each data replica computes, where ``train.virtual_replicas`` is set."""

from __future__ import annotations

from typing import NamedTuple

from phalanx.config.errors import ConfigError
from phalanx.config.schema import Job, Train


class VirtualReplicas(NamedTuple):
    """The virtual replicas of one data replica, in the order in which it computes them."""

    total: int  # of the whole job, a power of two
    own: tuple[int, ...]

    def micro_batches(self, samples: int, micro_batch: int) -> int:
        """Micro-batches of each virtual replica in a step of so many samples, padded."""
        return -(-samples // (self.total * micro_batch))


def virtual_replicas(job: Job, index: int) -> VirtualReplicas | None:
    """Those of the data replica ``index`` of a resolved job; None: the job has none.

    All that meets in one sum must be a whole sub-tree. What is reduced once a step is summed on
    the rank first, so that its own are neighbours; what is reduced after each virtual replica is
    summed over ranks first, so that neighbours are on neighbouring ranks.
    """
    axes, count = job.parallel, job.train.virtual_replicas
    if not count:
        return None
    if reduces_once(job):
        each = count // axes.data
        return VirtualReplicas(count, tuple(range(index * each, (index + 1) * each)))
    shards, block = axes.data // axes.replicate, count // axes.replicate
    copy, shard = divmod(index, shards)
    own = range(copy * block + shard, (copy + 1) * block, shards)
    return VirtualReplicas(count, tuple(own))


def padded_micro_batches(job: Job, samples: int) -> int:
    """Micro-batches of each replica in a step of so many samples: as many on all, virtual too."""
    data, virtual = job.parallel.data, job.train.virtual_replicas
    each = -(-samples // ((virtual or data) * job.train.micro_batch))
    return max(1, virtual // data) * each


def refuse_other_sums(job: Job, before: Train, where: str) -> None:
    """Raise ``ConfigError`` where a run would go on with sums in another order than it had."""
    if not (job.train.virtual_replicas and before.virtual_replicas):
        return
    for name in ("virtual_replicas", "micro_batch"):
        ours, theirs = getattr(job.train, name), getattr(before, name)
        if ours != theirs:
            rule = f"{where} was trained with {theirs}, and another value gives other bits"
            fix = f"set it to {theirs}, or go on with train.virtual_replicas = 0"
            raise ConfigError(f"train.{name}", ours, rule, fix)


def reduces_once(job: Job) -> bool:
    """Whether gradients are reduced once a step, not after each micro-batch."""
    return job.parallel.zero <= 1 or job.parallel.pipeline > 1
