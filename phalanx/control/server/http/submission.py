"""What is submitted: a job file or a program, as a gang of slots on nodes with so many GPUs."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

from msgspec import Struct, structs

from phalanx.cluster.job_relations import Array, Dependency
from phalanx.cluster.jobs.job import GangShape, JobSpec, JobTimeouts
from phalanx.cluster.units import SECOND_NS
from phalanx.config import Backend, ConfigError, Job, to_toml
from phalanx.config.own_code import digest, read_code
from phalanx.config.schema import Train
from phalanx.control.host.launchers import ONE_NODE, recognised
from phalanx.control.wire.api_types import JobRequest, Submission
from phalanx.control.wire.payload import CodeFile, Payload, Script, TrainingWork, encode_payload
from phalanx.plan import AxisTraffic

LAUNCHERS = re.compile(r"python[0-9.]*|bash|sh|torchrun|accelerate|deepspeed|mpirun|srun|env")


class JobSchedule(Struct, frozen=True, kw_only=True):
    """When work runs, after what and how often, and what it may use."""

    after: tuple[Dependency, ...] = ()
    array: Array | None = None
    begin_ns: int = 0  # 0: at once
    deadline_ns: int = 0  # 0: none
    held: bool = False
    partition: str = ""  # "": any
    project: str = ""
    budget_gpu_seconds: int = 0  # 0: none
    budget_micro_dollars: int = 0  # 0: none
    time_min: float = 0.0  # minutes; 0: all of its time
    exclusive: bool | None = None  # None: as is usual
    mail: str = ""  # "": to nobody
    webhook: str = ""  # "": none


class RequestedWork(Struct, frozen=True, kw_only=True):
    """A job file's job, or a program, and what was asked for beside it."""

    job: Job | None = None  # checked and resolved; None: a program
    program_backend: Backend = Backend()  # of a program, which has no job file
    argv: tuple[str, ...] = ()
    ranks: int = 1
    folder: str = ""  # that it runs in
    name: str = ""
    team: str = "default"
    qos: str = "normal"
    priority: int = 0
    constraint: str = ""
    slot_gpus: int = 0  # 0: as nodes have
    slot_cpus: int = 1
    least: int = 0
    most: int = 0
    spares: int = 0
    retries: int = 3
    minutes: float = 0.0
    first_step_minutes: float = 0.0  # 0: as the job file, else the policy says
    hang_minutes: float = 0.0
    idle_minutes: float = 0.0
    preemptible: bool = False
    requeue: bool = False  # at its time limit
    traffic: tuple[AxisTraffic, ...] = ()
    environment: dict[str, str] = {}
    schedule: JobSchedule = JobSchedule()

    @property
    def backend(self) -> Backend:
        """Settings of engines, of the job file or given for a program."""
        return self.program_backend if self.job is None else self.job.backend

    def with_backend(self, backend: Backend) -> RequestedWork:
        """The same work with other settings of engines."""
        if self.job is None:
            return structs.replace(self, program_backend=backend)
        return structs.replace(self, job=structs.replace(self.job, backend=backend))

    @property
    def timeouts(self) -> JobTimeouts:
        """How long it may be quiet, as given, else by its job file."""
        train = self.job.train if self.job else Train()
        return JobTimeouts(
            first_step_ns=_ns(self.first_step_minutes or train.first_step_minutes),
            hang_ns=_ns(self.hang_minutes or train.hang_minutes),
            idle_ns=_ns(self.idle_minutes),
        )

    @property
    def title(self) -> str:
        """Its name, as given or by what it runs."""
        return self.name or (self.job.name if self.job else program_name(self.argv))


def program_name(argv: tuple[str, ...]) -> str:
    """What people call a program: the script or module, not what interprets or launches it."""
    program = Path(argv[0]).name
    if not LAUNCHERS.fullmatch(program):
        return program
    for word, following in pairwise((*argv[1:], "")):
        if word == "-m" and following:
            return following
        if word.endswith((".py", ".sh")) and not word.startswith("-"):
            return Path(word).name
    return program


