"""Advance reservations and maintenance: which nodes are closed to whom, and when.

A reservation keeps nodes for some teams during its window; without teams it keeps them empty.
Before the window, others may use them as long as they are sure to be gone when it begins.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from phalanx.cluster.node import NodeState
from phalanx.cluster.state import Reservation, View
from phalanx.cluster.units import HOUR_NS

LONGEST_LEAVE_NS = HOUR_NS  # that a job is given to save its state before a window opens
LOST = (NodeState.DEAD, NodeState.QUARANTINED, NodeState.DRAINING)


def choose_nodes(
    view: View, reservation: Reservation, taken: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Nodes of a reservation that names only GPUs: sound ones first, and of these the idle ones.

    Those that other reservations have (``taken``) are not for it; () where the rest is too few.
    """
    if reservation.nodes or not reservation.gpus:
        return reservation.nodes
    columns = view.fleet.columns
    able = columns.gpus > 0
    able[np.asarray(taken, np.int64)] = False
    order = np.flatnonzero(able)
    busy = columns.gpus[order] > columns.free_gpus[order]
    order = order[np.lexsort((order, busy, columns.state[order] != NodeState.HEALTHY))]
    enough = np.cumsum(columns.gpus[order])
    count = int(np.searchsorted(enough, reservation.gpus)) + 1
    return tuple(sorted(order[:count].tolist())) if count <= len(order) else ()


def trimmed(view: View, reservation: Reservation, members: tuple[int, ...]) -> tuple[int, ...]:
    """The nodes of a reservation that names only GPUs, without those that it has too many of.

    It keeps sound ones that its teams work on, then idle ones; others can use the rest.
    """
    fleet = view.fleet

    def worth(node: int) -> tuple[int, int]:
        if fleet.state(node) in LOST:
            return 3, node
        teams = [view.jobs[number].spec.team for number in fleet.held[node]]
        return (0 if any(team in reservation.teams for team in teams) else 1 + bool(teams)), node

    kept = list(members)
    gpus = sum(fleet.nodes[node].gpus for node in members if fleet.state(node) not in LOST)
    for node in sorted(members, key=worth, reverse=True):
        less = 0 if fleet.state(node) in LOST else fleet.nodes[node].gpus
        if gpus - less >= reservation.gpus:
            kept.remove(node)
            gpus -= less
    return tuple(kept)


def mended(
    view: View, reservation: Reservation, members: tuple[int, ...], taken: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    """(nodes of a reservation that names only GPUs, without those that are lost; GPUs it lacks).

    Others take the place of what is lost: idle ones first. What cannot be replaced stays, for it
    may come back.
    """
    columns = view.fleet.columns
    state = columns.state[np.asarray(members, np.int64)]
    lost = [node for node, is_lost in zip(members, np.isin(state, LOST), strict=True) if is_lost]
    kept = [node for node in members if node not in lost]
    lacking = reservation.gpus - sum(view.fleet.nodes[node].gpus for node in kept)
    if lacking <= 0:
        return members, 0
    able = (columns.gpus > 0) & (columns.state == NodeState.HEALTHY)
    able[np.asarray((*members, *taken), np.int64)] = False
    order = np.flatnonzero(able)
    order = order[np.lexsort((order, columns.gpus[order] > columns.free_gpus[order]))]
    count = int(np.searchsorted(np.cumsum(columns.gpus[order]), lacking)) + 1
    new = order[:count].tolist()
    lacking -= sum(view.fleet.nodes[node].gpus for node in new)
    stays = lost if lacking > 0 else []
    return tuple(sorted((*kept, *new, *stays))), max(0, lacking)


def beside(view: View, reservation: Reservation) -> Iterator[Reservation]:
    """Other reservations for some of the same time."""
    for other in running(view):
        meet = other.start_ns < reservation.end_ns and reservation.start_ns < other.end_ns
        if other.name != reservation.name and meet:
            yield other


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


def emptied_from_ns(view: View, reservation: Reservation) -> int:
    """When the first may have to begin to leave the nodes of a window."""
    return reservation.start_ns - max(view.policy.queue.grace_ns, LONGEST_LEAVE_NS)


def next_edge_ns(view: View) -> int | None:
    """When a window begins, ends, or must begin to be emptied."""
    edges = [
        edge
        for reservation in running(view)
        for edge in (
            emptied_from_ns(view, reservation),
            reservation.start_ns,
            reservation.end_ns,
        )
        if edge > view.now_ns
    ]
    return min(edges, default=None)
