"""``phalanx submit``: a job file of the trainer, or any program that runs under torchrun."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer
from msgspec import structs

from phalanx.cli.connection import connected, exit_on_server_error, send_confirmed
from phalanx.cli.job_file import load_named, missing_corpora, refuse_name
from phalanx.cli.job_wait import ended_well
from phalanx.cli.jobs.environment import variables
from phalanx.cli.option_struct import takes_options
from phalanx.cli.options import (
    MOST_MINUTES,
    FirstStepMinutes,
    HangMinutes,
    IdleMinutes,
    Json,
    ServerUrl,
    Set,
    State,
    WorldSize,
)
from phalanx.cli.output import exit_on, exit_on_config_error, print_json
from phalanx.cli.queue.schedule_options import ScheduleOptions, describe_schedule
from phalanx.cli.tables import counted, plain
from phalanx.cluster.plan_record import PlanRecord
from phalanx.cluster.units import SECOND_NS
from phalanx.config import Backend, ConfigError, Job, program_backend
from phalanx.control.client.client import Client, ClientError
from phalanx.control.host.launchers import recognised
from phalanx.control.server.http.submission import RequestedWork, submission
from phalanx.control.trust.secrets import secrets_note
from phalanx.control.wire.api_types import JobsSubmitted, Submission
from phalanx.control.wire.payload import Script, TrainingWork
from phalanx.hardware import count_cuda

FABRIC_MINUTES, FABRIC_START_SECONDS = 10.0, 120.0

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(ScheduleOptions):
    """What ``phalanx submit`` is asked for."""

    what: Annotated[
        list[str],
        typer.Argument(metavar="JOB.toml | -- PROGRAM…", help="A job file, or a program."),
    ]
    overrides: Set = None
    world_size: WorldSize = None
    name: Annotated[str, typer.Option(help="Default: the job's, or the program's.")] = ""
    team: Annotated[
        str, typer.Option(help="Team that the job belongs to (default: the token's).")
    ] = "default"
    qos: Annotated[str, typer.Option(help="Class of service.")] = "normal"
    priority: Annotated[int, typer.Option(help="Priority among jobs of the same class.")] = 0
    constraint: Annotated[str, typer.Option(help='Nodes it takes, e.g. "h100 & nvlink".')] = ""
    slot_gpus: Annotated[int, typer.Option(min=0, help="GPUs a node; 0: as nodes have.")] = 0
    slot_cpus: Annotated[int, typer.Option(min=1, help="CPUs on each node.")] = 1
    least: Annotated[int, typer.Option(min=0, help="Fewest replicas; 0: not elastic.")] = 0
    most: Annotated[int, typer.Option(min=0, help="Most replicas; 0: as submitted.")] = 0
    spares: Annotated[int, typer.Option(min=0, help="Spare nodes kept ready for this job.")] = 0
    retries: Annotated[
        int, typer.Option(min=0, help="Restarts allowed after failures of the job's own.")
    ] = 3
    first_step_minutes: FirstStepMinutes = 0.0
    hang_minutes: HangMinutes = 0.0
    idle_minutes: IdleMinutes = 0.0
    minutes: Annotated[
        float, typer.Option(min=0, max=MOST_MINUTES, help="Time limit; 0: none.")
    ] = 0.0
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=VALUE]",
            help="Set a variable for the job; without a value: copy it from here.",
        ),
    ] = None
    env_file: Annotated[
        list[Path] | None,
        typer.Option(help="File of variables for the job, one NAME=VALUE per line."),
    ] = None
    export: Annotated[
        str, typer.Option(metavar="ALL|NAME,…", help="Variables copied from this environment.")
    ] = ""
    workdir: Annotated[
        Path | None, typer.Option(help="Folder that it runs in (default: this one).")
    ] = None
    preemptible: Annotated[bool, typer.Option(help="Allow other jobs to preempt it.")] = False
    requeue: Annotated[
        bool, typer.Option("--requeue", help="Queue it again when it reaches its time limit.")
    ] = False
    backend: Annotated[
        str, typer.Option(help="Engine that gives the nodes: slurm, ray, kubernetes.")
    ] = ""
    check_fabric: Annotated[
        bool,
        typer.Option(
            "--check-fabric",
            help="First measure pairs of the free nodes; slow ones: do not submit.",
        ),
    ] = False
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Wait until it has ended; exit with 0 only if it succeeded."),
    ] = False
    timeout: Annotated[
        float, typer.Option(min=0, help="With --wait: seconds to wait at most; 0: for ever.")
    ] = 0.0
    yes: Annotated[
        bool, typer.Option("--yes", help="Submit without asking, whatever the planned cost.")
    ] = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be submitted; submit nothing.")
    ] = False
    policy: Annotated[
        Path | None, typer.Option(help="Policy file (TOML) for a controller inside the job.")
    ] = None

    def wanted(self) -> RequestedWork:
        """The job as it is described to a server; ConfigError where there is none."""
        job = _job(self.what, self.overrides, self.world_size, self.name)
        return RequestedWork(
            job=job[0] if job else None,
            argv=() if job else tuple(self.what),
            program_backend=Backend() if job else program_backend(self.overrides or ()),
            ranks=job[1] if job else self.world_size or 1,
            folder=str(Path.cwd() if self.workdir is None else self.workdir.absolute()),
            name=self.name,
            team=self.team,
            qos=self.qos,
            priority=self.priority,
            constraint=self.constraint,
            slot_gpus=self.slot_gpus,
            slot_cpus=self.slot_cpus,
            least=self.least,
            most=self.most,
            spares=self.spares,
            retries=self.retries,
            first_step_minutes=self.first_step_minutes,
            hang_minutes=self.hang_minutes,
            idle_minutes=self.idle_minutes,
            minutes=self.minutes,
            preemptible=self.preemptible,
            requeue=self.requeue,
            environment=variables(self.env or (), self.env_file or (), self.export),
            schedule=self.schedule(datetime.now().astimezone()),
        )


@app.command()
@takes_options
def submit(
    options: SubmitOptions, server: ServerUrl = "", state: State = None, json: Json = False
) -> None:
    """Put a job into the queue: JOB.toml, or `-- python train.py …` (one process a rank).

    With --backend another engine gives the nodes. --dry-run shows what the queue, or that engine,
    would get, and submits nothing.
    """
    with exit_on_config_error(json):
        wanted = options.wanted()
    for line in missing_corpora(wanted.job, wanted.folder):
        print(plain(f"warning: {line}"), file=sys.stderr)
    policy, dry_run = options.policy, options.dry_run
    if options.wait and (options.backend or dry_run):
        raise typer.BadParameter("--wait is for jobs of a server: it follows one that was sent")
    if options.wait and options.array:
        raise typer.BadParameter("--wait follows one job: look at an array with `phalanx ps`")
    if options.check_fabric and (options.backend or dry_run):
        raise typer.BadParameter("--check-fabric measures nodes of a server, and then submits")
    if options.timeout and not options.wait:
        raise typer.BadParameter("--timeout bounds --wait: give both, or --minutes for the job")
    if options.backend:
        if state is not None:
            raise typer.BadParameter("--state is a server's: a job of an engine has its own")
        from phalanx.cli.jobs.engines import to_backend

        engine = options.backend
        to_backend(engine, wanted, dry_run=dry_run, server=server, policy=policy, json=json)
    elif policy is not None:
        raise typer.BadParameter("is the server's here: use it with --backend, or `phalanx up`")
    elif dry_run:
        _show_what_would_be_sent(wanted, server, state, json)
    else:
        if options.check_fabric:
            _refuse_slow_fabric(wanted, server, state, json)
        quiet = json and options.wait
        number = _send(wanted, server, state, json, quiet=quiet, confirmed=options.yes)
        if options.wait and not ended_well(number, server, state, json, options.timeout):
            raise typer.Exit(1)


def _refuse_slow_fabric(wanted: RequestedWork, server: str, state: Path | None, json: bool) -> None:
    """Measure the free nodes that the job could get; where something is slow, nothing is sent."""
    from phalanx.control.client.fabric_job import FabricError, FabricJob, measure_fabric, pairs_only
    from phalanx.doctor.fabric.report import FabricRequest, all_clear, problems_of

    request = pairs_only(FabricRequest())
    asked = FabricJob(
        request=request,
        constraint=wanted.constraint,
        team=wanted.team,
        minutes=FABRIC_MINUTES,
        start_seconds=FABRIC_START_SECONDS,
    )
    with exit_on(FabricError), connected(server, json, state) as client:
        report = measure_fabric(client, asked)
    problems = problems_of(report)
    for each in problems:
        print(plain(f"SLOW  {each.text}"), file=sys.stderr)
    if problems:
        print("not submitted: drain what is slow, or leave --check-fabric out", file=sys.stderr)
        raise typer.Exit(1)
    print(f"fabric: {len(report.nodes)} free nodes measured, {all_clear(report)}", file=sys.stderr)


def _send(
    wanted: RequestedWork,
    server: str,
    state: Path | None,
    json: bool,
    *,
    quiet: bool,
    confirmed: bool,
) -> int:
    """Put the job into a server's queue; its number."""
    with connected(server, json, state) as client, exit_on_config_error(json):
        made = submission(wanted, wanted.slot_gpus or client.node_gpus())
        made = structs.replace(made, confirmed=confirmed)
        done = send_confirmed(made, lambda each: client.post("/v1/jobs", each, JobsSubmitted))
    if note := secrets_note(made.work.environment):
        print(plain(note), file=sys.stderr)
    if json and not quiet:
        print_json(done)
    elif not json:
        for line in describe_answer(made, done):
            print(plain(line))
    return done.jobs[0]


