"""One slow rank among many, and what of it is slow: its device, its host or its network.

All ranks of a synchronous gang take equally long for a step, so step times say nothing. What a rank
computes between collectives, what its host needs to give it that work, and how long its own sends
take, does.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from msgspec import Struct

from phalanx.cluster.detectors.robust import MILLION, Ints, middle, middle_and_spread

LEAST_STEPS = 8
LEAST_SLOWDOWN_PPM = 40_000  # less is not worth an intervention
LEAST_DEVIATIONS = 8  # beyond which no rank of 100,000 strays by chance


SlowPart = Literal["compute", "communication", "host"]


class Straggler(Struct, frozen=True):
    """A rank that holds up the others."""

    rank: int
    part: SlowPart
    slowdown_ppm: int  # above the median of its peers


def slow_compute(
    compute_ns: Ints, stages: Ints | None = None, host_ns: Ints | None = None
) -> list[Straggler]:
    """Ranks that compute slowly; ``compute_ns``: [steps, ranks], without waiting for peers.

    ``stages``: by rank, which pipeline stage it is: stages do different work and are compared
    among themselves. The median over steps drops single slow steps, however slow. ``host_ns``: of
    ``compute_ns``, what the device did at its host's pace. Where that is most of what a rank takes
    longer, its device is not slow; nor need its host be: of many alike the last one sets the pace.
    """
    if compute_ns.shape[0] < LEAST_STEPS:
        return []
    slow_ranks = _outliers(compute_ns, stages, "compute")
    if host_ns is None or not slow_ranks:
        return slow_ranks
    own, paced = middle(compute_ns), middle(host_ns)
    return [
        slow
        for slow in slow_ranks
        if 2 * _excess(paced, slow.rank, stages) < _excess(own, slow.rank, stages)
    ]


def slow_host(
    launch_ns: Ints, host_ns: Ints, compute_ns: Ints, stages: Ints | None = None
) -> list[Straggler]:
    """Ranks whose hosts give their devices work slowly, where devices wait for it.

    ``launch_ns``: [steps, ranks], what that takes a host; ``host_ns``: of ``compute_ns``, what a
    device did at its host's pace. A host that is slow and yet ahead of its device holds up nobody,
    one that its device hides in part costs only what the rank itself takes longer, and what a
    rank takes longer for another reason is not its host's fault.
    """
    if launch_ns.shape[0] < LEAST_STEPS:
        return []
    launch, paced, own = middle(launch_ns), middle(host_ns), middle(compute_ns)
    stragglers: list[Straggler] = []
    for slow in _outliers(launch_ns, stages, "host"):
        longer = _excess(own, slow.rank, stages)
        usual = int(own[slow.rank]) - longer
        lost_ppm = min(longer, _excess(paced, slow.rank, stages)) * MILLION // max(1, usual)
        waits = 2 * _excess(paced, slow.rank, stages) >= _excess(launch, slow.rank, stages)
        if waits and lost_ppm > LEAST_SLOWDOWN_PPM:
            ppm = min(slow.slowdown_ppm, lost_ppm)
            stragglers.append(Straggler(slow.rank, "host", ppm))
    return stragglers


def _excess(usual: Ints, rank: int, stages: Ints | None) -> int:
    """What a rank takes longer than the middle of its stage."""
    peers = usual if stages is None else usual[stages == stages[rank]]
    return int(usual[rank]) - int(middle(peers))


def slow_transfer(transfer_ns: Ints, stages: Ints | None = None) -> list[Straggler]:
    """Ranks with a slow network; ``transfer_ns``: [steps, ranks], of each rank's own sends.

    Stages are compared among themselves: some send within a node and others between nodes. A slow
    card also holds up the neighbours that send to it: of several slow ranks the others are dropped
    that are less than half as slow as the worst.
    """
    if transfer_ns.shape[0] < LEAST_STEPS:
        return []
    found = _outliers(transfer_ns, stages, "communication")
    return [slow for slow in found if 2 * slow.slowdown_ppm >= found[0].slowdown_ppm]


def _outliers(times_ns: Ints, stages: Ints | None, part: SlowPart) -> list[Straggler]:
    usual = middle(times_ns)
    restless = middle(np.abs(times_ns - usual))  # how much a rank varies from step to step
    outliers: list[Straggler] = []
    classes = [np.arange(len(usual))] if stages is None else _members(stages)
    for ranks in classes:
        if len(ranks) < 3:
            continue  # nobody to compare with
        center, spread = middle_and_spread(usual[ranks])
        # Few peers may agree by chance; their own restlessness says how far chance reaches.
        spread = max(spread, int(middle(restless[ranks])) // 2)
        excess = usual[ranks] - center
        late = (excess > LEAST_DEVIATIONS * spread) & (
            excess * MILLION > LEAST_SLOWDOWN_PPM * max(1, center)
        )
        outliers.extend(
            Straggler(int(ranks[index]), part, int(excess[index]) * MILLION // max(1, center))
            for index in np.nonzero(late)[0]
        )
    return sorted(outliers, key=lambda slow: (-slow.slowdown_ppm, slow.rank))


def _members(stages: Ints) -> list[Ints]:
    order = np.argsort(stages, kind="stable")
    edges = np.nonzero(np.diff(stages[order]))[0] + 1
    return [np.asarray(part, np.int64) for part in np.split(order, edges)]
