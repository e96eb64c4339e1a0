"""Unequal shares of a batch, so that a slow node holds up the others least.

Pure: reads the job, changes nothing.
"""

from __future__ import annotations

from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.units import MILLION


def rebalanced(job: ClusterJob, node: int, slowdown_ppm: int) -> tuple[tuple[int, ...], int]:
    """Micro-batches by replica with which a slow one holds up the others least."""
    placement, shape = job.placement, job.spec.gang
    assert placement is not None
    share, replicas = job.spec.expected.micro_batches, placement.replicas
    slow = shape.slot_replicas(placement.nodes.index(node), replicas)
    # Others that were found slow before keep the less that they were given.
    now = job.gang.micro_batches if job.gang is not None else ()
    fewer_now = {r: n for r, n in enumerate(now) if n < share and r not in slow}
    fast = replicas - len(slow) - len(fewer_now)
    if share < 2 or fast < 1:
        return (), 0
    owed = sum(share - given for given in fewer_now.values())
    best, best_ppm = 0, slowdown_ppm
    for fewer in range(1, share):
        more = -(-(fewer * len(slow) + owed) // fast)
        slowest = max((share - fewer) * (MILLION + slowdown_ppm), (share + more) * MILLION)
        ppm = slowest // share - MILLION
        if ppm < best_ppm:
            best, best_ppm = fewer, ppm
    if not best:
        return (), 0
    given, extra = divmod(best * len(slow) + owed, fast)
    shares = []
    for replica in range(replicas):
        if replica in slow:
            shares.append(share - best)
        elif replica in fewer_now:
            shares.append(fewer_now[replica])
        else:
            shares.append(share + given + (1 if extra > 0 else 0))
            extra -= 1
    return tuple(shares), best_ppm
