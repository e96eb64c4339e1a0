"""``phalanx top``: the fleet at a glance in a terminal, from 80 columns by 24 lines on."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from phalanx.cli.cluster.top_panes import NAMES, FleetLook, panes
from phalanx.cli.connection import connected
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.control.client.client import Client, ClientError
from phalanx.control.client.followed_log import AWAY
from phalanx.control.server.api.page import QueueOut
from phalanx.control.server.api.runs import FindingsOut
from phalanx.control.wire.api_types import JobList, LedgerOut, Status

app = typer.Typer()

SECONDS = 1.0  # between two looks
QUEUE_SECONDS = 5.0  # estimating starts takes the server longer
FINDINGS = 30
ORDER = ("running", "forming", "draining", "pending", "failed", "done", "cancelled")
UNSEEN_LINES = 40  # where nobody's terminal says how many it has
ALL, LEAVE = ("0", "\x1b"), ("q", "Q", "\x03", "\x04")


@app.command()
def top(
    once: Annotated[bool, typer.Option(help="Print once and end.")] = False,
    pane: Annotated[str, typer.Option(metavar="|".join(NAMES), help="Only one of its panes.")] = "",
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Show fleet, jobs, queue and incidents live in the terminal.

    Keys: 1 to 4 enlarge a pane, 0 shows all of them, q leaves.
    """
    if pane and pane not in NAMES:
        raise typer.BadParameter(f"{pane}: use {', '.join(NAMES)}", param_hint="--pane")
    console = Console()
    with connected(server, json, state) as client:
        if json:
            print_json(client.get("/v1/status", Status))
        elif once:
            if not console.is_terminal:
                console = Console(width=100)
            console.print(_shown(look(client, None), console, pane))
        else:
            _follow(client, console, pane)


def look(client: Client, before: FleetLook | None) -> FleetLook:
    """What there is to show; the queue only now and then."""
    now = time.monotonic()
    queue, asked = (before.queue, before.queue_asked) if before is not None else (None, 0.0)
    if queue is None or now - asked >= QUEUE_SECONDS:
        queue, asked = client.get("/v1/queue", QueueOut), now
    jobs = client.get("/v1/jobs", JobList, limit=1000, state="all", newest=True).jobs
    jobs.sort(key=lambda job: (ORDER.index(job.state), -job.id))
    return FleetLook(
        status=client.get("/v1/status", Status),
        jobs=[job for job in jobs if job.state != "pending"],
        queue=queue,
        queue_asked=asked,
        ledger=client.get("/v1/ledger", LedgerOut),
        findings=client.get("/v1/findings", FindingsOut, limit=FINDINGS).findings[::-1],
    )


def _shown(seen: FleetLook, console: Console, pane: str) -> Group:
    lines = console.height if console.is_terminal else UNSEEN_LINES
    return panes(seen, console.width, lines - 1, pane)


def _follow(client: Client, console: Console, pane: str) -> None:
    seen = look(client, None)
    shown = _shown(seen, console, pane)
    with _keys() as pressed, Live(shown, console=console, auto_refresh=False, screen=True) as live:
        due = time.monotonic() + SECONDS
        while True:
            try:
                key = pressed(max(0.0, due - time.monotonic()))
                if key in LEAVE:
                    return
                if key in ALL or (key.isdigit() and int(key) <= len(NAMES)):
                    wanted = "" if key in ALL else NAMES[int(key) - 1]
                    pane = "" if wanted == pane else wanted
                if time.monotonic() >= due:
                    due = time.monotonic() + SECONDS
                    seen = look(client, seen)
                shown = _shown(seen, console, pane)
                live.update(shown, refresh=True)
            except ClientError as error:
                if error.status not in AWAY:
                    raise
                away = Text(f"the server is away, trying again: {error}", style="bold red")
                live.update(Group(away, shown), refresh=True)
            except KeyboardInterrupt:
                return


@contextmanager
def _keys() -> Iterator[_Pressed]:
    """Keys as they are pressed; where nobody types, only time passes."""
    if not sys.stdin.isatty():
        yield _Pressed(-1)
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield _Pressed(file)
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


class _Pressed:
    def __init__(self, file: int) -> None:
        self._file = file

    def __call__(self, seconds: float) -> str:
        """The next key, or "" after so long."""
        if self._file < 0:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._file], [], [], seconds)
        if not ready:
            return ""
        return os.read(self._file, 1).decode(errors="replace") or LEAVE[0]  # nobody types any more
