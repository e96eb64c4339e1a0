"""Who held GPUs, day by day: GPU time by team, user and project, in integers that sum exactly."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.units import HOUR_NS

DAY_NS = 24 * HOUR_NS
DAYS_KEPT = 800  # of each owner: two years and some weeks


class UsageOwner(NamedTuple):
    """Whose GPU time it is."""

    team: str
    user: str = ""
    project: str = ""


class UsageRow(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one owner held on one day (of UTC, since 1970)."""

    day: int
    team: str
    user: str = ""
    project: str = ""
    gpu_ns: int

    @property
    def owner(self) -> UsageOwner:
        """Whose it is."""
        return UsageOwner(self.team, self.user, self.project)


def owner_of(spec: JobSpec) -> UsageOwner:
    """Whose GPU time a job's is."""
    return UsageOwner(spec.team, spec.user, spec.project)


class Usage:
    """GPU time by day and owner."""

    def __init__(self, rows: list[UsageRow] | None = None) -> None:
        self._days: dict[int, dict[UsageOwner, int]] = {}
        for row in rows or ():
            self._days.setdefault(row.day, {})[row.owner] = row.gpu_ns

    def add(self, owner: UsageOwner, from_ns: int, to_ns: int, gpus: int) -> None:
        """Somebody held so many GPUs for a time, which may be days."""
        while gpus and from_ns < to_ns:
            day = from_ns // DAY_NS
            until_ns = min(to_ns, (day + 1) * DAY_NS)
            held = self._days.setdefault(day, {})
            held[owner] = held.get(owner, 0) + gpus * (until_ns - from_ns)
            from_ns = until_ns
        while len(self._days) > DAYS_KEPT:
            del self._days[min(self._days)]

    def rows(self) -> list[UsageRow]:
        """Everything, the oldest day first."""
        return [
            UsageRow(
                day=day,
                team=owner.team,
                user=owner.user,
                project=owner.project,
                gpu_ns=gpu_ns,
            )
            for day in sorted(self._days)
            for owner, gpu_ns in sorted(self._days[day].items())
        ]
