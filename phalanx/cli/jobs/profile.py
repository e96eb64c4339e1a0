"""``phalanx profile``: where a job's steps go and what to change; traces of a running one."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from phalanx.cli.completion import job_numbers
from phalanx.cli.job_file import load_named
from phalanx.cli.options import Json, ServerUrl, Set, State, WorldSize
from phalanx.cli.output import exit_on, exit_on_config_error, fail, print_json, write_out
from phalanx.cli.tables import plain
from phalanx.train.rank.threads import keep_single_threaded

if TYPE_CHECKING:
    from phalanx.config import Job
    from phalanx.observe.profile.profile import JobProfile
    from phalanx.observe.tracker.report import ReportSection


class ProfileGroup(TyperGroup):
    """``profile JOB`` is short for ``profile run JOB``."""

    # Any, because releases of Typer differ in whether these types are click's or their own.

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ProfileGroup,
    add_completion=False,
    no_args_is_help=True,
    help="Say where a job's steps go and what to change; trace a running job.",
)

Kept = Annotated[Path, typer.Argument(help="Folder of a profile, or its profile.json.")]
Page = Annotated[Path | None, typer.Option("--html", help="Write the report here as HTML.")]


@app.command(epilog="Also: phalanx profile compare A B, phalanx profile show A.")
def run(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="A job file, profiled here; or a running job's number.",
            autocompletion=job_numbers,
        ),
    ],
    overrides: Set = None,
    world_size: WorldSize = None,
    steps: Annotated[
        int, typer.Option(min=0, max=100, help="Steps to trace; 0: 2 of a file, 5 of a job.")
    ] = 0,
    timed: Annotated[
        int, typer.Option(min=3, max=1000, help="Steps timed without tracing, before the trace.")
    ] = 8,
    ranks: Annotated[
        str, typer.Option(help="Of a running job, such as 0,8,16 (default: one a node).")
    ] = "",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the profile, or file of a running job's trace.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="How long to wait for a running job's traces.")
    ] = 300.0,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Profile a few steps of a job file on this machine, or trace a running job.

    For a file: ranked advice with evidence, kept in a folder with the trace and an HTML report.
    For a running job: a trace of its next steps on one clock, for ui.perfetto.dev.
    """
    if job.isdigit():
        from phalanx.cli.jobs.running_trace import trace_running

        trace_running(int(job), steps or 5, ranks, out, seconds, server, state, json)
        return
    if ranks:
        raise typer.BadParameter("--ranks are of a running job: of a file rank 0 is traced")
    with exit_on_config_error(json):
        wanted, count = load_named(Path(job), overrides, world_size, "")
    _profile(wanted, count, steps or 2, timed, out, json)


def _profile(job: Job, ranks: int, steps: int, timed: int, out: Path | None, json: bool) -> None:
    """Profile a job here, keep the profile and show its report."""
    keep_single_threaded()  # ranks are forked: before numpy and torch are imported
    from phalanx.observe.profile.advise import advise
    from phalanx.observe.profile.pages import profile_page
    from phalanx.observe.profile.profile import write_profile
    from phalanx.observe.profile.run import ProfileError, profile_job
    from phalanx.observe.profile.sections import sections
    from phalanx.train.profile.recorder import ProfileRecorder, warm_steps

    folder = out or Path(f"profile-{job.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{folder}: {error.strerror}")
    recorder = ProfileRecorder(timed, steps, warm=warm_steps(job.data))
    # A ValueError: what was traced is no trace, as where it was cut off by a full disk.
    with exit_on_config_error(json), exit_on(ProfileError, ValueError):
        profile = profile_job(job, ranks, folder, recorder, say=_progress)
    path, advice = write_profile(profile, folder), advise(profile)
    page = folder / "profile.html"
    write_out(page, profile_page(profile, advice).encode())
    if json:
        print_json({"profile": str(path), "page": str(page), "advice": advice})
        return
    show_sections(sections(profile, advice))
    print(f"\n{page}: the report; {folder}/runs: the trace, for https://ui.perfetto.dev")


@app.command()
def show(profile: Kept, html: Page = None, json: Json = False) -> None:
    """Show a stored profile, with advice by the current rules."""
    from phalanx.observe.profile.advise import advise
    from phalanx.observe.profile.pages import profile_page
    from phalanx.observe.profile.sections import sections

    stored = _read(profile)
    advice = advise(stored)
    if html is not None:
        write_out(html, profile_page(stored, advice).encode(), "--html")
    if json:
        print_json({"profile": stored, "advice": advice})
    else:
        show_sections(sections(stored, advice))


@app.command()
def compare(before: Kept, after: Kept, html: Page = None, json: Json = False) -> None:
    """Compare two stored profiles: of two commits, machines or days."""
    from phalanx.observe.profile.compare import compare as compared
    from phalanx.observe.profile.pages import comparison_page
    from phalanx.observe.profile.sections import comparison_sections

    comparison = compared(_read(before), _read(after))
    if html is not None:
        page = comparison_page(f"From {before} to {after}", comparison)
        write_out(html, page.encode(), "--html")
    if json:
        print_json(
            {"verdict": comparison.verdict, "change": comparison.change, "comparison": comparison}
        )
    else:
        show_sections(comparison_sections(comparison))


def _read(path: Path) -> JobProfile:
    from phalanx.observe.profile.profile import read_profile

    with exit_on(ValueError):
        return read_profile(path)


def show_sections(sections: list[ReportSection]) -> None:
    """A report for a person at a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for section in sections:
        console.print(Text(f"\n{section.title}", style="bold"))
        for line in section.lines:
            console.print(Text(plain(line)))
        for name, share in section.bars.items():
            console.print(Text(f"{name:24}{share:7.1%} {'█' * round(40 * share)}"))
        if section.table:
            table = Table(*section.table[0], box=None, pad_edge=False)
            for row in section.table[1:]:
                table.add_row(*(Text(plain(cell)) for cell in row))
            console.print(table)


def _progress(line: str) -> None:
    print(plain(line), file=sys.stderr)
