"""The root command. Commands are imported when they are called, so that each starts fast."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from phalanx import __version__

# What people do, and the commands for it. A command ``ps`` of "Jobs" is the ``app`` of
# ``phalanx/cli/jobs/ps.py``, so that nothing is imported to list them.
PANELS = {
    "Train": {
        "train": "Run a training job, or show what it would need.",
        "tune": "Find the fastest settings of a job, by real steps.",
        "parity": "Prove that every mesh trains a job's model as one process does.",
        "coord-check": "Show whether a job's settings transfer to models of other widths.",
        "new": "Write the skeleton of a model of one's own, with its proof.",
        "config": "Show, explain and check configurations.",
        "demo": "Train a small model on four CPU ranks, start to end.",
    },
    "Plan": {
        "plan": "Choose a mapping: memory, speed, days, dollars, failures.",
        "simulate": "Play months of faults on a fleet through the real core.",
    },
    "Data": {
        "data": "Make token shards and look into them.",
    },
    "Pipelines": {
        "pipeline": "Run steps from raw files to released weights; only what changed.",
        "models": "The registry of models: versions, scores, lineage, releases.",
    },
    "Checkpoints": {
        "ckpt": "Look at checkpoints, prove, convert and remove them.",
        "convert": "Weights from and to Hugging Face folders.",
        "eval": "Score a checkpoint: tasks, perplexity by domain.",
        "generate": "Have a checkpoint continue texts, for a look.",
    },
    "Jobs": {
        "submit": "Put a job into the queue.",
        "ps": "List jobs.",
        "show": "Show a job.",
        "why": "Say why a job is where it is, or what it waits for.",
        "logs": "Show what a job's ranks print.",
        "steps": "Show what every rank recorded of some steps.",
        "shell": "Open a shell in a job's environment on a node.",
        "profile": "Say where a job's steps go and what to change; trace it.",
        "cancel": "End a job.",
        "scale": "Give a job another number of replicas.",
        "what-if": "Say what a change would make of a job.",
        "replan": "Change the mapping of a job that runs, at a step boundary.",
    },
    "Queue": {
        "hold": "Keep jobs that wait out of the queue.",
        "release": "Let held jobs into the queue.",
        "requeue": "Stop jobs with a checkpoint and queue them again.",
        "budget": "Show what a job may use, or change it.",
        "reserve": "Keep nodes for teams or for maintenance for a time.",
        "partitions": "List partitions: nodes, rules, jobs.",
    },
    "Results": {
        "runs": "List, show, compare, export and annotate runs.",
        "report": "Write the post-mortem of a run.",
        "ledger": "Say where GPU time went, exactly.",
        "usage": "Say who used GPUs over time: teams, users, projects.",
    },
    "Cluster": {
        "up": "Start the server: controller, API and page.",
        "agent": "Serve a node: join a server and run its share of jobs.",
        "top": "The fleet at a glance, as it changes.",
        "page": "Print a link that opens the page and signs you in.",
        "nodes": "List nodes, or show one.",
        "describe": "Describe this machine as its agent would.",
        "drain": "Empty a node, or stop a job with a checkpoint.",
        "resume": "Give a node back, or let a held job go on.",
        "fleet": "Agents as services on hosts of one's own, over SSH.",
        "slurm": "A private Slurm to try things; accounting.",
        "k8s": "Manifests of jobs for Kubernetes.",
        "lead": "Lead a job inside another engine's allocation.",
    },
    "Operate": {
        "events": "Read the log: events and what was decided.",
        "failures": "Say how often nodes fail here, and of what.",
        "answer": "Decide what only a person may decide.",
        "quota": "Show or set what teams own.",
        "token": "Make, list and revoke tokens.",
        "audit": "Read the audit log, or prove that it is whole.",
        "doctor": "Check nodes and what joins them, with evidence.",
        "server": "Check or repair the log of a server that is stopped.",
        "chaos": "Inject faults into a job, and see what is lost.",
    },
}


class CommandEntry(NamedTuple):
    """What is known of a command before its module is imported."""

    panel: str
    summary: str
    module: str


COMMANDS = {
    name: CommandEntry(panel, summary, f"phalanx.cli.{panel.lower()}.{name.replace('-', '_')}")
    for panel, commands in PANELS.items()
    for name, summary in commands.items()
}


class LazyGroup(TyperGroup):
    """A group that knows its commands by name and imports the one that is called."""

    _lists_only = False  # names and summaries are asked for, and no command's options

    # Any, because releases of Typer differ in whether these types are click's or their own.

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command: Any
        if self._lists_only:
            command = TyperCommand(cmd_name)
        else:
            command = typer.main.get_command(importlib.import_module(entry.module).app)
        command.name, command.short_help = cmd_name, entry.summary
        command.rich_help_panel = entry.panel
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with self._listing():
            super().format_help(ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        with self._listing():
            return super().shell_complete(ctx, incomplete)

    @contextmanager
    def _listing(self) -> Iterator[None]:
        self._lists_only = True
        try:
            yield
        finally:
            self._lists_only = False


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


# What trains is an extra: people who plan, simulate, submit or look on need none of it.
TRAINING_PACKAGES = ("torch", "tokenizers", "safetensors", "jinja2")


def _versions() -> dict[str, str]:
    """Of Phalanx, Python and what trains; empty where that is not installed."""
    import platform
    from importlib import metadata

    found = {"phalanx": __version__, "python": platform.python_version()}
    for name in TRAINING_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version."),
    json: bool = typer.Option(False, "--json", help="With --version: also of what it runs on."),
) -> None:
    """Trains very large models on GPU clusters and keeps every GPU busy."""
    if version:
        from json import dumps  # as above: no other command pays for it

        print(dumps(_versions()) if json else f"phalanx {__version__}")
        raise typer.Exit
    if json:
        raise typer.BadParameter("goes with --version here, or behind a command")


def _open_closed_streams() -> None:
    """Started with a closed stdout or stderr (``>&-``), what is printed goes nowhere.

    Otherwise the next file that is opened would get their number, and what is printed.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            setattr(sys, name, os.fdopen(number, mode))


def main() -> None:
    """Entry point of the console script."""
    _open_closed_streams()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAINING_PACKAGES:
            raise
        needs = "training parts of Phalanx, which are not installed here: pip install"
        print(
            f"error: this needs {error.name}, one of the {needs} 'phalanx[train]'", file=sys.stderr
        )
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(os.EX_IOERR)
