"""``phalanx pipeline``: steps from raw files to released weights; those that changed are run."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, NamedTuple

import typer
from msgspec import structs

from phalanx.cli.connection import exit_on_server_error, send_confirmed
from phalanx.cli.options import Json
from phalanx.cli.output import exit_on, exit_on_config_error, fail, print_json, write_out
from phalanx.cli.pipelines.pipeline_tables import (
    dot_graph,
    mermaid_graph,
    print_change,
    print_end,
    print_graph,
    print_plan,
    print_run,
    run_view,
)
from phalanx.cluster.pipelines.machine import TaskProgress
from phalanx.config import ConfigError
from phalanx.control.backends.ray.submit import RayError
from phalanx.control.backends.slurm.programs import SlurmError
from phalanx.pipelines.cluster.session import served_pipeline
from phalanx.pipelines.engines.choice import LOCAL, executor
from phalanx.pipelines.picture import graph_svg
from phalanx.pipelines.registry.models import RegistryError
from phalanx.pipelines.run.record import RecordError
from phalanx.pipelines.run.session import Changed, RunEnd, open_pipeline, recorded_pipeline
from phalanx.pipelines.run.validation import validation_scores
from phalanx.pipelines.run.workspace import WorkspaceError

ASKS, STOPPED = os.EX_TEMPFAIL, 130  # exit codes

app = typer.Typer(
    no_args_is_help=True,
    help="Run steps from raw files to released weights; what has not changed is not run again.",
)

PipelinePath = Annotated[
    Path, typer.Argument(metavar="PIPELINE.toml", help="File that describes the pipeline.")
]
Parallel = Annotated[
    int, typer.Option(min=0, help="Most steps running at a time; 0: as in the file.")
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Keep waiting while a step needs a person's answer.")
]
ServerOption = Annotated[
    str,
    typer.Option(
        "--server", metavar="URL", help="Server that runs the pipeline, its steps as jobs."
    ),
]
Detach = Annotated[bool, typer.Option("--detach", help="On a server: do not watch the run.")]
Yes = Annotated[
    bool, typer.Option("--yes", help="On a server: do not ask, even above the cost limit.")
]
EngineOption = Annotated[
    str,
    typer.Option(
        "--engine", metavar="local|slurm|ray", help="Engine that runs the steps' processes."
    ),
]
Number = Annotated[int, typer.Option("--run", min=0, help="Number of the run; 0: the last.")]


@contextmanager
def _reported(json: bool) -> Iterator[None]:
    """What is wrong with a file, a folder, a record or a server is told in words."""
    with (
        exit_on_config_error(json),
        exit_on_server_error(json),
        exit_on(WorkspaceError, RecordError, RegistryError, SlurmError, RayError, OSError),
    ):
        yield


@app.command()
def plan(path: PipelinePath, json: Json = False) -> None:
    """Say which steps would run, and which are done already."""
    with _reported(json):
        machine = open_pipeline(path).plan()
    if json:
        print_json(run_view(machine))
    else:
        print_plan(machine)


def _driven(begin: bool) -> Callable[..., None]:
    """The command that begins a run, or goes on with one: both take the same."""

    def command(
        path: PipelinePath,
        parallel: Parallel = 0,
        wait: Wait = False,
        server: ServerOption = "",
        detach: Detach = False,
        yes: Yes = False,
        engine: EngineOption = LOCAL,
        json: Json = False,
    ) -> None:
        with _reported(json):
            if server and engine != LOCAL:
                rule = "is for runs that this process drives: a server's steps are its jobs"
                raise ConfigError("--engine", engine, rule, "leave one of both out")
            if server:
                end = _on_server(
                    path, server, parallel, wait, _RunRequest(begin, detach, yes), json
                )
            else:
                with _stopped_by_signals():
                    session = open_pipeline(path) if begin else recorded_pipeline(path)
                    drive = session.run if begin else session.resume
                    end = drive(executor(engine, session.file), _shown(json), parallel, wait)
        if end is not None:
            _report_end(end, path, server, json)

    return command


app.command("run", help="Start a run: every step whose inputs changed, in order.")(_driven(True))
app.command("resume", help="Continue the last run after a crash, a stop or an answer.")(
    _driven(False)
)


@app.command()
def show(
    path: PipelinePath, number: Number = 0, server: ServerOption = "", json: Json = False
) -> None:
    """Show the last run: each step's state, time and reason, and what it made."""
    cost: dict[str, float] = {}
    with _reported(json):
        if server:
            served = served_pipeline(path, server)
            session, shown = served.session, served.show(number)
            short = served.summary(shown.number)
            cost = {"gpu_hours": short.gpu_hours, "dollars": short.dollars}
        else:
            session = recorded_pipeline(path, number)
            shown = session.last_run(number)
    if json:
        view = run_view(shown.machine)
        print_json({"run": shown.number, "began": shown.began_ns / 1e9, **view, **cost})
        return
    print_run(shown, session.workspace)
    if cost:
        print(f"cost: {cost['gpu_hours']:.3g} GPU-hours, {cost['dollars']:,.2f} dollars")


