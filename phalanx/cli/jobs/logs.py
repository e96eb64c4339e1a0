"""``phalanx logs``: what a job's ranks print."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from phalanx.cli.connection import connected, stored_run
from phalanx.cli.options import JobOrRun, Json, ServerUrl, State
from phalanx.cli.output import exit_on
from phalanx.cli.tables import harmless, plain
from phalanx.control.wire.api_types import JobDetail

if TYPE_CHECKING:
    from phalanx.control.backends.stored_run import StoredRun

app = typer.Typer()


@app.command()
def logs(
    job: JobOrRun,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    rank: Annotated[
        int, typer.Option(min=-1, help="One rank; -1: all ranks of the first node.")
    ] = -1,
    tail_kb: Annotated[int, typer.Option(min=0, max=16384, help="KiB from the end.")] = 64,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show what a job's ranks print; followed, until the job has ended.

    Of an engine's run that has ended its folder is read, and no server is needed.
    """
    if (stored := stored_run(job, json)) is not None:
        _print_stored(stored, rank, tail_kb << 10, json)
        return
    with connected(server, json, state) as client:
        pieces = client.stream(
            f"/v1/jobs/{job}/logs", rank=rank, follow=follow, tail_bytes=tail_kb << 10
        )
        for piece in pieces:
            _print(piece, json)
        if follow:
            ended = client.get(f"/v1/jobs/{job}", JobDetail).job
            print(plain(f"job {job} is {ended.state}: {ended.why.text}"), file=sys.stderr)


def _print_stored(run: StoredRun, rank: int, tail_bytes: int, json: bool) -> None:
    from phalanx.control.backends.stored_run import output_of
    from phalanx.control.server.store.interface import StoreError

    with exit_on(StoreError, OSError):
        for piece in output_of(run, rank, tail_bytes):
            _print(piece, json)
    job = run.detail.job
    print(plain(f"{run.folder} is {job.state}: {job.why.text}"), file=sys.stderr)


def _print(piece: bytes, json: bool) -> None:
    if json:  # one object a piece
        piece = msgspec.json.encode({"text": piece.decode(errors="replace")}) + b"\n"
    sys.stdout.buffer.write(harmless(piece) if sys.stdout.isatty() else piece)
    sys.stdout.buffer.flush()
