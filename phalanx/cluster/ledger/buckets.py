"""What GPU time can have gone to."""

from __future__ import annotations

from phalanx.cluster.node import NodeState

BUCKETS = (
    "productive",
    "data_wait",
    "exposed_communication",  # estimated
    "bubble",  # estimated
    "unreported",  # a program ran, and told nothing of what it did
    "checkpoint_stall",
    "detection",
    "restart",
    "recompute",
    "straggler",
    "idle_spare",
    "quarantined",
    "unallocated",
    "residual",
)
ESTIMATED = ("exposed_communication", "bubble")
TRAINING = ("productive", "data_wait", "exposed_communication", "bubble")  # of kept steps
LOST = ("detection", "restart", "recompute", "straggler", "checkpoint_stall")
# What is lost without an incident has a cause of its own.
ROUTINE = {"straggler": "straggler", "checkpoint_stall": "checkpoint"}

# What the GPUs of a node that no job holds count as, by its state.
IDLE_BUCKETS = tuple(
    {NodeState.HEALTHY: "unallocated", NodeState.SPARE: "idle_spare"}.get(state, "quarantined")
    for state in NodeState
)

Buckets = dict[str, int]


def add(buckets: Buckets, bucket: str, gpu_ns: int) -> None:
    """Adds to a bucket."""
    if gpu_ns:
        buckets[bucket] = buckets.get(bucket, 0) + gpu_ns
