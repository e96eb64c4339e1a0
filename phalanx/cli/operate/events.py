"""``phalanx events``: the log, and what was decided."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import plain, when
from phalanx.control.wire.api_types import EventList, EventOut

app = typer.Typer()


@app.command()
def events(
    job: Annotated[int, typer.Option(min=0, help="Only about this job.")] = 0,
    last: Annotated[int, typer.Option("--last", "-n", min=1, max=1000, help="How many.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they come.")] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Read the log: what happened, and what was decided about it."""
    with connected(server, json, state) as client:
        page = client.get("/v1/events", EventList, after=-1, limit=last, job=job)
        if job and not page.events:
            client.get(f"/v1/jobs/{job}", dict)  # says so where there is none
        if json and not follow:
            print_json(page)
            return
        while True:
            for event in page.events:
                print_event(event, json)
            if not follow:
                return
            time.sleep(1.0)
            page = client.get("/v1/events", EventList, after=page.next_after, job=job)


def print_event(event: EventOut, json: bool) -> None:
    """An event and what was decided about it, a line each."""
    if json:
        print(msgspec.json.encode(event).decode(), flush=True)
        return
    shown = {key: value for key, value in event.body.items() if isinstance(value, int | str)}
    facts = " ".join(f"{key}={value}" for key, value in shown.items())
    print(plain(f"{event.sequence:>8} {when(event.time_ns)} {event.kind} {facts}").rstrip())
    for command in event.commands:
        where = f" to {command.nodes} nodes" if command.nodes else ""
        print(plain(f"{'':>8} → {command.kind}{where}: {command.why.text}"), flush=True)
