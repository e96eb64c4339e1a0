"""Small fleets for the tests of queue and placement."""

from __future__ import annotations

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import Placement
from phalanx.cluster.node import Held, Node
from phalanx.cluster.placement.choose import PlacementRequest, held_by


def fleet_of(
    nodes: int, *, leaf: int = 4, pod: int = 16, domain: int = 1, gpus: int = 8, **more: object
) -> Fleet:
    """Equal nodes, numbered through leaves, pods and NVLink domains of these sizes."""
    return Fleet(
        Node(
            name=f"n{i}",
            gpus=gpus,
            domain=f"d{i // domain}" if domain > 1 else "",
            leaf=f"l{i // leaf}",
            pod=f"p{i // pod}",
            **more,  # type: ignore[arg-type]
        )
        for i in range(nodes)
    )


def occupy(fleet: Fleet, node: int, gpus: int, job: int = 10**6) -> None:
    """Somebody else's job on the lowest free GPUs of a node."""
    mask, taken = fleet.free_mask(node), 0
    for _ in range(gpus):
        taken |= mask & -mask
        mask &= mask - 1
    fleet.take(job + node, node, Held(taken, 0, 0))


def check_valid(fleet: Fleet, request: PlacementRequest, placement: Placement) -> None:
    """All or nothing, on free GPUs of healthy nodes, tensor groups inside a domain."""
    shape = request.shape
    assert len(placement.nodes) == shape.slots(request.replicas)
    everything = placement.nodes + placement.spares
    assert len(set(everything)) == len(everything)
    masks = placement.gpus or tuple((1 << shape.slot_gpus) - 1 for _ in placement.nodes)
    for node, mask in zip(placement.nodes, masks, strict=True):
        assert mask.bit_count() == shape.slot_gpus
        fleet.take(request.job, node, held_by(fleet, shape, node, mask))  # asserts that it is free
    assert all(fleet.columns.state[node] == 0 for node in everything)
    assert all(not fleet.held[node] for node in placement.spares)
    wide = max(1, shape.tensor // max(1, shape.slot_gpus))
    for first in range(0, len(placement.nodes), wide):
        group = placement.nodes[first : first + wide]
        assert len({int(fleet.columns.domain[node]) for node in group}) == 1