def describe_answer(made: Submission, done: JobsSubmitted) -> list[str]:
    """What became of a submission, what it may take and when it starts, a line each."""
    number, shape, array = done.jobs[0], made.spec.gang, made.spec.array
    which = f"job {number}" if array is None else f"jobs {number}-{number + array.count - 1}"
    each = " each" if array is not None else ""
    gpus = shape.gpus(shape.replicas)
    lines = [f"{which} ({made.spec.name}): {counted(gpus, 'GPU')}{each}; {done.message}"]
    for plan in done.plans:
        lines += describe_plan(plan)
    if (cost := done.estimate) is not None:
        most = "at most, by the time limit" if cost.by_limit else "estimated"
        lines.append(f"{most}: {cost.gpu_hours:,.3g} GPU-hours, {cost.dollars:,.2f} dollars")
    if done.start:
        lines.append(f"start: {done.start}")
    return [*lines, f"watch it: phalanx why {number}; phalanx logs -f {number}"]


def describe_plan(plan: PlanRecord) -> list[str]:
    """What the server planned, a line each."""
    lines = [f"planned: {plan.summary()}"] if plan.summary() else []
    if plan.chosen:
        lines.append(f"chosen: {', '.join(plan.chosen)}")
    if plan.problem:
        lines.append(f"not planned: {plan.problem}")
    return lines


