"""``phalanx steps``: every rank's own records, from the nodes that run a job."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import JobNumber, Json, ServerUrl, State
from phalanx.cli.tables import add_row, print_table, table

app = typer.Typer()

PARTS = (
    "own",
    "host",
    "launch",
    "data",
    "verification",
    "forward",
    "backward",
    "optimizer",
    "snapshot",
    "peer_wait",
)


@app.command()
def steps(
    job: JobNumber,
    window: Annotated[
        str, typer.Option("--steps", metavar="FIRST:LAST", help="Default: the newest 20.")
    ] = "",
    rank: Annotated[int, typer.Option(min=-1, help="One rank; -1: all.")] = -1,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show what every rank recorded of some steps: what the nodes still hold (about 2,000)."""
    first, last = _window(window)
    with connected(server, json, state) as client:
        pieces = client.stream(f"/v1/jobs/{job}/records", first=first, last=last, rank=rank)
        data = b"".join(pieces)
    if json:  # one object a line, as the nodes gave them
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    records = [msgspec.json.decode(line) for line in data.splitlines()]
    made = table("STEP", "RANK", "SECONDS", *(name.upper() for name in PARTS), "LOSS")
    step_records = [each for each in records if "step" in each]
    for each in sorted(step_records, key=lambda each: (each["step"], each["rank"])):
        parts = [_seconds(each["parts"].get(name)) for name in PARTS]
        loss = "" if each["loss"] is None else f"{each['loss']:.4f}"
        add_row(made, each["step"], each["rank"], _seconds(each["step_seconds"]), *parts, loss)
    if step_records:
        print_table(made)
        print("forward and backward hold the communication within them")
    else:
        print("no node holds these steps any more (or none was made yet)")
    for each in records:
        if "problem" in each:
            print(f"node {each['node']}: {each['problem']}", file=sys.stderr)


def _window(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        window = (int(first or 0), int(last or 0) if colon else int(first or 0))
    except ValueError:
        window = (-1, -1)
    if min(window) < 0 or (window[1] and window[0] > window[1]):
        raise typer.BadParameter("such as 120:140, or 120", param_hint="--steps")
    return window


def _seconds(value: Any) -> str:
    return "" if value is None else f"{value:.4f}"
