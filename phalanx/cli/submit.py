"""``phalanx submit``: a job file of the trainer, or any program that runs under torchrun."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import (
    Json,
    Set,
    WorldSize,
    load_named,
    print_json,
    refuse_name,
    refused_in_words,
)
from phalanx.cli.remote import ServerUrl, State, connected
from phalanx.config import ConfigError, Job
from phalanx.control.api_types import Done, Status
from phalanx.control.submission import Wanted, submission

submit = typer.Typer()

MOST_MINUTES = 10 * 365 * 24 * 60


@submit.command()
def put_into_queue(
    what: Annotated[
        list[str],
        typer.Argument(metavar="JOB.toml | -- PROGRAM…", help="A job file, or a program."),
    ],
    overrides: Set = None,
    world_size: WorldSize = None,
    name: Annotated[str, typer.Option(help="Default: the job's, or the program's.")] = "",
    team: Annotated[str, typer.Option(help="Whose job it is (default: the token's).")] = "default",
    qos: Annotated[str, typer.Option(help="Class of service.")] = "normal",
    priority: Annotated[int, typer.Option(help="Among the jobs of its class.")] = 0,
    constraint: Annotated[str, typer.Option(help='Nodes it takes, e.g. "h100 & nvlink".')] = "",
    slot_gpus: Annotated[int, typer.Option(min=0, help="GPUs a node; 0: as nodes have.")] = 0,
    slot_cpus: Annotated[int, typer.Option(min=1, help="CPUs on each node.")] = 1,
    least: Annotated[int, typer.Option(min=0, help="Fewest replicas; 0: not elastic.")] = 0,
    most: Annotated[int, typer.Option(min=0, help="Most replicas; 0: as submitted.")] = 0,
    spares: Annotated[int, typer.Option(min=0, help="Nodes kept ready for it alone.")] = 0,
    retries: Annotated[int, typer.Option(min=0, help="After failures of its own.")] = 3,
    minutes: Annotated[
        float, typer.Option(min=0, max=MOST_MINUTES, help="Time limit; 0: none.")
    ] = 0.0,
    preemptible: Annotated[bool, typer.Option(help="Others may take its nodes.")] = False,
    requeue: Annotated[
        bool, typer.Option("--requeue", help="At its time limit it goes back into the queue.")
    ] = False,
    backend: Annotated[
        str, typer.Option(help="Engine that gives the nodes: slurm, ray, kubernetes.")
    ] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what it gets.")] = False,
    policy: Annotated[
        Path | None, typer.Option(help="TOML of the policy, for a controller in the job.")
    ] = None,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Put a job into the queue: JOB.toml, or `-- python train.py …` (one process a rank).

    With --backend another engine gives the nodes; what it gets is shown by --dry-run.
    """
    with refused_in_words(json):
        job = _job(what, overrides, world_size, name)
    wanted = Wanted(
        job=job[0] if job else None,
        argv=() if job else tuple(what),
        ranks=job[1] if job else world_size or 1,
        folder=str(Path.cwd()),
        name=name,
        team=team,
        qos=qos,
        priority=priority,
        constraint=constraint,
        slot_gpus=slot_gpus,
        slot_cpus=slot_cpus,
        least=least,
        most=most,
        spares=spares,
        retries=retries,
        minutes=minutes,
        preemptible=preemptible,
        requeue=requeue,
    )
    if backend:
        from phalanx.cli.backends import to_backend

        to_backend(backend, wanted, dry_run=dry_run, server=server, policy=policy, json=json)
        return
    with connected(server, json, state) as client:
        while (status := client.get("/v1/status", Status)).starting:
            time.sleep(0.2)  # its nodes are about to join: what they have is not known yet
        node_gpus = slot_gpus or status.node_gpus
        made = submission(wanted, node_gpus)
        done = client.post("/v1/jobs", made, Done)
    if json:
        print_json(done)
    else:
        number, shape = done.jobs[0], made.spec.gang
        print(f"job {number} ({made.spec.name}): {shape.gpus(shape.replicas)} GPUs; {done.message}")
        print(f"watch it: phalanx why {number}; phalanx logs -f {number}")


def _job(
    what: list[str], overrides: list[str] | None, world_size: int | None, name: str
) -> tuple[Job, int] | None:
    """The job of a job file and its ranks, called ``name``; None: it is a program."""
    if not what[0].endswith(".toml"):
        given = Path(what[0])
        if len(what) == 1 and (
            given.is_dir() or (given.is_file() and not os.access(given, os.X_OK))
        ):
            rule = "is neither a job file (its name ends in .toml) nor a program that can be run"
            fix = "submit JOB.toml, or -- python train.py …"
            raise ConfigError("submit", what[0], rule, fix)
        refuse_name(name)
        return None
    if len(what) > 1:
        raise ConfigError("submit", " ".join(what), "one job file at a time", "name one")
    return load_named(Path(what[0]), overrides, world_size, name)
