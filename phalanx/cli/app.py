"""The root command, to which each group is attached."""

from __future__ import annotations

import typer

from phalanx import __version__

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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
