"""Where the fleet's time went, interval by interval: the ledger read at regular times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cluster.ledger.report import fleet_share
from phalanx.cluster.policy import DAY_NS

if TYPE_CHECKING:
    from phalanx.simulate.world.world import World


class Timeline:
    """Shares of every bucket in each interval."""

    def __init__(self, world: World, bins: int) -> None:
        self.world = world
        self.days: list[float] = []  # ends of the intervals
        self.shares: list[dict[str, float]] = []
        self._last: dict[str, int] = {}
        self._every = world.end_ns // bins if bins else 0
        if self._every:
            world.agenda.at(self._every, self._look)

    def _look(self) -> None:
        self.world.gangs.report_all()
        self._take()
        if self.world.agenda.now_ns + self._every <= self.world.end_ns:
            self.world.agenda.after(self._every, self._look)

    def close(self) -> None:
        """Takes in what is left at the end."""
        if self._every and self.days and self.days[-1] * DAY_NS < self.world.end_ns - 1:
            self._take()

    def _take(self) -> None:
        now = dict(fleet_share(self.world.core.ledger, self.world.view.policy.price).buckets)
        # Steps that are thrown away leave their bucket again, and may be of earlier intervals.
        passed = {name: max(0, now[name] - self._last.get(name, 0)) for name in now}
        total = max(1, sum(passed.values()))
        self.days.append(self.world.agenda.now_ns / DAY_NS)
        self.shares.append({name: amount / total for name, amount in passed.items()})
        self._last = now
