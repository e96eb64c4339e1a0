"""Tables and texts for people: nothing that users wrote steers a terminal."""

from __future__ import annotations

import re
from datetime import datetime

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.control.host.plain_text import one_line


def table(*headings: str) -> Table:
    """A table without lines."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        made.add_column(heading, overflow="fold")
    return made


def plain(text: object) -> str:
    """What users and jobs wrote, without characters that would steer a terminal."""
    return one_line(str(text))


_STEERING = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


def harmless(log: bytes) -> bytes:
    """A piece of a log without colours and whatever else would steer a terminal."""
    return _STEERING.sub(b"", log)


def add_row(to: Table, *cells: object) -> None:
    """A row of plain text: what users wrote is never read as markup."""
    to.add_row(*(escape(plain(cell)) for cell in cells))


def print_table(made: Table) -> None:
    """Prints a table; in a pipe, without folding lines."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(made)


def moment(time_ns: int) -> str:
    """A time for a person: a recording begins at 0."""
    return datetime.fromtimestamp(time_ns / 1e9).strftime("%m-%d %H:%M:%S")


def when(time_ns: int) -> str:
    """A time that may not have come, for a person."""
    return moment(time_ns) if time_ns else ""


def counted(number: int, noun: str) -> str:
    """So many of something: ``1 node``, ``2 nodes``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def span(seconds: float) -> str:
    """A length of time for a person."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.0f}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 2 * 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"
