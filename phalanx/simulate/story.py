"""What happened, for a person: the last events and commands, kept in a ring."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import Event, Progress, Tick

KEPT = 400
SHOWN_FIELDS = 160  # characters of an event


class Story:
    """A ring of events. ``loud``: keep everything (a replay)."""

    def __init__(self, loud: bool = False) -> None:
        self.entries: deque[tuple[Event | str, tuple[Command, ...], int]] = deque(
            maxlen=None if loud else KEPT
        )
        self.loud = loud

    def write(self, event: Event, commands: list[Command]) -> None:
        """An event and what the core ordered."""
        self.entries.append((event, tuple(commands), event.time_ns))

    def say(self, time_ns: int, words: str) -> None:
        """Something that happened in the world."""
        if self.loud:
            self.entries.append((words, (), time_ns))

    def around(self, time_ns: int, before: int = 40, after: int = 10) -> list[str]:
        """Lines around a moment."""
        entries = list(self.entries)
        last = max((i for i, entry in enumerate(entries) if entry[2] <= time_ns), default=0)
        return [
            line
            for entry in entries[max(0, last - before) : last + after]
            for line in lines(*entry)
        ]

    def lines(self) -> list[str]:
        """Every line that is kept, idle ticks and progress left out."""
        kept = (entry for entry in self.entries if not _dull(entry[0], entry[1]))
        return [line for entry in kept for line in lines(*entry)]


def _dull(what: Event | str, commands: tuple[Command, ...]) -> bool:
    return isinstance(what, Event) and isinstance(what.body, Tick | Progress) and not commands


def lines(what: Event | str, commands: Iterable[Command], time_ns: int) -> list[str]:
    """An entry as text."""
    when = clock(time_ns)
    if isinstance(what, str):
        return [f"{when}    {what}"]
    shown = [f"{when}  {what.sequence:>6} {_shown(what.body)}"]
    for command in commands:
        body = command.body
        target = f" to {_nodes(command.target)}" if command.target else ""
        name = type(body).__name__
        shown.append(f"{'':>15}    -> {name}{_about(body)}{target}: {body.reason}")
    return shown


def clock(time_ns: int) -> str:
    """Virtual time as days and hours: ``12d 03:04:05.6``."""
    tenths, _ = divmod(time_ns, 10**8)
    seconds, tenth = divmod(tenths, 10)
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    day, hour = divmod(hours, 24)
    return f"{day:>3}d {hour:02}:{minute:02}:{second:02}.{tenth}"


def _shown(body: object) -> str:
    text = str(body)
    return text if len(text) <= SHOWN_FIELDS else text[: SHOWN_FIELDS - 1] + "…"


def _about(body: object) -> str:
    clauses = []
    for name, short in (("job", "job"), ("generation", "g"), ("step", "step"), ("source", "from")):
        value = getattr(body, name, None)
        if value not in (None, 0, ""):
            clauses.append(f"{short} {value}")
    return f"({', '.join(clauses)})" if clauses else ""


def _nodes(nodes: tuple[int, ...]) -> str:
    return ", ".join(map(str, nodes[:6])) + (
        f" and {len(nodes) - 6} more" if len(nodes) > 6 else ""
    )
