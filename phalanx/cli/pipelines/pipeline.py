"""``phalanx pipeline``: steps from raw files to released weights; those that changed are run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from phalanx.cli.connection import exit_on_server_error
from phalanx.cli.options import Json
from phalanx.cli.output import exit_on, exit_on_config_error, fail, print_json
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
from phalanx.pipelines.machine import TaskProgress
from phalanx.pipelines.picture import graph_svg
from phalanx.pipelines.registry.models import RegistryError
from phalanx.pipelines.run.attempts import Executor
from phalanx.pipelines.run.processes import LocalExecutor
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
    int, typer.Option(min=0, help="Steps that run at a time; 0: as the file says.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Also while only a person's answer is missing.")]
ServerOption = Annotated[
    str, typer.Option("--server", metavar="URL", help="Run steps as jobs of this server.")
]
Number = Annotated[int, typer.Option("--run", min=0, help="Number of the run; 0: the last.")]


@contextmanager
def _reported(json: bool) -> Iterator[None]:
    """What is wrong with a file, a folder, a record or a server is told in words."""
    with (
        exit_on_config_error(json),
        exit_on_server_error(json),
        exit_on(WorkspaceError, RecordError, RegistryError, OSError),
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


@app.command()
def run(
    path: PipelinePath,
    parallel: Parallel = 0,
    wait: Wait = False,
    server: ServerOption = "",
    json: Json = False,
) -> None:
    """Begin a run: every step whose inputs changed, in order."""
    with _reported(json), _stopped_by_signals():
        session = open_pipeline(path)
        end = session.run(_executor(server), _shown(json), parallel, wait)
    _report_end(end, path, json)


@app.command()
def resume(
    path: PipelinePath,
    parallel: Parallel = 0,
    wait: Wait = False,
    server: ServerOption = "",
    json: Json = False,
) -> None:
    """Go on with the last run, after a crash, a stop or an answer."""
    with _reported(json), _stopped_by_signals():
        session = recorded_pipeline(path)
        end = session.resume(_executor(server), _shown(json), parallel, wait)
    _report_end(end, path, json)


@app.command()
def show(path: PipelinePath, number: Number = 0, json: Json = False) -> None:
    """Show the last run: each step's state, time and reason, and what it made."""
    with _reported(json):
        session = recorded_pipeline(path, number)
        shown = session.last_run(number)
    if json:
        print_json({"run": shown.number, "began": shown.began, **run_view(shown.machine)})
    else:
        print_run(shown, session.workspace)


@app.command()
def graph(
    path: PipelinePath,
    dot: Annotated[bool, typer.Option("--dot", help="As Graphviz reads it.")] = False,
    mermaid: Annotated[bool, typer.Option("--mermaid", help="As Markdown shows it.")] = False,
    svg: Annotated[
        Path | None, typer.Option(help="Picture to write: the last run, its states and times.")
    ] = None,
    json: Json = False,
) -> None:
    """Show which step waits for which."""
    if svg is not None:
        with _reported(json):
            run = recorded_pipeline(path).last_run()
            svg.write_text(graph_svg(run.machine), encoding="utf-8")
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
def cancel(path: PipelinePath, json: Json = False) -> None:
    """End the last run; what is done stays done."""
    with _reported(json):
        text = recorded_pipeline(path).cancel()
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


def _executor(server: str) -> Executor:
    if not server:
        return LocalExecutor()
    from phalanx.control.client.client import Client
    from phalanx.pipelines.run.server_jobs import ServerExecutor

    return ServerExecutor(Client(server))


def _shown(json: bool) -> Changed:
    def silent(progress: TaskProgress) -> None:
        """With ``--json`` standard output is one document."""

    return silent if json else print_change


def _report_end(end: RunEnd, path: Path, json: bool) -> None:
    if json:
        print_json({"run": end.number, **run_view(end.machine)})
    else:
        print_end(end, path)
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
