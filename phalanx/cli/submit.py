"""``phalanx submit``: a job file of the trainer, or any program that runs under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import Json, Set, WorldSize, load, print_json, refused_in_words
from phalanx.cli.remote import ServerUrl, State, connected
from phalanx.cluster.job import SECOND_NS, Expected, GangShape, JobSpec
from phalanx.config import ConfigError, Job, check, resolve, to_toml
from phalanx.control.api_types import Done, Status, Submission
from phalanx.control.payload import Payload, Script, Train

submit = typer.Typer()


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
    minutes: Annotated[float, typer.Option(min=0, help="Time limit; 0: none.")] = 0.0,
    preemptible: Annotated[bool, typer.Option(help="Others may take its nodes.")] = False,
    server: ServerUrl = "",
    state: State = None,
    json: Json = False,
) -> None:
    """Put a job into the queue: JOB.toml, or `-- python train.py …` (one process a rank)."""
    with refused_in_words(json):
        job = _job(what, overrides, world_size)
    with connected(server, json, state) as client:
        node_gpus = slot_gpus or client.get("/v1/status", Status).node_gpus
        shape, expected, work = _described(job, what, world_size or 1, node_gpus)
        spec = JobSpec(
            name=name or (job[0].name if job else Path(what[0]).name),
            team=team,
            qos=qos,
            priority=priority,
            constraint=constraint,
            gang=_elastic(shape, least, most, slot_cpus),
            expected=expected,
            spares=spares,
            retries=retries,
            time_limit_ns=int(minutes * 60 * SECOND_NS),
            preemptible=preemptible,
        )
        done = client.post("/v1/jobs", Submission(spec=spec, work=work), Done)
    if json:
        print_json(done)
    else:
        number = done.jobs[0]
        print(f"job {number} ({spec.name}): {shape.gpus(shape.replicas)} GPUs; {done.message}")
        print(f"watch it: phalanx why {number}; phalanx logs -f {number}")


def _job(
    what: list[str], overrides: list[str] | None, world_size: int | None
) -> tuple[Job, int] | None:
    """The job of a job file and its ranks; None: it is a program."""
    if not what[0].endswith(".toml"):
        return None
    if len(what) > 1:
        raise ConfigError("submit", " ".join(what), "one job file at a time", "name one")
    job, ranks = load(Path(what[0]), overrides, world_size)
    check(job, ranks)
    return resolve(job, ranks), ranks


def _described(
    job: tuple[Job, int] | None, argv: list[str], ranks: int, node_gpus: int
) -> tuple[GangShape, Expected, Payload]:
    folder = str(Path.cwd())
    if job is None:
        shape = GangShape(replicas=ranks, slot_gpus=_slot(ranks, node_gpus))
        return shape, Expected(), Script(argv=tuple(argv), folder=folder)
    config, ranks = job
    axes = config.parallel
    shape = GangShape(
        replicas=axes.data,
        tensor=axes.tensor,
        context=axes.context,
        pipeline=axes.pipeline,
        slot_gpus=_slot(ranks, node_gpus),
    )
    expected = Expected(
        steps=config.train.steps,
        checkpoint_steps=config.checkpoint.every,
        samples_per_step=config.train.global_batch,
    )
    return shape, expected, Train(toml=to_toml(config), world_size=ranks, folder=folder)


def _slot(ranks: int, node_gpus: int) -> int:
    """The largest share of a node that divides the ranks; nodes without GPUs give CPU slots."""
    return next((n for n in range(min(ranks, node_gpus), 0, -1) if ranks % n == 0), 0)


def _elastic(shape: GangShape, least: int, most: int, cpus: int) -> GangShape:
    from msgspec import structs

    return structs.replace(shape, least_replicas=least, most_replicas=most, slot_cpus=cpus)
