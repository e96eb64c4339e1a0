"""Where a pending job could start, beside what is kept for others."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.jobs.job import ClusterJob, Placement
from phalanx.cluster.placement.choose import nodes_with_capacity, place
from phalanx.cluster.placement.free_index import Nodes, set_of_nodes
from phalanx.cluster.queue.limits import Limits
from phalanx.cluster.queue.pending import Demand
from phalanx.cluster.state import View


def place_for(
    limits: Limits, view: View, job: ClusterJob, demand: Demand, closed: Nodes
) -> Placement | None:
    """A place for all replicas, or for as many as there is room for, if it is elastic."""
    most = limits.most_replicas(view, job, demand)
    holders = set_of_nodes(job.kept.holders) if job.kept is not None else 0
    request = structs.replace(
        demand.request, job=job.id, closed=closed, replicas=most, holders=holders
    )
    shape = request.shape
    if nodes_with_capacity(view.fleet, request) < shape.slots(min(shape.floor, most)):
        return None  # so nearly always; why there is no place is not asked
    placement = place(view.fleet, request)
    if isinstance(placement, Placement):
        return placement
    best: Placement | None = None
    low, high = shape.floor, request.replicas - 1
    while low <= high:
        # First whether the fewest fit; then how many more do.
        middle = (low + high + 1) // 2 if best else low
        placement = place(view.fleet, structs.replace(request, replicas=middle))
        if isinstance(placement, Placement):
            best, low = placement, middle + 1
        elif best is None:
            return None
        else:
            high = middle - 1
    return best
