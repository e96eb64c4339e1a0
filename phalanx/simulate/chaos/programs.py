"""Programs on a simulated node: their processes outlive what the core knows, but not their lease.

A program hears nothing of generations. It ends when it is done, when it dies, when its node is told
to end it, or when the node's lease is over; two processes of one rank must never run at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.simulate.chaos.workers import SECOND, NodeWorkers

if TYPE_CHECKING:
    from phalanx.simulate.chaos.world import ChaosWorld

MOST_END = 8 * SECOND // 10  # a killed process is gone by then, before its node can join again


class ProgramProcesses:
    """Those of one node. ``lapsed`` is called when the lease has ended a job's."""

    def __init__(self, world: ChaosWorld, node: int, lapsed: Callable[[int], None]) -> None:
        self._world, self._node, self._lapsed = world, node, lapsed
        self.running: dict[int, NodeWorkers] = {}  # by job
        self._until_ns = 0

    @property
    def _now_ns(self) -> int:
        return self._world.agenda.now_ns

    def counted_on(self, asked_ns: int) -> None:
        """The server answered what was asked at this time, or did not run then."""
        until = asked_ns + self._world.program_lease_ns
        if until > self._until_ns and until > self._now_ns:
            self._until_ns = until
            self._world.agenda.at(until, self._expire, until)

    @property
    def may_start(self) -> bool:
        """Whether the server is known to count on this node, for a while yet."""
        return self._now_ns < self._until_ns - self._world.program_lease_ns // 2

    def start(self, worker: NodeWorkers) -> None:
        """The ranks of a program start here: nowhere else may one of them run."""
        for host in self._world.hosts:
            other = host.programs.running.get(worker.job)
            if other is not None and any(rank in other.ranks for rank in worker.ranks):
                violation = (
                    f"job {worker.job}: generation {worker.generation} starts on node {self._node},"
                    f" and generation {other.generation} still runs on node {host.node}"
                )
                self._world.complain("two_writers", violation)
        self.running[worker.job] = worker

    def end(self, job: int, then: Callable[[], None] = lambda: None) -> None:
        """A job's processes are killed; ``then``: they are gone."""
        known = self.running.get(job)
        delay = self._world.ends.below(MOST_END) if known is not None else 0
        self._world.agenda.after(delay, self._ended, job, known, then)

    def _ended(self, job: int, known: NodeWorkers | None, then: Callable[[], None]) -> None:
        if known is not None and self.running.get(job) is known:
            del self.running[job]
        then()

    def left(self, worker: NodeWorkers) -> None:
        """They ended by themselves."""
        if self.running.get(worker.job) is worker:
            del self.running[worker.job]

    def power_off(self) -> None:
        """Nothing runs, and nothing is known of a lease."""
        self.running, self._until_ns = {}, 0

    def _expire(self, until_ns: int) -> None:
        if until_ns == self._until_ns:
            for job in list(self.running):
                del self.running[job]
                self._lapsed(job)
