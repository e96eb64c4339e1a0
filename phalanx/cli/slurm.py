"""``phalanx slurm``: a private Slurm to try things, and what runs inside allocations."""

from __future__ import annotations

import getpass
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from phalanx.cli.options import Json, print_json
from phalanx.cli.remote import when

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


@app.command()
def lead(
    what: Annotated[list[str], typer.Argument(metavar="JOB.toml | -- PROGRAM…")],
    state: Annotated[Path, typer.Option(help="Of the controller, on shared storage.")],
    url: Annotated[str, typer.Option(help="Where agents find the controller.")],
    nodes: Annotated[int, typer.Option(min=1, help="That the gang needs.")],
    gpus: Annotated[int, typer.Option(min=1, help="Ranks on each of them.")],
    world_size: Annotated[int, typer.Option(min=1)],
    spares: Annotated[int, typer.Option(min=0)] = 0,
    name: Annotated[str, typer.Option()] = "",
    team: Annotated[str, typer.Option()] = "default",
    least: Annotated[int, typer.Option(min=0)] = 0,
    most: Annotated[int, typer.Option(min=0)] = 0,
    retries: Annotated[int, typer.Option(min=0)] = 3,
    policy: Annotated[Path | None, typer.Option()] = None,
    server: Annotated[bool, typer.Option("--server", help="It runs elsewhere.")] = False,
) -> None:
    """Lead a job inside an allocation (the batch script runs this; see `submit --dry-run`).

    Ends with 0 or 1 when the job has ended, with 75 when it waits for its next allocation.
    """
    from phalanx.cli.options import load, refused_in_words
    from phalanx.config import resolve
    from phalanx.control.backends.lead import Lead, LeadError, LeadOptions
    from phalanx.control.backends.need import need_of
    from phalanx.control.backends.slurm.facts import SlurmSite
    from phalanx.control.backends.slurm.submit import remember_quarantined
    from phalanx.control.client import ClientError
    from phalanx.control.submission import Wanted

    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    number = os.environ.get("SLURM_JOB_ID", "")
    if not number:
        _refuse(RuntimeError("this runs inside an allocation of Slurm: SLURM_JOB_ID is not set"))
    job, argv = None, tuple(what)
    with refused_in_words():
        if what[0].endswith(".toml"):
            job, argv = resolve(load(Path(what[0]), None, world_size)[0], world_size), ()
        traffic = need_of(job, world_size, spares, gpus).traffic
    wanted = Wanted(
        job=job,
        argv=argv,
        ranks=world_size,
        folder=str(Path.cwd()),
        name=name,
        team=team,
        least=least,
        most=most,
        spares=spares,
        retries=retries,
        traffic=traffic,
        environment={"PHALANX_RUN": f"slurm-{number}"},
    )
    options = LeadOptions(
        state=state,
        url=url,
        wanted=wanted,
        node_gpus=gpus,
        slots=nodes,
        policy=policy,
        own_server=not server,
        feature=f"slurm_{number}" if server else "",
    )
    leading = Lead(options, SlurmSite(os.environ))
    try:
        code = leading.run()
    except (LeadError, ClientError, OSError) as error:
        _refuse(error)
    remember_quarantined(leading.quarantined)
    raise typer.Exit(code)


@app.command()
def account(
    job: Annotated[int, typer.Argument(min=1, help="Slurm's number of the job.")],
    state: Annotated[Path, typer.Option(help="Of its controller: …/slurm-NUMBER/control.")],
    json: Json = False,
) -> None:
    """What Slurm charged for a job beside what the ledger says it went to."""
    from phalanx.control.backends.slurm.accounting import reconciled, turns_of
    from phalanx.control.backends.slurm.programs import Programs, SlurmError
    from phalanx.control.ledger_file import stored_buckets
    from phalanx.control.store import StoreError

    try:
        found = reconciled(job, turns_of(Programs(), job), stored_buckets(state))
    except (SlurmError, StoreError, OSError) as error:
        _refuse(error)
    if json:
        print_json(found)
        return
    for turn in found.turns:
        print(f"{when(turn.start * 10**9)}  {turn.elapsed} s on {turn.gpus} GPUs: {turn.state}")
    print(f"Slurm charged {found.slurm_gpu_seconds} GPU-seconds; the ledger has")
    for name, seconds in sorted(found.buckets.items(), key=lambda item: -item[1]):
        print(f"  {name.replace('_', ' '):<24}{seconds:>12.1f}")
    print(f"  {'before and after agents':<24}{found.outside:>12.1f}")


def _refuse(error: Exception) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    raise typer.Exit(1) from None
