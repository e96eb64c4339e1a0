"""When people are there: some hours of a day, on all days or from Monday to Friday.

Time 0 is the midnight before a Monday.
"""

from __future__ import annotations

from phalanx.cluster.policy import DAY_NS
from phalanx.simulate.scenario.scenario import PeoplePart

HOUR_NS = DAY_NS // 24
WEEK_DAYS, WORK_DAYS = 7, 5


class WorkingHours:
    """The hours of a scenario's people."""

    def __init__(self, settings: PeoplePart) -> None:
        self._open_ns = settings.first_hour * HOUR_NS
        self._close_ns = settings.last_hour * HOUR_NS
        self._days = WEEK_DAYS if settings.weekends else WORK_DAYS
        self.share = (self._close_ns - self._open_ns) * self._days / (DAY_NS * WEEK_DAYS)

    def next_ns(self, at_ns: int) -> int:
        """The first time from then on at which somebody is there."""
        day, hour_ns = divmod(at_ns, DAY_NS)
        if hour_ns >= self._close_ns:
            day, hour_ns = day + 1, 0
        if day % WEEK_DAYS >= self._days:
            day, hour_ns = day - day % WEEK_DAYS + WEEK_DAYS, 0
        return day * DAY_NS + max(hour_ns, self._open_ns)

    def done_ns(self, at_ns: int, work_ns: int) -> int:
        """When work is done that begins then and goes on only while somebody is there."""
        if self.share == 1.0:
            return at_ns + work_ns
        a_week_ns = (self._close_ns - self._open_ns) * self._days
        weeks, left_ns = divmod(work_ns, a_week_ns)
        at_ns = self.next_ns(at_ns + weeks * WEEK_DAYS * DAY_NS)
        while True:
            today_ns = self._close_ns - at_ns % DAY_NS
            if left_ns <= today_ns:
                return at_ns + left_ns
            left_ns -= today_ns
            at_ns = self.next_ns(at_ns + today_ns)
