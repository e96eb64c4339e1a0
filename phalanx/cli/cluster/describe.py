"""``phalanx describe``: this machine as its agent would describe it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import Json
from phalanx.cli.output import exit_on_config_error, print_json

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class DescribeCommand:
    """What ``phalanx describe`` is asked for."""

    name: Annotated[str, typer.Option(help="Of the node, for the site file.")] = ""
    site_file: Annotated[str, typer.Option(help="TOML file: where the site's nodes stand.")] = ""
    hardware: Annotated[
        str, typer.Option(help="Folder of recorded hardware, read instead of this machine.")
    ] = ""
    record: Annotated[Path | None, typer.Option(help="Folder to record what is read into.")] = None


@app.command()
@takes_options
def describe(command: DescribeCommand, json: Json = False) -> None:
    """Describe this machine as a node: hardware, network and place, each fact with its source.

    With --record what is read is kept in a folder, which agents read with --hardware.
    """
    from phalanx.cli.cluster.description import print_description
    from phalanx.control.agent.description import DescriptionSources

    with exit_on_config_error(json):
        sources = DescriptionSources(hardware=command.hardware, site_file=command.site_file)
        name = command.name or socket.gethostname()
        description = sources.checked().describe(name, None, record=command.record)
    if json:
        print_json(description)
    else:
        print_description(description)
