"""The root command. Groups are imported when they are used, so that each starts fast."""

from __future__ import annotations

import importlib
from typing import Any

import typer
from typer.core import TyperGroup

from phalanx import __version__

# Name, module with its ``app``, and the line that stands in the list of commands.
COMMANDS = {
    "train": ("phalanx.cli.train", "Run a training job, or show what it would need."),
    "config": ("phalanx.cli.config", "Show, explain and check configurations."),
    "plan": ("phalanx.cli.plan", "Choose a mapping: memory, speed, days, dollars, failures."),
    "simulate": ("phalanx.cli.simulate", "Play months of faults on a fleet through the real core."),
    "data": ("phalanx.cli.data", "Make token shards and look into them."),
    "convert": ("phalanx.cli.convert", "Weights from and to Hugging Face folders."),
    "demo": ("phalanx.cli.demo", "Train a small model on four CPU ranks, start to end."),
}


class LazyGroup(TyperGroup):
    """A group that knows its commands by name and imports the one that is called."""

    # Any, because releases of Typer differ in whether these types are click's or their own.

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, summary = COMMANDS[cmd_name]
        command = typer.main.get_command(importlib.import_module(module).app)
        command.name, command.short_help = cmd_name, summary
        return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=False,
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


def main() -> None:
    """Entry point of the console script."""
    app()
