"""The engine while one of its allocations runs, and how often it is asked."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

SITE_SECONDS = 5.0  # between two questions to an engine that answers at once
LONGEST_SECONDS = 300.0  # to one that does not answer
QUIET_SHARE = 20  # times as long as an answer took: at most a twentieth of an engine's time

log = logging.getLogger("phalanx.lead")


class Site(Protocol):
    """An engine while one of its allocations runs; asked from time to time."""

    def nodes(self) -> tuple[str, ...]:
        """The nodes of the allocation, as their agents call themselves."""
        ...

    def unwanted(self) -> dict[str, str]:
        """Nodes that somebody wants empty (drained, cordoned), and the reason given."""
        ...

    def over(self) -> bool:
        """Whether the engine ends the allocation now (cancelled): nothing will be waited for."""
        ...


class Nowhere:
    """Before the engine has placed anything."""

    def nodes(self) -> tuple[str, ...]:
        return ()

    def unwanted(self) -> dict[str, str]:
        return {}

    def over(self) -> bool:
        return False


class SiteQuestions:
    """Asks a site now and then: more seldom where answers are slow, or do not come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next = clock, 0.0
        self.pause = SITE_SECONDS

    def unwanted(self, site: Site) -> dict[str, str] | None:
        """What the site says, where it is time to ask and it answers."""
        began = self._clock()
        if began < self._next:
            return None
        try:
            answer = site.unwanted()
        except Exception as error:  # an engine that does not answer is no reason to stop
            self.pause = min(2 * self.pause, LONGEST_SECONDS)
            log.warning("%s; the engine is asked again in %.0f s", error, self.pause)
            answer = None
        else:
            took = self._clock() - began
            self.pause = min(max(SITE_SECONDS, QUIET_SHARE * took), LONGEST_SECONDS)
        self._next = self._clock() + self.pause
        return answer
