"""A job on fewer nodes than it was planned for, each time mapped as well as it can be there."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import structs

from phalanx.config import ConfigError, Job, check, resolve
from phalanx.hardware import Cluster
from phalanx.plan.cost.constants import Constants
from phalanx.plan.search.open_axes import all_open, with_open_axes_chosen

SMALL_GANG = 32  # nodes


def sized(devices: Cluster, gpus: int) -> Cluster:
    """So many of the same devices; cores of one machine stay in one domain."""
    if devices.gpu.family == "cpu":
        return structs.replace(devices, gpus=gpus, domain_gpus=gpus)
    return structs.replace(devices, gpus=gpus)


def on_fewer_nodes(
    job: Job, on: Cluster, *, nodes: int, node_gpus: int, constants: Constants | None = None
) -> Iterator[tuple[Job, Cluster]]:
    """The job with the model and batch that it has, on fewer nodes than it has, the fewest first.

    Numbers of nodes that no mapping fits on, or divides the batch over, are left out. A job with
    virtual replicas keeps its bits: nothing but the number of its replicas changes.
    """
    for count in _counts(nodes):
        fewer = sized(on, count * node_gpus)
        try:
            if job.train.virtual_replicas:
                yield _with_fewer_replicas(job, fewer.gpus), fewer
                continue
            free = all_open(job, fewer.gpus)
            yield with_open_axes_chosen(free, fewer, constants=constants)[0], fewer
        except ConfigError:
            continue


def _with_fewer_replicas(job: Job, ranks: int) -> Job:
    """ConfigError where its virtual replicas do not divide over them."""
    data = max(1, ranks // job.parallel.pipeline)
    copies = 1 if job.parallel.zero == 0 else min(job.parallel.replicate, data)
    axes = structs.replace(job.parallel, data=data, replicate=copies)
    other = resolve(structs.replace(job, parallel=axes), ranks)
    check(other, ranks)
    return other


def _counts(nodes: int) -> list[int]:
    """Shares of what a gang has, since batches mostly divide by powers of two.

    Of a small gang also one or two less; a large one is searched longer, and rarely divides so.
    """
    shares = (nodes * 3 // 4, nodes // 2)
    few = (nodes - 1, nodes - 2, nodes // 4) if nodes <= SMALL_GANG else ()
    return sorted({count for count in (*shares, *few) if 0 < count < nodes})
