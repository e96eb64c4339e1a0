"""Which nodes the windows of reservations keep, and from whom."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.cluster.placement.free_index import Nodes, set_of_nodes
from phalanx.cluster.queue import windows
from phalanx.cluster.queue.decisions import QueueState
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.state import Reservation, View


class WindowNodes:
    """Nodes of all reservations; those of one that names only GPUs are in the state."""

    def __init__(self, state: QueueState) -> None:
        self._state = state
        self._sets: dict[str, tuple[tuple[int, ...], Nodes]] = {}

    def copy_for(self, state: QueueState) -> WindowNodes:
        """The same over a copy of the state."""
        twin = WindowNodes(state)
        twin._sets = self._sets
        return twin

    def members(self, view: View, name: str) -> tuple[int, ...]:
        """Nodes of a reservation; those of one that names only GPUs are chosen once."""
        reservation = view.reservations[name]
        if reservation.nodes:
            return reservation.nodes
        if name not in self._state.windows:
            self._state.windows[name] = self.choose(view, reservation)
        return self._state.windows[name]

    def choose(self, view: View, reservation: Reservation) -> tuple[int, ...]:
        """Nodes for a reservation that names only GPUs, of those that no other one keeps then."""
        return windows.choose_nodes(view, reservation, self._taken_beside(view, reservation))

    def closed_to(self, view: View, team: str, end_ns: int | None) -> Nodes:
        """Nodes that windows close to a job of a team that ends then (None: nobody knows)."""
        closed = 0
        for _, nodes in self.shut(view, team, end_ns):
            closed |= nodes
        return closed

    def open_now(self, view: View, team: str) -> Nodes:
        """Nodes of windows that are open now and shut out a team ("": everybody)."""
        nodes = 0
        for window in windows.running(view) if view.reservations else ():
            if window.start_ns <= view.now_ns and team not in window.teams:
                nodes |= set_of_nodes(self.members(view, window.name))
        return nodes

    def open_by(self, view: View, team: str, end_ns: int | None, soon_ns: int) -> Nodes:
        """Nodes of windows that are open by then, and shut out a job that ends at ``end_ns``."""
        nodes = 0
        for window in windows.running(view):
            if window.start_ns <= soon_ns and windows.shuts_out(window, team, end_ns):
                nodes |= set_of_nodes(self.members(view, window.name))
        return nodes

    def shut(self, view: View, team: str, end_ns: int | None) -> Iterator[tuple[str, Nodes]]:
        """Windows that shut out a job of a team that ends then (None: nobody knows), with nodes."""
        for reservation in windows.running(view) if view.reservations else ():
            if not windows.shuts_out(reservation, team, end_ns):
                continue
            nodes = self.members(view, reservation.name)
            kept = self._sets.get(reservation.name)
            if kept is None or kept[0] != nodes:
                kept = self._sets[reservation.name] = (nodes, set_of_nodes(nodes))
            yield reservation.name, kept[1]

    def mend(self, view: View) -> list[Reason]:
        """Finds nodes for those that windows lost; what to tell of windows that lack some.

        What one has too many of, since nodes came back, is free for the others first.
        """
        messages, kept = [], self._state.windows
        by_gpus = [one for one in windows.running(view) if not one.nodes and kept.get(one.name)]
        for reservation in by_gpus:
            name = reservation.name
            kept[name] = windows.trimmed(view, reservation, kept[name])
        for reservation in by_gpus:
            name, taken = reservation.name, self._taken_beside(view, reservation)
            kept[name], lacking = windows.mended(view, reservation, kept[name], taken)
            if not lacking:
                self._state.short.pop(name, None)
            elif name not in self._state.short:
                self._state.short[name] = None
                short = reason("window_short", name=name, gpus=reservation.gpus, less=lacking)
                messages.append(short)
        return messages

    def _taken_beside(self, view: View, reservation: Reservation) -> tuple[int, ...]:
        """Nodes that other reservations keep for some of the same time."""
        taken = {
            node: None
            for other in windows.beside(view, reservation)
            for node in other.nodes or self._state.windows.get(other.name, ())
        }
        return tuple(taken)
