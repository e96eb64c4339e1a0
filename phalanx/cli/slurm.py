"""``phalanx slurm``: a private Slurm to try things, and what runs inside allocations."""

from __future__ import annotations

import getpass
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Json, print_json

app = typer.Typer(no_args_is_help=True, help="Slurm: a sandbox, and what runs inside allocations.")
sandbox = typer.Typer(no_args_is_help=True, help="A private Slurm on this machine.")
app.add_typer(sandbox, name="sandbox")

Folder = Annotated[
    Path | None, typer.Option("--dir", help="Where it lives (default: in the temporary folder).")
]


def _root(folder: Path | None) -> Path:
    default = Path(tempfile.gettempdir()) / f"phalanx-slurm-{getpass.getuser()}"
    return (folder or default).absolute()


@sandbox.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=512, help="Nodes, each a slurmd.")] = 8,
    gpus_per_node: Annotated[int, typer.Option(min=0, max=64, help="That it pretends.")] = 8,
    cpus_per_node: Annotated[int, typer.Option(min=1, max=512, help="That it pretends.")] = 8,
    leaves: Annotated[int, typer.Option(min=1, help="Switches that nodes are spread on.")] = 2,
    port: Annotated[int, typer.Option(min=1025, max=65000, help="First of several.")] = 16817,
    grace: Annotated[int, typer.Option(min=0, help="Seconds that preempted jobs have.")] = 30,
    accounting: Annotated[bool, typer.Option(help="slurmdbd too (needs MariaDB).")] = False,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """Start munge, slurmctld and slurmd's on this machine; partitions batch and prod."""
    from phalanx.control.backends.slurm.sandbox import Sandbox, SandboxError
    from phalanx.control.backends.slurm.sandbox_files import SandboxOptions

    options = SandboxOptions(
        root=_root(folder),
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus_per_node,
        leaves=leaves,
        port=port,
        grace_seconds=grace,
        accounting=accounting,
    )
    try:
        Sandbox(options).up()
    except (SandboxError, OSError) as error:
        _refuse(error)
    if json:
        print_json({"slurm_conf": str(options.conf), "nodes": options.node_names})
        return
    print(f"{nodes} nodes with {gpus_per_node} GPUs each, partitions batch (default) and prod")
    print(f"use it:  export SLURM_CONF={options.conf}")
    print(f"end it:  phalanx slurm sandbox down{f' --dir {folder}' if folder else ''}")


@sandbox.command()
def down(folder: Folder = None) -> None:
    """End a sandbox, with the jobs that still run in it."""
    from phalanx.control.backends.slurm.sandbox import Sandbox, SandboxError

    try:
        Sandbox.at(_root(folder)).down()
    except (SandboxError, OSError) as error:
        _refuse(error)
    print("the sandbox has ended")


def _refuse(error: Exception) -> None:
    print(f"error: {error}", file=sys.stderr)
    raise typer.Exit(1) from None
