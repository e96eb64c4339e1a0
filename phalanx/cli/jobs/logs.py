"""``phalanx logs``: what a job's ranks print."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import JobNumber, Json, ServerUrl, State
from phalanx.cli.tables import harmless, plain
from phalanx.control.wire.api_types import JobDetail

app = typer.Typer()


@app.command()
def logs(
    job: JobNumber,
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
    """Show what a job's ranks print; followed, until the job has ended."""
    with connected(server, json, state) as client:
        pieces = client.stream(
            f"/v1/jobs/{job}/logs", rank=rank, follow=follow, tail_bytes=tail_kb << 10
        )
        for piece in pieces:
            if json:  # one object a piece
                piece = msgspec.json.encode({"text": piece.decode(errors="replace")}) + b"\n"
            sys.stdout.buffer.write(harmless(piece) if sys.stdout.isatty() else piece)
            sys.stdout.buffer.flush()
        if follow:
            ended = client.get(f"/v1/jobs/{job}", JobDetail).job
            print(plain(f"job {job} is {ended.state}: {ended.why.text}"), file=sys.stderr)
