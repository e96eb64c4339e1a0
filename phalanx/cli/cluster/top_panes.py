"""The panes of ``phalanx top``: fleet, jobs, queue, incidents, as many lines as there are."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from phalanx.cli.jobs.ps import steps_of
from phalanx.cli.tables import plain, span, when
from phalanx.cluster.units import HOUR_NS
from phalanx.control.server.api.page import QueueOut
from phalanx.control.wire.api_types import JobOut, LedgerOut, NoticeOut, QuestionOut, Status
from phalanx.observe.tracker.findings import RunFinding

NAMES = ("fleet", "jobs", "queue", "incidents")
LEAST_LINES = 3  # of a pane, with its frame
FRAME = 2  # lines above and below
WIDE = 110  # columns from which on jobs have more to tell
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


@dataclass(frozen=True)
class FleetLook:
    """What a server said, at one look."""

    status: Status
    jobs: list[JobOut]  # those that do not wait
    queue: QueueOut
    queue_asked: float
    ledger: LedgerOut
    findings: list[RunFinding]  # newest first


def panes(seen: FleetLook, width: int, lines: int, only: str = "") -> Group:
    """All panes, or one that has all the room."""
    incidents = _incidents(seen)
    if only:
        heights = dict.fromkeys((only,), lines)
    else:
        fleet = 5 + bool(seen.status.problem)
        left = lines - fleet
        low = min(max(LEAST_LINES, len(incidents) + FRAME), max(LEAST_LINES, left // 4))
        queue = min(max(LEAST_LINES, len(seen.queue.rows) + FRAME + 1), max(4, left // 3))
        heights = {"fleet": fleet, "jobs": left - low - queue, "queue": queue, "incidents": low}
    bodies: dict[str, RenderableType] = {}
    for name, high in heights.items():
        rows = max(1, high - FRAME)
        if name == "fleet":
            bodies[name] = _fleet(seen.status, seen.ledger)
        elif name == "jobs":
            bodies[name] = _jobs(seen.jobs, rows - 2, width)
        elif name == "queue":
            bodies[name] = _queue(seen.queue, rows - 1)
        else:
            bodies[name] = Group(*incidents[:rows]) if incidents else Text("none", style="dim")
    return Group(*(_framed(name, bodies[name], heights[name]) for name in heights))


def _framed(name: str, body: RenderableType, high: int) -> Panel:
    title = f"[b]{NAMES.index(name) + 1}[/b] {name}"
    return Panel(
        body, box=ROUNDED, title=title, title_align="left", border_style="dim", height=high
    )


def _fleet(status: Status, ledger: LedgerOut) -> Text:
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
    wide = width >= WIDE
    for name, side in (("JOB", "left"), ("", "left"), ("GPUS", "right"), ("STEP", "right")):
        made.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    if wide:
        made.add_column("", no_wrap=True, width=12)
    made.add_column("S/STEP", justify="right", no_wrap=True)
    made.add_column("LOSS", justify="right", no_wrap=True)
    if wide:
        made.add_column("TOK/S", justify="right", no_wrap=True)
        made.add_column("MFU", justify="right", no_wrap=True)
        made.add_column("RAN", justify="right", no_wrap=True)
        made.add_column("TEAM", no_wrap=True)
    made.add_column("WHY", no_wrap=True, overflow="ellipsis", ratio=1)
    most_rows = max(1, most_rows)
    for job in jobs[:most_rows]:
        mark, style = MARKS[job.state]
        cells = [
            Text(plain(f"{job.id} {job.name[:18]}")),
            Text(f"{mark} {job.phase or job.state}", style=style),
            Text(f"{job.gpus:,}"),
            Text(steps_of(job)),
            *([_bar(job.step / job.steps, 12) if job.steps else Text("")] if wide else []),
            Text(f"{job.step_seconds:.2f}" if job.step_seconds else ""),
            Text("" if job.loss is None else f"{job.loss:.3f}"),
            *([Text(cell) for cell in _pace(job)] if wide else []),
            Text(plain(job.why.text)),
        ]
        made.add_row(*cells)
    if len(jobs) > most_rows:
        made.add_row(Text(f"and {len(jobs) - most_rows:,} more", style="dim"))
    if not jobs:
        made.add_row(Text("no job runs: phalanx submit JOB.toml", style="dim"))
    return made


def _queue(queue: QueueOut, most_rows: int) -> RenderableType:
    if not queue.pending:
        return Text("nobody waits", style="dim")
    made = Table(box=None, pad_edge=False, expand=True, header_style="dim")
    made.add_column("JOB", no_wrap=True)
    made.add_column("GPUS", justify="right", no_wrap=True)
    made.add_column("START", no_wrap=True, overflow="ellipsis", max_width=30)
    made.add_column("WAITS FOR", no_wrap=True, overflow="ellipsis", ratio=1)
    shown = queue.rows[: max(1, most_rows - (queue.pending > most_rows))]
    for row in shown:
        name = Text(plain(f"{row.job.id} {row.job.name[:18]}"))
        why = Text(plain((row.waits.waits_for or row.waits.why).text))
        made.add_row(name, Text(f"{row.job.gpus:,}"), Text(plain(row.waits.start)), why)
    if queue.pending > len(shown):
        made.add_row(Text(f"and {queue.pending - len(shown):,} more", style="dim"))
    return made


def _incidents(seen: FleetLook) -> list[Text]:
    """What a person must decide, then what was found and told, newest first."""
    asked = [Text(_question(each), style="bold yellow") for each in seen.status.questions]
    happened = [(each.time, _finding(each)) for each in seen.findings]
    happened += [(each.time_ns / 1e9, _notice(each)) for each in seen.status.notices]
    return [*asked, *(text for _, text in sorted(happened, key=lambda each: -each[0]))]


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
