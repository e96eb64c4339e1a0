"""When a job starts, or why nobody can say."""

from __future__ import annotations

from enum import Enum, auto

from msgspec import Struct

from phalanx.cluster.reasons import Reason


class Unknown(Enum):
    """What keeps one from saying when a job starts."""

    NEVER = auto()  # it cannot start as things are
    HELD = auto()  # by a person
    NO_NODES = auto()  # nothing that ends would make room for it
    RUNS_ON = auto()  # what it waits for has no end that is known
    OTHERS_RUN_ON = auto()  # so it is with others; what the job waits for is known all the same


class UnknownStart(Struct, frozen=True):
    """Nobody can say when a job starts: the job that is to blame, and why."""

    job: int
    because: Unknown
    why: Reason


When = int | UnknownStart


def latest(times: list[When]) -> When:
    """The last of some times; whoever is to blame, where nobody can say."""
    times_ns: list[int] = []
    for at in times:
        if isinstance(at, UnknownStart):
            return at
        times_ns.append(at)
    return max(times_ns)
