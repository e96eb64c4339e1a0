"""``phalanx new``: files to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.output import fail, print_json
from phalanx.cli.train.skeleton import model_files

app = typer.Typer(no_args_is_help=True, help="Write files to start from.")


@app.callback()
def new() -> None:
    """Keeps ``model`` a command of its own."""


@app.command()
def model(
    name: Annotated[str, typer.Argument(help="Name of the module: letters, digits and _.")],
    into: Annotated[Path, typer.Option("--into", help="Folder that receives the files.")] = Path(),
    json: Json = False,
) -> None:
    """Write a custom layer with its tensor-parallel plan, a job file, and tests of both."""
    if not name.isidentifier() or not name.islower():
        fail(f'"{name}" is no name of a module: small letters, digits and _, such as my_model', 2)
    files = model_files(name)
    if there := [file for file in files if (into / file).exists()]:
        fail(f"{into / there[0]} exists already: choose another name, or another --into", 2)
    try:
        into.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (into / file).write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"cannot write {error.filename}: {error.strerror}", 1)
    if json:
        print_json({"files": [str(into / file) for file in files]})
        return
    print("\n".join(f"wrote {into / file}" for file in files))
    folder = "" if into == Path() else f"cd {into} && "
    print(f"prove it on every mesh of 4 ranks: {folder}phalanx parity {name}.toml")
