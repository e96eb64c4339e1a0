"""Changes of a mesh that may mend it, the nearest first; rules decide which are accepted."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.config.errors import Change
from phalanx.config.rules.accepted import RANKS, nearest_first
from phalanx.config.schema import Job, Parallel

OTHER_SCHEDULES: list[Change] = [
    {"parallel.schedule": name} for name in ("interleaved", "1f1b", "gpipe")
]


def ranks_with_replicas(key: str, axes: Parallel, world_size: int) -> list[Change]:
    """Numbers of ranks near the one that there is, each with replicas that make it come out."""
    rest = axes.pipeline * axes.context * axes.tensor
    most = 2 * max(1, world_size // rest) + 1
    counts = nearest_first((rest * data for data in range(1, most + 1)), world_size)
    return [{RANKS: ranks, key: ranks // rest} for ranks in counts[:32]]


def other_sizes(
    key: str, axes: Parallel, world_size: int, values: Iterable[int]
) -> list[list[Change]]:
    """Other sizes of an axis: on as many ranks, with the replicas that are left, or on others."""
    name = key.partition(".")[2]
    wanted = getattr(axes, name)
    changes: list[list[Change]] = [[], []]
    rest = axes.pipeline * axes.context * axes.tensor // wanted
    for size in nearest_first((v for v in values if v > 0), wanted)[:64]:
        changes[0].append({key: size})
        if world_size % (rest * size) == 0:
            changes[0].append({key: size, "parallel.data": world_size // (rest * size)})
        changes[1].append({RANKS: rest * size * axes.data, key: size})
    return changes


def one_stage_schedules(more: Change | None = None) -> list[Change]:
    """Schedules that need one stage a rank, the better one first."""
    return [{**(more or {}), "parallel.schedule": name} for name in ("1f1b", "gpipe")]


def other_batches(key: str, batch: int) -> list[list[Change]]:
    """Another batch of the whole run; those of a ramp stand in a list, which words can name."""
    return [[{key: batch}]] if key == "train.global_batch" else []


def smaller_micro_batches(job: Job) -> list[list[Change]]:
    """The largest first; before the others those that leave no part of a batch empty."""
    share = job.train.global_batch // max(1, job.parallel.data)
    sizes = range(job.train.micro_batch - 1, 0, -1)[:64]
    return [
        [{"train.micro_batch": size} for size in sorted(sizes, key=lambda size: share % size != 0)]
    ]
