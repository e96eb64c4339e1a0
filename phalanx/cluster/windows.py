"""Advance reservations and maintenance: which nodes are closed to whom, and when.

A reservation keeps nodes for some teams during its window; without teams it keeps them empty.
Before the window, others may use them as long as they are sure to be gone when it begins.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phalanx.cluster.fleet import NodeState
from phalanx.cluster.room import Nodes
from phalanx.cluster.state import Reservation, View


def choose_nodes(view: View, reservation: Reservation) -> tuple[int, ...]:
    """Nodes of a reservation that names only GPUs: idle ones first, whole leaves together."""
    if reservation.nodes or not reservation.gpus:
        return reservation.nodes
    columns = view.fleet.columns
    able = np.flatnonzero((columns.state == NodeState.HEALTHY) & (columns.gpus > 0))
    busy = columns.gpus[able] - columns.free_gpus[able]
    order = able[np.lexsort((able, busy > 0))]
    enough = np.cumsum(columns.gpus[order])
    count = int(np.searchsorted(enough, reservation.gpus)) + 1
    return tuple(sorted(order[:count].tolist()))


def running(view: View) -> Iterator[Reservation]:
    """Reservations that are not over."""
    for reservation in view.reservations.values():
        if reservation.end_ns > view.now_ns:
            yield reservation


def shuts_out(reservation: Reservation, team: str, end_ns: int | None) -> bool:
    """Whether a job that would end then (None: nobody knows) may not use its nodes."""
    if team in reservation.teams:
        return False
    return end_ns is None or end_ns > reservation.start_ns


def closed_nodes(
    view: View, sets: dict[str, Nodes], team: str, end_ns: int | None
) -> tuple[Nodes, str]:
    """(nodes that windows close to a job, the name of one of them)."""
    closed, name = 0, ""
    for reservation in running(view):
        if shuts_out(reservation, team, end_ns):
            closed |= sets.get(reservation.name, 0)
            name = name or reservation.name
    return closed, name


def next_edge_ns(view: View) -> int | None:
    """When a window begins, ends, or must begin to be emptied."""
    grace = view.policy.queue.grace_ns
    edges = [
        edge
        for reservation in running(view)
        for edge in (reservation.start_ns - grace, reservation.start_ns, reservation.end_ns)
        if edge > view.now_ns
    ]
    return min(edges, default=None)