def _show_what_would_be_sent(
    wanted: RequestedWork, server: str, state: Path | None, json: bool
) -> None:
    """The submission as the server would get it; nothing is sent but the question what nodes have.

    Where none answers and none was named, nodes count as machines like this one.
    """
    named = bool(server or os.environ.get("PHALANX_SERVER"))
    node_gpus, source = wanted.slot_gpus, "as --slot-gpus says"
    if not node_gpus:
        with exit_on_server_error(json):
            try:
                node_gpus = Client(server, state).node_gpus()
                source = "as the server's nodes have"
            except ClientError as error:
                if named or error.status:
                    raise
                node_gpus, source = count_cuda(), "as this machine has: no server answers here"
    with exit_on_config_error(json):
        made = submission(wanted, node_gpus)
    if json:
        print_json({"submitted": False, "node_gpus": node_gpus, "submission": made})
        return
    for name, text in describe_submission(
        made, wanted, f"{node_gpus} GPUs a node, {source}"
    ).items():
        print(plain(f"{name + ':':<11}{text}"))
    print("nothing was submitted (--dry-run); --json shows every field")


def describe_submission(made: Submission, wanted: RequestedWork, nodes: str) -> dict[str, str]:
    """What a server would get, a few words a line."""
    spec, shape, work = made.spec, made.spec.gang, made.work
    axes = {"tensor": shape.tensor, "context": shape.context, "pipeline": shape.pipeline}
    ways = ", ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    limit = spec.time_limit_ns / 60 / SECOND_NS
    lines = {
        "job": spec.name,
        "owner": f"team {spec.team}, class {spec.qos}, priority {spec.priority}",
        "gang": f"{shape.replicas} replicas" + (f" ({ways})" if ways else ""),
        "nodes": f"{shape.slots(shape.replicas)} slots of {shape.slot_gpus} GPUs and "
        f"{shape.slot_cpus} CPUs ({nodes}), {spec.spares} spares"
        + (f", with {spec.constraint}" if spec.constraint else ""),
        "limits": (f"{limit:g} minutes" if limit else "no time limit")
        + f", {spec.retries} retries of its own failures"
        + (", may be preempted" if spec.preemptible else ""),
    }
    if schedule := describe_schedule(spec):
        lines["schedule"] = schedule
    if shape.least_replicas:
        lines["elastic"] = f"{shape.least_replicas} to {shape.most_replicas or shape.replicas}"
    if isinstance(work, TrainingWork) and wanted.job is not None:
        every = wanted.job.checkpoint.every
        steps = f"{wanted.job.train.steps} steps, "
        steps += f"a checkpoint every {every}" if every else "no checkpoints"
        lines["runs"] = f"the trainer on {work.world_size} ranks in {work.folder}: {steps}"
    elif isinstance(work, Script):
        each = "one launcher a node" if recognised(work.argv) else "one process a rank"
        lines["runs"] = f"{shlex.join(work.argv)} in {work.folder}, {each}"
    if work.environment:
        lines["variables"] = ", ".join(work.environment)
    return lines


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
