"""``phalanx slurm``: a private Slurm to try things, and its accounting beside the ledger."""

from __future__ import annotations

import getpass
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Json
from phalanx.cli.output import exit_on, fail, print_json
from phalanx.cli.tables import counted, when

app = typer.Typer(no_args_is_help=True, help="Slurm: a sandbox, and its accounting.")
sandbox = typer.Typer(no_args_is_help=True, help="A private Slurm on this machine.")
app.add_typer(sandbox, name="sandbox")

Folder = Annotated[
    Path | None,
    typer.Option("--dir", help="Folder of the sandbox (default: in the temporary folder)."),
]


def _root(folder: Path | None) -> Path:
    default = Path(tempfile.gettempdir()) / f"phalanx-slurm-{getpass.getuser()}"
    root = (folder or default).absolute()
    if any(char.isspace() for char in str(root)):
        fail(f"--dir {root}: Slurm takes no folder with a blank in its name")
    return root


@sandbox.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=512, help="Nodes, each a slurmd.")] = 8,
    gpus_per_node: Annotated[
        int, typer.Option(min=0, max=64, help="Simulated number per node.")
    ] = 8,
    cpus_per_node: Annotated[
        int, typer.Option(min=1, max=512, help="Simulated number per node.")
    ] = 8,
    leaves: Annotated[int, typer.Option(min=1, help="Leaf switches in its topology.")] = 2,
    port: Annotated[int, typer.Option(min=1025, max=65000, help="First of several.")] = 16817,
    grace: Annotated[
        int, typer.Option(min=0, help="Grace period of preempted jobs, in seconds.")
    ] = 30,
    accounting: Annotated[bool, typer.Option(help="slurmdbd too (needs MariaDB).")] = False,
    folder: Folder = None,
    json: Json = False,
) -> None:
    """Start munge, slurmctld and slurmd processes here, with partitions batch and prod."""
    from phalanx.testing.slurm.files import SandboxOptions
    from phalanx.testing.slurm.sandbox import Sandbox, SandboxError

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
    with exit_on(SandboxError, OSError):
        Sandbox(options).up()
    if json:
        print_json({"slurm_conf": str(options.conf), "nodes": options.node_names})
        return
    gpus = counted(gpus_per_node, "GPU")
    print(f"{counted(nodes, 'node')} with {gpus} each, in batch (default) and prod")
    print(f"use it:  export SLURM_CONF={options.conf}")
    print(f"end it:  phalanx slurm sandbox down{f' --dir {folder}' if folder else ''}")


@sandbox.command()
def down(folder: Folder = None, json: Json = False) -> None:
    """End a sandbox, with the jobs that still run in it."""
    from phalanx.testing.slurm.sandbox import Sandbox, SandboxError

    with exit_on(SandboxError, OSError):
        Sandbox.at(_root(folder)).down()
    if json:
        print_json({"ended": str(_root(folder))})
    else:
        print("the sandbox has ended")


@app.command()
def account(
    job: Annotated[int, typer.Argument(min=1, help="Slurm's number of the job.")],
    state: Annotated[
        Path, typer.Option(help="State folder of its controller: …/slurm-NUMBER/control.")
    ],
    json: Json = False,
) -> None:
    """Compare what Slurm charged for a job with the ledger's account."""
    from phalanx.control.backends.slurm.accounting import reconciled, turns_of
    from phalanx.control.backends.slurm.programs import SlurmCommands, SlurmError
    from phalanx.control.server.replay import stored_buckets
    from phalanx.control.server.store.interface import StoreError

    with exit_on(SlurmError, StoreError, OSError):
        charged = reconciled(job, turns_of(SlurmCommands(), job), stored_buckets(state))
    if json:
        print_json(charged)
        return
    for turn in charged.turns:
        print(f"{when(turn.start * 10**9)}  {turn.elapsed} s on {turn.gpus} GPUs: {turn.state}")
    print(f"Slurm charged {charged.slurm_gpu_seconds} GPU-seconds; the ledger has")
    for name, seconds in sorted(charged.buckets.items(), key=lambda item: -item[1]):
        print(f"  {name.replace('_', ' '):<24}{seconds:>12.1f}")
    print(f"  {'before and after agents':<24}{charged.outside:>12.1f}")
