"""The root command. Groups are imported when they are used, so that each starts fast."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from phalanx import __version__

# Name, module (and its Typer, where that is not ``app``), and its line in the list of commands.
COMMANDS = {
    "train": ("phalanx.cli.train.train", "Run a training job, or show what it would need."),
    "config": ("phalanx.cli.train.config", "Show, explain and check configurations."),
    "plan": ("phalanx.cli.plan.plan", "Choose a mapping: memory, speed, days, dollars, failures."),
    "simulate": (
        "phalanx.cli.plan.simulate",
        "Play months of faults on a fleet through the real core.",
    ),
    "data": ("phalanx.cli.data.data", "Make token shards and look into them."),
    "ckpt": (
        "phalanx.cli.checkpoints.ckpt",
        "Look at checkpoints, prove, convert and remove them.",
    ),
    "convert": ("phalanx.cli.checkpoints.convert", "Weights from and to Hugging Face folders."),
    "up": ("phalanx.cli.cluster.up:up", "Start the server: controller, API and page."),
    "server": (
        "phalanx.cli.operate.server",
        "Check or repair the log of a server that is stopped.",
    ),
    "agent": (
        "phalanx.cli.cluster.agent:agent",
        "Serve a node: join a server and run its share of jobs.",
    ),
    "submit": ("phalanx.cli.jobs.submit:submit", "Put a job into the queue."),
    "ps": ("phalanx.cli.jobs.show:ps", "List jobs."),
    "show": ("phalanx.cli.jobs.show:show", "Show a job."),
    "why": ("phalanx.cli.jobs.show:why", "Say why a job is where it is, or what it waits for."),
    "logs": ("phalanx.cli.jobs.show:logs", "Show what a job's ranks print."),
    "steps": ("phalanx.cli.jobs.steps:steps", "Show what every rank recorded of some steps."),
    "shell": ("phalanx.cli.jobs.shell:shell", "Open a shell in a job's environment on a node."),
    "cancel": ("phalanx.cli.jobs.show:cancel", "End a job."),
    "scale": ("phalanx.cli.jobs.show:scale", "Give an elastic job another number of replicas."),
    "nodes": ("phalanx.cli.cluster.nodes:nodes", "List nodes, or show one."),
    "drain": ("phalanx.cli.cluster.nodes:drain", "Empty a node, or stop a job with a checkpoint."),
    "resume": ("phalanx.cli.cluster.nodes:resume", "Give a node back, or let a held job go on."),
    "events": ("phalanx.cli.cluster.nodes:events", "Read the log: events and what was decided."),
    "answer": ("phalanx.cli.cluster.nodes:answer", "Decide what only a person may decide."),
    "quota": ("phalanx.cli.cluster.nodes:quota", "Show or set what teams own."),
    "top": ("phalanx.cli.cluster.top:top", "The fleet at a glance, as it changes."),
    "page": ("phalanx.cli.cluster.page:page", "Print a link that opens the page and signs you in."),
    "fleet": ("phalanx.cli.cluster.fleet", "Agents as services on hosts of one's own, over SSH."),
    "lead": ("phalanx.cli.cluster.lead:lead", "Lead a job inside another engine's allocation."),
    "slurm": ("phalanx.cli.cluster.slurm", "A private Slurm to try things; accounting."),
    "k8s": ("phalanx.cli.cluster.k8s", "Manifests of jobs for Kubernetes."),
    "runs": ("phalanx.cli.results.runs:app", "List, show, compare, export and annotate runs."),
    "report": ("phalanx.cli.results.report:app", "Write the post-mortem of a run."),
    "profile": ("phalanx.cli.jobs.profile:app", "Trace steps of a running job, for Perfetto."),
    "ledger": ("phalanx.cli.results.runs:ledger_app", "Say where GPU time went, exactly."),
    "token": ("phalanx.cli.operate.token:app", "Make, list and revoke tokens."),
    "audit": ("phalanx.cli.operate.audit", "Read the audit log, or prove that it is whole."),
    "doctor": ("phalanx.cli.operate.doctor:app", "Check a node, with evidence."),
    "chaos": ("phalanx.cli.operate.chaos:chaos", "Harm a job on purpose, and see what is lost."),
    "demo": ("phalanx.cli.train.demo", "Train a small model on four CPU ranks, start to end."),
}


class LazyGroup(TyperGroup):
    """A group that knows its commands by name and imports the one that is called."""

    # Any, because releases of Typer differ in whether these types are click's or their own.

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        place, summary = COMMANDS[cmd_name]
        module, _, name = place.partition(":")
        found = getattr(importlib.import_module(module), name or "app")
        command = typer.main.get_command(found)
        command.name, command.short_help = cmd_name, summary
        return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"phalanx {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Trains very large models on GPU clusters and keeps every GPU busy."""


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
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO) or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it
        print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(os.EX_IOERR)
