"""``phalanx top``: the fleet at a glance in a terminal, from 80 columns by 24 lines on."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from phalanx.cli.connection import connected
from phalanx.cli.jobs.ps import steps_of
from phalanx.cli.options import Json, ServerUrl, State
from phalanx.cli.output import print_json
from phalanx.cli.tables import plain, span, when
from phalanx.cluster.jobs.job import HOUR_NS
from phalanx.control.client.client import Client, ClientError
from phalanx.control.server.api.runs import FindingsOut
from phalanx.control.wire.api_types import (
    JobList,
    JobOut,
    LedgerOut,
    NoticeOut,
    QuestionOut,
    Status,
)
from phalanx.observe.tracker.findings import RunFinding

app = typer.Typer()

SECONDS = 1.0  # between two looks
FINDINGS = 3  # shown, the newest first
MARKS = {
    "running": ("●", "green"),
    "healthy": ("●", "green"),
    "done": ("✓", "green"),
    "forming": ("◐", "magenta"),
    "pending": ("○", "dim"),
    "spare": ("◇", "magenta"),
    "draining": ("▽", "yellow"),
    "suspect": ("▲", "yellow"),
    "quarantined": ("■", "red"),
    "dead": ("✕", "red"),
    "failed": ("✕", "red"),
    "cancelled": ("-", "dim"),
}
ORDER = ("running", "forming", "draining", "pending", "failed", "done", "cancelled")


@app.command()
def top(
    once: Annotated[bool, typer.Option(help="Print once and end.")] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """The fleet at a glance, as it changes."""
    console = Console()
    with connected(server, json, state) as client:
        if json:
            print_json(client.get("/v1/status", Status))
        elif once:
            if not console.is_terminal:
                console = Console(width=100)
            console.print(_look(client, console))
        else:
            _follow(client, console)


def _follow(client: Client, console: Console) -> None:
    first = _look(client, console)
    with Live(first, console=console, auto_refresh=False, screen=True) as live:
        shown = first
        while True:
            try:
                time.sleep(SECONDS)
                shown = _look(client, console)
                live.update(shown, refresh=True)
            except ClientError as error:
                if error.status:
                    raise
                away = Text(f"the server is away, trying again: {error}", style="bold red")
                live.update(Group(away, shown), refresh=True)
            except KeyboardInterrupt:
                return


def _look(client: Client, console: Console) -> RenderableType:
    status = client.get("/v1/status", Status)
    jobs = client.get("/v1/jobs", JobList, limit=1000, state="all", newest=True).jobs
    ledger = client.get("/v1/ledger", LedgerOut)
    findings = client.get("/v1/findings", FindingsOut, limit=FINDINGS).findings[::-1]
    lines = console.height if console.is_terminal else 40
    notices = status.notices[-4:][::-1]
    most_rows = max(3, lines - 8 - len(notices) - len(findings) - len(status.questions))
    jobs.sort(key=lambda job: (ORDER.index(job.state), -job.id))
    return Group(
        _head(status, ledger),
        Rule(style="dim"),
        _jobs(jobs, most_rows, console.width),
        Rule(style="dim"),
        *(Text(_question(each), style="bold yellow") for each in status.questions),
        *(_finding(each) for each in findings),
        *(_notice(each) for each in notices),
    )


def _head(status: Status, ledger: LedgerOut) -> Text:
    made = Text(no_wrap=True, overflow="ellipsis")
    made.append("Phalanx", style="bold")
    made.append(f" {status.version}  epoch {status.epoch}  event {status.sequence}\n", style="dim")
    used_gpus = status.gpus - status.free_gpus
    made.append("nodes  ")
    for name, count in status.nodes.items():
        if count:
            mark, style = MARKS[name]
            made.append(f"{mark} {count:,} {name}  ", style=style)
    made.append("\nGPUs   ")
    made.append_text(_bar(used_gpus / status.gpus if status.gpus else 0.0, 24))
    made.append(f" {status.free_gpus:,} of {status.gpus:,} free")
    if ledger.fleet is not None and ledger.fleet.gpu_ns:
        share = ledger.fleet
        goodput = f"{share.goodput_ppm / 1e4:.1f} %" if share.steps_known else "unknown"
        made.append(
            f"   goodput {goodput}, {share.gpu_ns / HOUR_NS:,.1f} GPU-h, "
            f"${share.micro_dollars / 1e6:,.2f}"
        )
    if status.problem:
        made.append(f"\nnothing can be stored: {status.problem}", style="bold red")
    return made


def _bar(share: float, width: int) -> Text:
    full = round(share * width)
    return Text.assemble(("█" * full, "green"), ("░" * (width - full), "dim"))


def _jobs(jobs: list[JobOut], most_rows: int, width: int) -> Table:
    made = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    wide = width >= 110
    for name, side in (("JOB", "left"), ("", "left"), ("GPUS", "right"), ("STEP", "right")):
        made.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    made.add_column("", no_wrap=True, width=12)
    made.add_column("S/STEP", justify="right", no_wrap=True)
    made.add_column("LOSS", justify="right", no_wrap=True)
    if wide:
        made.add_column("TOK/S", justify="right", no_wrap=True)
        made.add_column("MFU", justify="right", no_wrap=True)
        made.add_column("RAN", justify="right", no_wrap=True)
        made.add_column("TEAM", no_wrap=True)
    made.add_column("WHY", no_wrap=True, overflow="ellipsis", ratio=1)
    for job in jobs[:most_rows]:
        mark, style = MARKS[job.state]
        cells = [
            Text(plain(f"{job.id} {job.name[:18]}")),
            Text(f"{mark} {job.phase or job.state}", style=style),
            Text(f"{job.gpus:,}"),
            Text(steps_of(job)),
            _bar(job.step / job.steps, 12) if job.steps else Text(""),
            Text(f"{job.step_seconds:.2f}" if job.step_seconds else ""),
            Text("" if job.loss is None else f"{job.loss:.3f}"),
            *([Text(cell) for cell in _pace(job)] if wide else []),
            Text(plain(job.why.text)),
        ]
        made.add_row(*cells)
    if len(jobs) > most_rows:
        made.add_row(Text(f"and {len(jobs) - most_rows:,} more", style="dim"))
    if not jobs:
        made.add_row(Text("no jobs: phalanx submit JOB.toml", style="dim"))
    return made


def _question(question: QuestionOut) -> str:
    count, number = len(question.nodes), question.question
    return f"decide: {question.about} of {count} nodes (phalanx answer {number} --take-out|--keep)"


def _pace(job: JobOut) -> tuple[str, ...]:
    """Columns that only wide terminals have room for."""
    speed = "" if job.tokens_per_second is None else f"{job.tokens_per_second:,.0f}"
    mfu = "" if job.mfu is None else f"{job.mfu:.1%}"
    return speed, mfu, span(job.ran_seconds), plain(job.team)


def _finding(finding: RunFinding) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{when(int(finding.time * 1e9))} ", style="dim")
    text.append(plain(finding.sentence or finding.kind), style="yellow")
    where = [f"job {finding.job}" if finding.job else "", finding.node]
    text.append(f" ({', '.join(each for each in where if each)})" if any(where) else "", "dim")
    return text


def _notice(notice: NoticeOut) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{when(notice.time_ns)} ", style="dim")
    text.append(plain(notice.text), style="red" if notice.level == "error" else "")
    if notice.job:
        text.append(f" (job {notice.job})", style="dim")
    return text
