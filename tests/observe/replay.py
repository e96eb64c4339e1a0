"""Records of every rank of a gang, through everything that a server does with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.cluster.jobs.job import GangShape, Placement
from phalanx.cluster.protocol.events import SlowRank
from phalanx.cluster.protocol.step_watch import StepWatch
from phalanx.cluster.protocol.timeouts import fixed_limits
from phalanx.control.server.agent_link.step_records import Metrics
from phalanx.observe.node.node_records import TimedRecord, merge
from phalanx.train.report.records import StepRecord
from tests.observe.records import SECOND_NS


class Named(NamedTuple):
    """A rank that a detector named."""

    step: int  # after which
    rank: int
    part: str
    slowdown_ppm: int


def replay(
    ranks: Sequence[Sequence[StepRecord]], shape: GangShape, *, summary: bool = False
) -> list[Named]:
    """Whom the detectors name; ``ranks``: each one's records, step by step."""
    watch, told = StepWatch(), list[object]()
    metrics = Metrics(watch, told.extend)
    world, slot = len(ranks), shape.slot_gpus
    nodes = tuple(range(world // slot))
    placement = Placement(nodes, (), replicas=shape.replicas)
    watch.begin(1, 1, shape, placement, fixed_limits(3600 * SECOND_NS), 0)
    metrics.steps.begin(1, 1, nodes, slot, world)
    named: list[Named] = []
    for number, records in enumerate(zip(*ranks, strict=True), start=1):
        now_ns = number * SECOND_NS
        for node in nodes:
            own = range(node * slot, (node + 1) * slot)
            said = {rank: [TimedRecord(now_ns, records[rank])] for rank in own}
            message = merge(node, 1, 1, said, summary=summary)
            assert message is not None
            metrics.receive(message, now_ns)
        slow = [event for event in told if isinstance(event, SlowRank)]
        named += [Named(records[0].step, e.rank, e.part, e.slowdown_ppm) for e in slow]
        told.clear()
    assert metrics.steps.refused == 0
    return named
