"""What the commands that speak to a server share."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.cli.options import print_json
from phalanx.control.client.client import Client, ClientError
from phalanx.control.client.plain_text import one_line

ServerUrl = Annotated[
    str,
    typer.Option(
        "--server",
        metavar="URL",
        help="The server (default: PHALANX_SERVER, or the one of this machine).",
    ),
]
State = Annotated[
    Path | None,
    typer.Option(help="State folder of a server here (default: ~/.phalanx/server)."),
]

REFUSED, UNREACHABLE = 1, 3  # exit codes


@contextmanager
def refusals_in_words(json: bool) -> Iterator[None]:
    """What a server refuses, or that there is none, is told in words and ends the command."""
    try:
        yield
    except ClientError as error:
        if json:
            print_json({"error": {"code": error.code, "message": str(error)}})
        else:
            print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(REFUSED if error.status else UNREACHABLE) from None


@contextmanager
def connected(server: str, json: bool, state: Path | None = None) -> Iterator[Client]:
    """A client; what goes wrong is told in words and ends the command."""
    with refusals_in_words(json):
        yield Client(server, state)


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


def show(made: Table) -> None:
    """Prints a table; in a pipe, without folding lines."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(made)


def when(time_ns: int) -> str:
    """A time for a person."""
    return datetime.fromtimestamp(time_ns / 1e9).strftime("%m-%d %H:%M:%S") if time_ns else ""


def span(seconds: float) -> str:
    """A length of time for a person."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.0f}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