def submission(wanted: RequestedWork, node_gpus: int) -> Submission:
    """The submission for a fleet whose nodes have so many GPUs."""
    shape, work = _described(wanted, wanted.slot_gpus or node_gpus)
    schedule = wanted.schedule
    _refuse_elsewhere(wanted)
    shape = structs.replace(
        shape,
        least_replicas=wanted.least,
        most_replicas=wanted.most,
        slot_cpus=wanted.slot_cpus,
        traffic=wanted.traffic,
        whole_nodes=schedule.exclusive is True,
    )
    spec = JobRequest(
        name=wanted.title,
        team=wanted.team,
        qos=wanted.qos,
        priority=wanted.priority,
        constraint=wanted.constraint,
        gang=shape,
        spares=wanted.spares,
        retries=wanted.retries,
        time_limit_ns=_ns(wanted.minutes),
        time_min_ns=_ns(schedule.time_min),
        timeouts=wanted.timeouts,
        preemptible=wanted.preemptible,
        requeue_at_limit=wanted.requeue,
        after=schedule.after,
        array=schedule.array,
        begin_ns=schedule.begin_ns,
        deadline_ns=schedule.deadline_ns,
        held=schedule.held,
        partition=schedule.partition,
        project=schedule.project,
        budget_gpu_seconds=schedule.budget_gpu_seconds,
        budget_micro_dollars=schedule.budget_micro_dollars,
        webhook=schedule.webhook,
        mail=schedule.mail,
    )
    return Submission(spec=spec, work=work)


def _refuse_elsewhere(wanted: RequestedWork) -> None:
    """ConfigError where something is asked for that a server's queue does not have."""
    schedule = wanted.schedule
    if schedule.array is not None and wanted.job is not None:
        rule = "all jobs of a job file's array would be the same, and write into one folder"
        raise ConfigError("--array", "", rule, "give a program that reads PHALANX_ARRAY_INDEX")
    if schedule.time_min and not schedule.time_min <= wanted.minutes:
        rule = "is the least that it accepts of its --minutes, "
        rule += f"which are {wanted.minutes:g}" if wanted.minutes else "and it has none"
        fix = "give --minutes, and at most as many here"
        raise ConfigError("--time-min", f"{schedule.time_min:g}", rule, fix)


def _described(wanted: RequestedWork, node_gpus: int) -> tuple[GangShape, Payload]:
    job, ranks = wanted.job, wanted.ranks
    environment = {**wanted.backend.environment, **wanted.environment}
    slot = slot_of(ranks, node_gpus)
    if job is None:
        _refuse_nodes(wanted.argv, GangShape(replicas=ranks, slot_gpus=slot))
        script = Script(argv=wanted.argv, folder=wanted.folder, environment=environment)
        return GangShape(replicas=ranks, slot_gpus=slot), script
    axes = job.parallel
    shape = GangShape(
        replicas=axes.data,
        tensor=axes.tensor,
        context=axes.context,
        pipeline=axes.pipeline,
        slot_gpus=slot,
    )
    texts = read_code(job.code, Path(wanted.folder))
    work = TrainingWork(
        toml=to_toml(job),
        world_size=ranks,
        folder=wanted.folder,
        environment=environment,
        files=tuple(CodeFile(name=n, sha256=digest(t), text=t) for n, t in texts.items()),
    )
    return shape, work


def _refuse_nodes(argv: tuple[str, ...], shape: GangShape) -> None:
    """ConfigError where a launcher would have to reach other nodes by itself."""
    found, nodes = recognised(argv), shape.slots(shape.replicas)
    if found is not None and found[0] in ONE_NODE and nodes > 1:
        rule = f"starts ranks of other nodes by ssh, and {nodes} nodes are asked for"
        fix = "give the program itself (one process a rank), torchrun, or ranks for one node"
        raise ConfigError("submit", found[0], rule, fix)


def spec_of(asked: JobRequest, work: Payload, job: Job | None) -> JobSpec:
    """What the core gets; ``job``: the trainer's, as the checked work describes it."""
    fields = {name: getattr(asked, name) for name in asked.__struct_fields__}
    del fields["budget_micro_dollars"]  # it is GPU time by now
    return JobSpec(**fields, payload=encode_payload(work), reports_steps=job is not None)


def _ns(minutes: float) -> int:
    return int(minutes * 60 * SECOND_NS)


def slot_of(ranks: int, node_gpus: int) -> int:
    """The largest share of a node that divides the ranks; nodes without GPUs give CPU slots."""
    return next((n for n in range(min(ranks, node_gpus), 0, -1) if ranks % n == 0), 0)
