"""Which other numbers of a cluster's GPUs a plan is tried on: those that divide better."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.hardware import Cluster

# Where fewer GPUs may be better (failures and batch limits can make the last ones cost more than
# they bring), round numbers down to this share of the cluster are tried.
LEAST_SHARE = 1 / 16
# Of a number that divides badly (what is left of it beside powers of two is large), so many rounder
# ones of at least this share are tried.
LARGEST_ODD_FACTOR = 9
LEAST_ROUNDER_SHARE = 7 / 8
MOST_ROUNDER = 3
# How far a search goes for the nearest number of GPUs that works.
LARGEST_FACTOR = 4096


def other_counts(on: Cluster) -> Iterator[int]:
    """Larger clusters first, in steps of two and three; then smaller ones."""
    node = on.gpus_per_node
    factor = 2
    while factor <= LARGEST_FACTOR:
        for gpus in (on.gpus * factor * 3 // 4, on.gpus * factor):
            if gpus > on.gpus and gpus % node == 0:
                yield gpus
        factor *= 2
    smaller = on.gpus // 2
    while smaller >= node:
        yield _whole_nodes(on, smaller)
        smaller //= 2


def rounder_counts(on: Cluster) -> list[int]:
    """The next smaller numbers that powers of two divide more often, the roundest first.

    None where the cluster's own divides well: 4,608 is 9 times a power of two.
    """
    if on.gpus // (on.gpus & -on.gpus) <= LARGEST_ODD_FACTOR:
        return []
    unit, counts = on.gpus_per_node, dict[int, None]()
    while unit <= on.gpus * (1 - LEAST_ROUNDER_SHARE):
        unit *= 2
    while unit > on.gpus_per_node:
        count = on.gpus // unit * unit
        if LEAST_ROUNDER_SHARE * on.gpus <= count < on.gpus:
            counts[count] = None
        unit //= 2
    return list(counts)[:MOST_ROUNDER]


def round_counts(on: Cluster) -> Iterator[int]:
    """All GPUs, and powers of two and three times one below: these divide well."""
    yield on.gpus
    power = 1 << (on.gpus.bit_length() - 1)
    while power >= on.gpus * LEAST_SHARE:
        for gpus in (power, power * 3 // 4):
            if gpus < on.gpus and gpus == _whole_nodes(on, gpus):
                yield gpus
        power //= 2


def _whole_nodes(on: Cluster, gpus: float) -> int:
    return max(1, int(gpus) // on.gpus_per_node) * on.gpus_per_node
