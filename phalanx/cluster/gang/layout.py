"""Slots of a gang as columns of whole replicas, and who keeps whose snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phalanx.cluster.jobs.job import ClusterJob, GangShape

Places = npt.NDArray[np.int64]  # by node
SHIFTS = 256  # parts of a gang by which buddies may be apart


def column_replicas(shape: GangShape, replicas: int) -> int:
    """Replicas that can only leave together, because slots hold parts of several; 0: all of them.

    Ranks are laid out pipeline, data, context, tensor: a slot with room for k blocks of tensor *
    context ranks holds k neighbouring replicas of one stage.
    """
    inner = shape.tensor * shape.context
    if not shape.slot_gpus:
        return 1
    if inner % shape.slot_gpus == 0:
        return 1
    if shape.slot_gpus % inner == 0 and replicas % (shape.slot_gpus // inner) == 0:
        return shape.slot_gpus // inner
    return 0


def grid(shape: GangShape, replicas: int) -> tuple[int, int, int]:
    """(stages, columns, slots of one column in one stage) of a gang that divides evenly."""
    together = column_replicas(shape, replicas)
    assert together
    if not shape.slot_gpus:
        return 1, replicas, 1
    wide = max(1, shape.tensor * shape.context // shape.slot_gpus)
    return shape.pipeline, replicas // together, wide


def column_of(shape: GangShape, replicas: int, slot: int) -> int:
    """The column that a slot belongs to."""
    _, columns, wide = grid(shape, replicas)
    return slot // wide % columns


def column_slots(shape: GangShape, replicas: int, column: int) -> list[int]:
    """The slots of a column, by stage."""
    stages, columns, wide = grid(shape, replicas)
    return [
        (stage * columns + column) * wide + part for stage in range(stages) for part in range(wide)
    ]


def without_columns(
    values: Sequence[int], shape: GangShape, replicas: int, columns: Sequence[int]
) -> tuple[int, ...]:
    """Values by slot with some columns cut out."""
    gone = {slot: None for column in columns for slot in column_slots(shape, replicas, column)}
    return tuple(value for slot, value in enumerate(values) if slot not in gone)


def with_columns(
    values: Sequence[int], shape: GangShape, replicas: int, added: Sequence[int]
) -> tuple[int, ...]:
    """Values by slot with more columns behind the last; ``added`` by stage, then by column."""
    stages, columns, wide = grid(shape, replicas)
    old, new = columns * wide, len(added) // stages
    slots: list[int] = []
    for stage in range(stages):
        slots.extend(values[stage * old : (stage + 1) * old])
        slots.extend(added[stage * new : (stage + 1) * new])
    return tuple(slots)


class FailureDomains(Protocol):
    """What may fail as a whole, as numbers: whose rack, power feed and switch a node shares."""

    @property
    def rack(self) -> Places: ...

    @property
    def power(self) -> Places: ...

    @property
    def switch(self) -> Places: ...


def backup_spare(job: ClusterJob) -> int:
    """The spare that keeps a copy where a gang has no second node to; -1: there is none."""
    placement = job.placement
    assert placement is not None
    alone = len(placement.nodes) == 1 and len(placement.spares) > 0
    return placement.spares[0] if alone and job.spec.expected.snapshot_steps > 0 else -1


def buddy_shift(domains: FailureDomains, nodes: Sequence[int], before: int = 0) -> int:
    """A shift at which every slot's buddy stands in another failure domain, if there is one.

    That is, in another rack, on another power feed and below another switch: what takes one of them
    then leaves the copy. The shift that the gang had ``before`` is kept where it will do: copies
    stay where they are. Slots of a place follow each other, so the size of the largest one is
    enough at first; once spares have taken slots far from their own place, a longer shift may be.
    """
    count = len(nodes)
    if count < 2:
        return 0
    where = np.asarray(nodes, np.int64)
    places = [domains.rack[where], domains.power[where], domains.switch[where]]
    sizes = [int(np.bincount(domain_of).max()) for domain_of in places]
    # Whoever cannot stand outside of a place that has more than half of the slots shares it.
    fewest = tuple(max(0, 2 * size - count) for size in (max(sizes[:2]), sizes[2]))
    longer = (count * part // SHIFTS for part in range(SHIFTS // 2, 0, -1))
    best, least = 1, (count + 1, count + 1)
    for shift in dict.fromkeys((before, 1, *sizes, *longer)):
        if not 0 < shift < count:
            continue
        rack, power, switch = (
            domain_of == np.concatenate((domain_of[shift:], domain_of[:shift]))
            for domain_of in places
        )
        shared = int(np.count_nonzero(rack | power)), int(np.count_nonzero(switch))
        if shared < least:
            best, least = shift, shared
        if least == fewest:
            break
    return best
