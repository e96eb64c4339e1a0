"""Faults of the server's own parts: set aside, counted and told, so that one cannot end the rest.

What follows the log (runs, pages, spans, agents' messages) hears of events that are stored already.
Were a fault there passed on, the same event would end the server at every start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from phalanx.observe.tracker.findings import RunFinding, suggestion

logger = logging.getLogger("phalanx.server")

QUIET_SECONDS = 60.0  # between two alarms of one kind
AGAIN_SECONDS = 5.0  # before a task that failed is begun anew
KIND = "server_fault"


class Alarms:
    """Counts every fault by the part that raised it; tells of each kind at most once a minute."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.counts: dict[str, int] = {}  # by part
        self.told: Callable[[RunFinding], None] = lambda _: None
        self._now = now
        self._last: dict[tuple[str, str], float] = {}

    def raised(self, component: str, error: BaseException, about: str = "") -> None:
        """A part failed, and what it was doing is set aside. Never raises."""
        self.counts[component] = self.counts.get(component, 0) + 1
        fault, now = (component, type(error).__name__), self._now()
        last = self._last.get(fault)
        if last is not None and now - last < QUIET_SECONDS:
            return
        self._last[fault] = now
        what = (
            f"{component} failed{f' on {about}' if about else ''}: {fault[1]}: {str(error)[:200]}"
        )
        logger.error("%s; it is set aside", what, exc_info=error)
        self.say(component, f"{what}; it was set aside", self.counts[component])

    def say(self, component: str, sentence: str, count: int = 1) -> None:
        """A finding for people about a part of the server."""
        finding = RunFinding(
            time=time.time(),
            kind=KIND,
            evidence={"part": component, "count": count},
            sentence=sentence,
            suggestion=suggestion(KIND),
        )
        try:
            self.told(finding)
        except Exception:  # whoever tells people may be the part that fails
            logger.exception("an alarm cannot be told")

    async def kept(self, component: str, work: Callable[[], Awaitable[None]]) -> None:
        """Does some work for as long as the server leads, also where it fails now and then."""
        while True:
            try:
                await work()
                return
            except Exception as error:
                self.raised(component, error)
            await asyncio.sleep(AGAIN_SECONDS)
