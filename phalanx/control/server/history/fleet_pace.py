"""How fast each node is beside its peers, from the steps that the detectors keep anyway."""

from __future__ import annotations

import numpy as np

from phalanx.cluster.watch import Watch, Watched

RECENT_STEPS = 8


def slowness(watch: Watch, nodes: int) -> list[float | None]:
    """By node: its own time of a step over the median of its stage; None: nobody told."""
    found: list[float | None] = [None] * nodes
    for gang in watch.gangs.values():
        for node, ratio in _of_gang(gang):
            if node < nodes:
                found[node] = ratio
    return found


def _of_gang(gang: Watched) -> list[tuple[int, float]]:
    recent = list(gang.compute)[-RECENT_STEPS:]
    slot, where = max(1, gang.shape.slot_gpus), gang.placement.nodes
    world = gang.shape.ranks(gang.placement.replicas)
    if not recent or len(recent[-1]) != world:
        return []
    usual = np.median(np.stack([each for each in recent if len(each) == len(recent[-1])]), axis=0)
    stages = gang.shape.pipeline if len(usual) % gang.shape.pipeline == 0 else 1
    by_stage = usual.reshape(stages, -1)
    middle = np.median(by_stage, axis=1, keepdims=True)
    each = (by_stage / np.maximum(middle, 1)).reshape(-1)
    ratios = np.maximum.reduceat(each, range(0, world, slot))  # the last node may have fewer
    return [(node, round(float(ratio), 3)) for node, ratio in zip(where, ratios, strict=True)]
