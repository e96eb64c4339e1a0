"""``phalanx events``: the log, and what was decided."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from typing import Annotated, Any

import msgspec
import typer

from phalanx.cli.completion import job_numbers
from phalanx.cli.connection import connected, say_away
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import exit_on_config_error, print_json
from phalanx.cli.queue.times import past_ns
from phalanx.cli.tables import counted, moment, plain
from phalanx.control.client.client import Client, ClientError
from phalanx.control.client.followed_log import BackOff, job_now
from phalanx.control.wire.api_types import EventList, EventOut, JobOut

app = typer.Typer()


@app.command()
def events(
    job: Annotated[
        int, typer.Option(min=0, help="Only about this job.", autocompletion=job_numbers)
    ] = 0,
    last: Annotated[int, typer.Option("--last", "-n", min=1, max=1000, help="How many.")] = 50,
    since: Annotated[str, typer.Option(help="From a time on: 90m ago, 08:00, a date.")] = "",
    until: Annotated[str, typer.Option(help="Up to a time.")] = "",
    decided: Annotated[bool, typer.Option(help="Only events that led to a decision.")] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Follow new events; of one job, until it has ended."),
    ] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show the event log: what happened, and what was decided about it."""
    now = datetime.now().astimezone()
    with exit_on_config_error(json):
        since_ns = past_ns("--since", since, now) if since else 0
        until_ns = past_ns("--until", until, now) if until else None
    with connected(server, json, state) as client:
        asked = {"job": job, "decided": decided}
        page = client.get("/v1/events", EventList, after=-1, limit=last, until_ns=until_ns, **asked)
        page.events[:] = [each for each in page.events if each.time_ns >= since_ns]
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
            known, page = _more(client, page.next_after, asked)
            if known is not None and known.ended_ns and not page.events:
                print(plain(f"job {job} is {known.state}: {known.why.text}"), file=sys.stderr)
                return
            time.sleep(0.0 if page.events else 1.0)


def _more(client: Client, after: int, asked: dict[str, Any]) -> tuple[JobOut | None, EventList]:
    """The job, and what came after an event; a server that is away for a while is waited for."""
    back_off = BackOff(say_away)
    while True:
        try:
            job = asked["job"]
            known = job_now(client, job) if job else None
            return known, client.get("/v1/events", EventList, after=after, **asked)
        except ClientError as error:
            back_off.wait(error)


def print_event(event: EventOut, json: bool) -> None:
    """An event and what was decided about it, a line each."""
    if json:
        print(msgspec.json.encode(event).decode(), flush=True)
        return
    shown = {key: value for key, value in event.body.items() if isinstance(value, int | str)}
    facts = " ".join(f"{key}={value}" for key, value in shown.items())
    line = plain(f"{event.sequence:>8} {moment(event.time_ns)} {event.kind} {facts}")
    print(line.rstrip(), flush=True)  # whoever follows through a pipe waits for it
    for command in event.commands:
        where = f" to {counted(command.nodes, 'node')}" if command.nodes else ""
        print(plain(f"{'':>8} → {command.kind}{where}: {command.why.text}"), flush=True)
