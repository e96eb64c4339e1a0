"""``phalanx logs``: what a job's ranks print."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from phalanx.cli.connection import connected, say_away, stored_run
from phalanx.cli.options import JobOrRun, Json, ServerUrl, State
from phalanx.cli.output import exit_on, exit_on_config_error
from phalanx.cli.queue.times import PAST_HINT, past_ns
from phalanx.cli.tables import harmless, plain
from phalanx.control.client.followed_log import follow_log, job_now

if TYPE_CHECKING:
    from phalanx.control.backends.stored_run import StoredRun

app = typer.Typer()
USUAL_KB, MOST_KB = 64, 16384


@app.command()
def logs(
    job: JobOrRun,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the job has ended.")
    ] = False,
    rank: Annotated[
        int, typer.Option(min=-1, help="One rank; -1: all ranks of the first node.")
    ] = -1,
    ranks: Annotated[
        str, typer.Option(metavar="0,4-7", help="Several: each line begins with its rank.")
    ] = "",
    tail_kb: Annotated[
        int | None,
        typer.Option(
            min=0, max=MOST_KB, help=f"KiB from the end; {USUAL_KB}, or all that is searched."
        ),
    ] = None,
    grep: Annotated[str, typer.Option(help="Only lines with this (a regular expression).")] = "",
    since: Annotated[str, typer.Option(help=f"Only what was printed since, {PAST_HINT}.")] = "",
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show the ranks' stacks from the last hang instead.")
    ] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show what a job's ranks print; followed, until the job has ended.

    An engine's run that has ended is read from its folder; no server is needed.
    """
    wanted = _pattern(grep)
    with exit_on_config_error(json):
        since_ns = past_ns("--since", since, datetime.now().astimezone()) if since else 0
    if tail_kb is None:
        tail_kb = MOST_KB if grep or since else USUAL_KB
    if (stored := stored_run(job, json)) is not None:
        _print_stored(stored, rank, tail_kb << 10, since_ns / 1e9, wanted, json)
        return
    ago = max(0.001, time.time() - since_ns / 1e9) if since else 0.0
    with connected(server, json, state) as client:
        if stacks:
            for piece in client.stream(f"/v1/jobs/{job}/stacks", rank=rank):
                _print(piece, json)
            return
        asked: dict[str, object] = {"ranks": ranks} if ranks else {"rank": rank}
        asked |= {"tail_bytes": tail_kb << 10, "since_seconds": ago}
        if follow:
            job_now(client, int(job))  # a server that was never there is not waited for
            pieces = follow_log(client, int(job), say_away, **asked)
        else:
            pieces = client.stream(f"/v1/jobs/{job}/logs", **asked)
        for piece in matching(pieces, wanted):
            _print(piece, json)
        if follow:
            ended = job_now(client, int(job))
            print(plain(f"job {job} is {ended.state}: {ended.why.text}"), file=sys.stderr)


def _pattern(grep: str) -> re.Pattern[bytes] | None:
    try:
        return re.compile(grep.encode()) if grep else None
    except re.error as error:
        raise typer.BadParameter(f"{grep!r}: {error}", param_hint="--grep") from None


def matching(pieces: Iterable[bytes], wanted: re.Pattern[bytes] | None) -> Iterator[bytes]:
    """Lines that match, whole, however a log is cut into pieces; all of it where none is wanted."""
    if wanted is None:
        yield from pieces
        return
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in lines if wanted.search(line))
    if rest and wanted.search(rest):
        yield rest + b"\n"


def _print_stored(
    run: StoredRun,
    rank: int,
    tail_bytes: int,
    since: float,
    wanted: re.Pattern[bytes] | None,
    json: bool,
) -> None:
    from phalanx.control.backends.stored_run import output_of
    from phalanx.control.server.store.interface import StoreError

    with exit_on(StoreError, OSError):
        for piece in matching(output_of(run, rank, tail_bytes, since), wanted):
            _print(piece, json)
    job = run.detail.job
    print(plain(f"{run.folder} is {job.state}: {job.why.text}"), file=sys.stderr)


def _print(piece: bytes, json: bool) -> None:
    if json:  # one object a piece
        piece = msgspec.json.encode({"text": piece.decode(errors="replace")}) + b"\n"
    sys.stdout.buffer.write(harmless(piece) if sys.stdout.isatty() else piece)
    sys.stdout.buffer.flush()
