"""The connection to a server: who answers, and how a command ends where nobody does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

import typer
from msgspec import Struct, structs

from phalanx.cli.output import fail, print_json
from phalanx.cli.tables import plain
from phalanx.control.client.client import Client, ClientError
from phalanx.control.wire.api_types import Done, DrainIn, OrderWhy, Readmit, RefusalCode

if TYPE_CHECKING:
    from phalanx.control.backends.stored_run import StoredRun

REFUSED, UNREACHABLE = 1, 3  # exit codes
# What to type next, by what a server refused.
NEXT: dict[str, str] = {
    "no_such_job": "`phalanx ps --all` lists jobs",
    "no_such_node": "`phalanx nodes` lists nodes",
    "no_such_run": "`phalanx runs ls` lists runs",
    "no_such_question": "`phalanx answer` lists what is open",
    "no_such_alert": "`phalanx alerts ls` lists alerts",
    "no_such_token": "`phalanx token list` lists tokens",
    "no_such_rank": "`phalanx show JOB --ranks` says which rank is where",
    "no_such_pipeline": "`phalanx pipeline show PIPELINE.toml` shows its last run",
    RefusalCode.NO_SUCH_SWEEP: "`phalanx sweep ls` lists sweeps",
    RefusalCode.NOT_RUNNING: "`phalanx why JOB` says what it waits for",
    "not_pending": "`phalanx drain JOB` checkpoints and holds one that runs",
    "not_started": "`phalanx why JOB` says what it waits for",
    "not_connected": "`phalanx nodes NODE` says since when",
    "too_many_requests": "the same command, a little later",
}
S = TypeVar("S", bound=Struct)
T = TypeVar("T")


@contextmanager
def exit_on_server_error(json: bool) -> Iterator[None]:
    """What a server refuses, or that there is none, is told in words and ends the command."""
    try:
        yield
    except ClientError as error:
        hint = NEXT.get(error.code, "")
        shown = {"error": {"code": error.code, "message": str(error)}} if json else None
        text = f"{error}\n  next: {hint}" if hint else str(error)
        fail(text, REFUSED if error.status else UNREACHABLE, shown)


@contextmanager
def connected(server: str, json: bool, state: Path | None = None) -> Iterator[Client]:
    """A client; what goes wrong is told in words and ends the command."""
    with exit_on_server_error(json):
        yield Client(server, state)


def say_away(error: ClientError) -> None:
    """Whoever follows something hears that its server is away, and that nothing need be done."""
    print(plain(f"the server is away, trying again: {error}"), file=sys.stderr, flush=True)


def send_confirmed(made: S, send: Callable[[S], T]) -> T:
    """The answer to a submission; where the policy wants it, the person here is asked first."""
    try:
        return send(made)
    except ClientError as error:
        if error.code != RefusalCode.NEEDS_CONFIRMATION:
            raise
        if not sys.stdin.isatty():
            raise ClientError(
                f"{error}; nobody is here to ask: give --yes", error.status, error.code
            ) from None
        print(plain(str(error)), file=sys.stderr)
    if not typer.confirm("submit it?"):
        print("nothing was submitted", file=sys.stderr)
        raise typer.Exit(1)
    return send(structs.replace(made, confirmed=True))


def stored_run(which: str, json: bool) -> StoredRun | None:
    """What an engine's run left behind, where its folder is meant; None: a number of a server."""
    from phalanx.control.backends.stored_run import find_run, read_run
    from phalanx.control.server.store.interface import StoreError

    if which.isdigit():
        return None
    folder = find_run(which)
    if folder is None:
        rule = (
            f"{which}: no number of a job, and no folder of an engine's run here\n"
            f"  next: {NEXT['no_such_job']}"
        )
        fail(rule, 2, {"error": {"code": "no_such_run", "message": rule}} if json else None)
    try:
        return read_run(folder)
    except (StoreError, OSError) as error:
        fail(error, REFUSED, {"error": {"code": "unreadable", "message": str(error)}})


def order_job_or_node(
    client: Client, what: str, job_verb: str, node_verb: str, order: DrainIn | Readmit
) -> Done:
    """Give an order about a job, which is a number, or a node, which has a name."""
    if what.isdigit():
        reason = OrderWhy(why=order.why) if order.why else None
        return client.post(f"/v1/jobs/{what}/{job_verb}", reason, Done)
    return client.post(f"/v1/nodes/{quote(what, safe='')}/{node_verb}", order, Done)


def print_done(what: str, done: Done, json: bool) -> None:
    """What the server did about a job, a node or a question."""
    if json:
        print_json(done)
    else:
        print(plain(f"{what}: {done.message}"))
