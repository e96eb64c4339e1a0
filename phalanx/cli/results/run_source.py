"""Where runs are looked up, and what is written of them: shared by ``runs`` and ``report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.connection import connected
from phalanx.observe.tracker.runs import Run, load_folder

Which = Annotated[
    str, typer.Argument(metavar="RUN", help="Number of a job, or folder of `phalanx train`.")
]
RUNS = Path("runs")  # where `phalanx train` puts them


class RunSource:
    """Where a run is looked up: a number is a server's, anything else a folder."""

    def __init__(self, server: str, state: Path | None, json: bool) -> None:
        self.server, self.state, self.json = server, state, json

    def get(self, which: str) -> Run:
        """One run."""
        if which.isdigit():
            with connected(self.server, self.json, self.state) as client:
                return client.get(f"/v1/runs/{which}", Run)
        try:
            return load_folder(find_run_folder(which))
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error), param_hint="RUN") from None


def find_run_folder(which: str) -> Path:
    """The folder of a run by its path, or by its name and id below ``runs/``."""
    for path in (Path(which), RUNS / which):
        if path.is_dir():
            return path
    raise ValueError(f"{which}: no such folder, and no number of a job")


def write_out(path: Path, data: bytes) -> None:
    """Write a file that the user named; what is wrong with it is said in words."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--out") from None
