"""Where a reader stands in followed logs: another connection goes on there, of any server."""

from __future__ import annotations

from typing import NamedTuple

PLACES = r"^((-1|[0-9]{1,7})(\.[0-9]{1,16}){3}(_|$))*$"  # the text of a cursor
MOST_PLACES = 512  # those that were read last


class LogPlace(NamedTuple):
    """A place in the file of one worker, of the log of a rank (-1: of all of the first node)."""

    rank: int
    node: int
    worker: int
    behind: int


class LogPiece(NamedTuple):
    """Some of a log; ``place``: behind it in its file, None: these are the server's own words."""

    data: bytes
    place: LogPlace | None = None

    def before(self, data: bytes, held_bytes: int) -> LogPiece:
        """Other lines, up to the same place but for so many bytes that are still held back."""
        place = self.place and self.place._replace(behind=max(0, self.place.behind - held_bytes))
        return LogPiece(data, place)


class LogCursor:
    """All places up to which somebody has read, from a text that fits ``PLACES``."""

    def __init__(self, text: str = "") -> None:
        self._behind: dict[tuple[int, int, int], int] = {}
        for each in filter(None, text.split("_")):
            self.note(LogPlace(*(int(number) for number in each.split("."))))

    def note(self, place: LogPlace) -> None:
        """Somebody has read so far."""
        log = place.rank, place.node, place.worker
        self._behind.pop(log, None)  # what was read last stands last
        self._behind[log] = place.behind
        while len(self._behind) > MOST_PLACES:
            del self._behind[next(iter(self._behind))]

    def of_rank(self, rank: int) -> dict[int, dict[int, int]]:
        """Places by node and worker."""
        places: dict[int, dict[int, int]] = {}
        for (of, node, worker), behind in self._behind.items():
            if of == rank:
                places.setdefault(node, {})[worker] = behind
        return places

    def __str__(self) -> str:
        return "_".join(
            f"{rank}.{node}.{worker}.{behind}"
            for (rank, node, worker), behind in self._behind.items()
        )
