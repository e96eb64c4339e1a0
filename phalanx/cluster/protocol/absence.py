"""Nodes without a connection: how long the controller waits for their agents to come back."""

from __future__ import annotations

from heapq import heappop, heappush


class AbsentNodes:
    """When each node left, and until when it is waited for. Not logged, like liveness."""

    def __init__(self) -> None:
        self._left_ns: dict[int, int] = {}
        self._until_ns: dict[int, int] = {}
        self._due: list[tuple[int, int]] = []  # (until, node); some are no longer true

    def left(self, node: int, now_ns: int) -> None:
        """A node's connection broke."""
        self._left_ns[node] = now_ns

    def left_ns(self, node: int) -> int:
        """When a node that is away left; -1: nobody saw it."""
        return self._left_ns.get(node, -1)

    def wait(self, node: int, until_ns: int) -> None:
        """A node must be back by then, or earlier where that was said before."""
        if until_ns < self._until_ns.get(node, until_ns + 1):
            self._until_ns[node] = until_ns
            heappush(self._due, (until_ns, node))

    def back(self, node: int) -> None:
        """A node has connected."""
        self._left_ns.pop(node, None)
        self._until_ns.pop(node, None)

    def forgive(self, deaf_ns: int) -> None:
        """The controller itself did not listen for this long: nobody could come back."""
        self._until_ns = {node: until + deaf_ns for node, until in self._until_ns.items()}
        self._due = sorted((until, node) for node, until in self._until_ns.items())

    def due(self, now_ns: int) -> list[int]:
        """Nodes whose time is over, each said once."""
        late = []
        while (first := self.next_deadline_ns()) is not None and first <= now_ns:
            _, node = heappop(self._due)
            del self._until_ns[node]
            late.append(node)
        return late

    def next_deadline_ns(self) -> int | None:
        """When the first node's time is over."""
        while self._due:
            until, node = self._due[0]
            if self._until_ns.get(node) == until:
                return until
            heappop(self._due)
        return None
