"""The connection to a server: who answers, and how a command ends where nobody does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.cli.output import fail, print_json
from phalanx.cli.tables import plain
from phalanx.control.client.client import Client, ClientError
from phalanx.control.wire.api_types import Done

if TYPE_CHECKING:
    from phalanx.control.backends.stored_run import StoredRun

REFUSED, UNREACHABLE = 1, 3  # exit codes


@contextmanager
def exit_on_server_error(json: bool) -> Iterator[None]:
    """What a server refuses, or that there is none, is told in words and ends the command."""
    try:
        yield
    except ClientError as error:
        shown = {"error": {"code": error.code, "message": str(error)}} if json else None
        fail(error, REFUSED if error.status else UNREACHABLE, shown)


@contextmanager
def connected(server: str, json: bool, state: Path | None = None) -> Iterator[Client]:
    """A client; what goes wrong is told in words and ends the command."""
    with exit_on_server_error(json):
        yield Client(server, state)


def stored_run(which: str, json: bool) -> StoredRun | None:
    """What an engine's run left behind, where its folder is meant; None: a number of a server."""
    from phalanx.control.backends.stored_run import find_run, read_run
    from phalanx.control.server.store.interface import StoreError

    if which.isdigit():
        return None
    folder = find_run(which)
    if folder is None:
        rule = f"{which}: no number of a job, and no folder of an engine's run here"
        fail(rule, 2, {"error": {"code": "no_such_run", "message": rule}} if json else None)
    try:
        return read_run(folder)
    except (StoreError, OSError) as error:
        fail(error, REFUSED, {"error": {"code": "unreadable", "message": str(error)}})


def print_done(what: str, done: Done, json: bool) -> None:
    """What the server did about a job, a node or a question."""
    if json:
        print_json(done)
    else:
        print(plain(f"{what}: {done.message}"))
