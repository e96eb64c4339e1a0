"""Options that reach a command as one struct."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from phalanx.cli.option_struct import takes_options

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class Wishes:
    what: Annotated[list[str], typer.Argument(help="Things.")]
    size: Annotated[int, typer.Option(min=1, help="How large.")]
    name: Annotated[str, typer.Option(help="How it is called.")] = "nobody"


@app.command()
@takes_options
def wish(wishes: Wishes, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
    """Wish for something."""
    typer.echo(f"{wishes.what} {wishes.size} {wishes.name} {loud}")


def test_arguments_and_options_come_as_the_struct_says() -> None:
    result = CliRunner().invoke(app, ["a", "b", "--size", "2", "--loud"])
    assert result.stdout == "['a', 'b'] 2 nobody True\n"


def test_an_option_without_a_default_is_required_and_bounds_hold() -> None:
    assert CliRunner().invoke(app, ["a"]).exit_code == 2
    assert CliRunner().invoke(app, ["a", "--size", "0"]).exit_code == 2


def test_the_help_is_the_commands() -> None:
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert "Wish for something." in text and "How large." in text and "--loud" in text