@app.command()
def graph(
    path: PipelinePath,
    dot: Annotated[bool, typer.Option("--dot", help="Print Graphviz source.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="Print Mermaid source.")] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Write a picture of the last run with states and times.")
    ] = None,
    server: ServerOption = "",
    json: Json = False,
) -> None:
    """Show which step waits for which."""
    if server and svg is None:
        raise typer.BadParameter("is for --svg, which shows a run", param_hint="--server")
    if svg is not None:
        with _reported(json):
            served = served_pipeline(path, server) if server else None
            run = served.show() if served is not None else recorded_pipeline(path).last_run()
            write_out(svg, graph_svg(run.machine).encode(), "--svg")
        print_json({"picture": str(svg)}) if json else print(f"{svg}: run {run.number}")
        return
    with _reported(json):
        tasks = open_pipeline(path).tasks.in_order
    if json:
        print_json({task.name: task.waits for task in tasks})
    elif dot or mermaid:
        print(dot_graph(tasks) if dot else mermaid_graph(tasks))
    else:
        print_graph(tasks)


@app.command()
def cancel(
    path: PipelinePath,
    why: Annotated[str, typer.Option(help="Reason shown to others.")] = "",
    server: ServerOption = "",
    json: Json = False,
) -> None:
    """Cancel the last run; completed steps stay completed."""
    with _reported(json):
        session = served_pipeline(path, server) if server else recorded_pipeline(path)
        text = session.cancel(why)
    print_json({"message": text}) if json else print(text)


@app.command()
def scores(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    json: Json = False,
) -> None:
    """Write the last validation loss of a run as scores, for gates and the registry."""
    with exit_on(ValueError, OSError):
        made = validation_scores(run_folder, out)
    if json:
        print_json(made)
    else:
        print(f"{out}: {made.scores} after step {made.step}")


class _RunRequest(NamedTuple):
    """What somebody wants of a run on a server."""

    begin: bool
    detach: bool
    yes: bool


def _on_server(
    path: Path, server: str, parallel: int, wait: bool, asked: _RunRequest, json: bool
) -> RunEnd | None:
    """A run that a server drives; None: it is left to itself."""
    served = served_pipeline(path, server, begin=asked.begin)
    if asked.begin:
        request = structs.replace(served.request(parallel), confirmed=asked.yes)
        number = send_confirmed(request, served.begin).pipeline
    else:
        number = served.newest()
    left = f"run {number} goes on by itself: phalanx pipeline show {shlex.quote(str(path))}"
    if asked.detach:
        print_json({"run": number}) if json else print(f"{left} --server {server}")
        return None
    try:
        return served.follow(number, _shown(json), wait, past=asked.begin)
    except KeyboardInterrupt:
        fail(f"{left} --server {server}", STOPPED)


def _shown(json: bool) -> Changed:
    def silent(progress: TaskProgress) -> None:
        """With ``--json`` standard output is one document."""

    return silent if json else print_change


def _report_end(end: RunEnd, path: Path, server: str, json: bool) -> None:
    if json:
        print_json({"run": end.number, **run_view(end.machine)})
    else:
        print_end(end, path, server)
    if end.state != "done":
        raise typer.Exit(ASKS if end.state == "asking" else 1)


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Ctrl-C, or somebody's wish: steps are ended, and the run can be resumed."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        fail("stopped: `phalanx pipeline resume` goes on with it", STOPPED)
    finally:
        signal.signal(signal.SIGTERM, before)
