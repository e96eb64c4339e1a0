"""What ``--help`` prints, of every command, as one text: a change of it is seen in a review.

Without frames, colours and line breaks, which are the terminal's.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from phalanx.cli.app import COMMANDS
from phalanx.cli.app import app as root

FILE = Path(__file__).parents[2] / "tests" / "cli" / "help.txt"
ENVIRONMENT = {"COLUMNS": "400", "TERMINAL_WIDTH": "400", "NO_COLOR": "1", "TERM": "dumb"}
FRAME = re.compile("[│╭╮╰╯─]+")


def made_with() -> str:
    """Releases of the libraries that lay the text out: others may write a type otherwise."""
    return f"typer {version('typer')}, rich {version('rich')}"


def lines() -> list[str]:
    """The help of Phalanx, of every command, and of those below it."""
    found = [f"Written by `python -m docs.generator` with {made_with()}: do not edit."]
    for words in [(), *_every()]:
        found += ["", f"$ {' '.join(('phalanx', *words))} --help", *_help(words)]
    return found


def _every() -> Iterator[tuple[str, ...]]:
    for name, entry in COMMANDS.items():
        app = importlib.import_module(entry.module).app
        yield from _paths(typer.main.get_command(app), (name,))


def _paths(command: Any, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield above
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from _paths(below, (*above, name))


def _help(words: tuple[str, ...]) -> list[str]:
    done = CliRunner().invoke(root, [*words, "--help"], prog_name="phalanx", env=ENVIRONMENT)
    assert done.exit_code == 0, done.output
    plain = (" ".join(FRAME.sub(" ", line).split()) for line in done.output.splitlines())
    return [line for line in plain if line]
