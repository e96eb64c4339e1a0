"""The root command. Commands are imported when they are called, so that each starts fast."""

from __future__ import annotations

import errno
import importlib
import math
import os
import shutil
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
        "tune": "Find the fastest settings of a job by measuring real steps.",
        "sweep": "Try many settings of a job; the best trials go on.",
        "parity": "Prove that every mesh computes the same training steps as one process.",
        "coord-check": "Show whether a job's settings transfer to models of other widths.",
        "new": "Write a skeleton for a custom model layer, with its tests.",
        "config": "Show, explain and check configurations.",
        "demo": "Train a small model on four CPU ranks, from start to finish.",
    },
    "Plan": {
        "plan": "Choose a mapping: memory, speed, days, dollars, failures.",
        "simulate": "Simulate months of a fleet's faults with the real scheduler core.",
        "story": "Practise diagnosis on one of eight incidents.",
    },
    "Data": {
        "data": "Make, inspect and verify token shards.",
    },
    "Pipelines": {
        "pipeline": "Run steps from raw files to released weights; skip what has not changed.",
        "models": "The registry of models: versions, scores, lineage, releases.",
    },
    "Checkpoints": {
        "ckpt": "List, verify, convert and remove checkpoints.",
        "convert": "Convert weights from and to Hugging Face folders, and from Megatron.",
        "eval": "Score a checkpoint: tasks, perplexity by domain.",
        "generate": "Generate text from a checkpoint.",
    },
    "Jobs": {
        "submit": "Put a job into the queue.",
        "ps": "List jobs.",
        "show": "Show a job.",
        "why": "Explain a job's state: what it waits for, or why it was placed where it is.",
        "logs": "Show what a job's ranks print.",
        "steps": "Show what every rank recorded of some steps.",
        "shell": "Open a shell in a job's environment on a node.",
        "profile": "Show where a job's step time goes and what to change; trace it.",
        "cancel": "End a job.",
        "scale": "Give a job another number of replicas.",
        "what-if": "Estimate what a change of settings would do to a job.",
        "replan": "Change the mapping or the stages of a running job at a step boundary.",
    },
    "Queue": {
        "hold": "Hold queued jobs, so that they do not start.",
        "release": "Release held jobs into the queue.",
        "requeue": "Checkpoint and stop jobs, then queue them again.",
        "budget": "Show or change a job's budget.",
        "reserve": "Reserve nodes for teams or for maintenance.",
        "partitions": "List partitions: nodes, rules, jobs.",
    },
    "Results": {
        "runs": "List, show, compare, export and annotate runs.",
        "report": "Write the post-mortem of a run.",
        "ledger": "Show exactly where GPU time went.",
        "usage": "Show GPU usage over time by team, user or project.",
    },
    "Cluster": {
        "up": "Start the server: controller, API and page.",
        "agent": "Run a node's agent: join a server and run jobs on this node.",
        "top": "Show the fleet live in the terminal.",
        "page": "Print a link that opens the page and signs you in.",
        "nodes": "List nodes, or show one.",
        "describe": "Describe this machine's hardware as its agent reports it.",
        "drain": "Drain a node, or checkpoint and hold a job.",
        "resume": "Return a drained node to service, or release a held job.",
        "fleet": "Install agents as services on your own hosts over SSH.",
        "slurm": "Start a private Slurm to experiment with; compare its accounting.",
        "k8s": "Print Kubernetes manifests for a job; show or delete its pods.",
        "lead": "Run the controller of a job inside another engine's allocation.",
    },
    "Operate": {
        "help": "List the commands for a topic.",
        "events": "Show the event log: what happened and what was decided.",
        "failures": "Show this cluster's measured failure rates, by cause.",
        "alerts": "Manage alert rules and who is notified.",
        "answer": "Answer questions that need a person's decision.",
        "quota": "Show or set teams' GPU quotas.",
        "token": "Create, list and revoke access tokens.",
        "audit": "Show the audit log, or verify its integrity.",
        "doctor": "Check nodes and the network between them, with evidence.",
        "server": "Check or repair a stopped server's event log.",
        "chaos": "Inject faults into a job and check that nothing is lost.",
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


FRAMED_COLUMNS = 100  # from which frames hold the options of a command and what they mean


def _adapt(command: Any, framed: bool) -> None:
    """What holds for every command, those of a group too.

    Numbers are finite, and help has no frames where these would cut the names of options off;
    a group's help only lists commands.
    """
    below = getattr(command, "commands", {})
    if not framed and not below:
        command.rich_markup_mode = None
    for option in command.params:
        option.callback = option.callback or _finite
    for each in below.values():
        _adapt(each, framed)


def _finite(ctx: Any, param: Any, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number", ctx, param)
    return value


# Typer gives them to every command; they install completion of the whole command line.
OF_THE_ROOT = ("install_completion", "show_completion")


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
            command.params = [each for each in command.params if each.name not in OF_THE_ROOT]
            _adapt(command, shutil.get_terminal_size().columns >= FRAMED_COLUMNS)
        command.name, command.short_help = cmd_name, entry.summary
        command.rich_help_panel = entry.panel
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if error.__cause__ is not None:
                from phalanx.cli.parse_errors import say_plainly

                say_plainly(error)
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and not ctx.resilient_parsing:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            fix = f"did you mean {near[0]!r}?" if near else "`phalanx help` finds one by its topic"
            ctx.fail(f"No such command {args[0]!r}: {fix}")
        return super().resolve_command(ctx, args)

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

    versions = {"phalanx": __version__, "python": platform.python_version()}
    for name in TRAINING_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version."),
    json: bool = typer.Option(
        False, "--json", help="With --version: print the environment too, as JSON."
    ),
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


def _end_with_file_problem(error: OSError) -> None:
    """A file or folder that no command may write or read: not a fault of the program's."""
    from phalanx.cli.output import FORBIDDEN, FULL, MISPLACED, file_problem

    if error.errno in (*FORBIDDEN, *FULL, *MISPLACED):
        print(f"error: {file_problem(error)}", file=sys.stderr)
        sys.exit(1)


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
        if error.filename is not None:
            _end_with_file_problem(error)
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(os.EX_IOERR)
