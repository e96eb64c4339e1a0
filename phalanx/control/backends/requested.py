"""What was asked for beside a job, as an engine takes it: used, or refused with what helps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import datetime
from typing import TypeVar

from msgspec import structs

from phalanx.config import Backend, ConfigError, Slurm
from phalanx.config.errors import written
from phalanx.control.server.http.submission import JobSchedule, RequestedWork

T = TypeVar("T", float, str)
EARLY_SECONDS = 60  # that Slurm may send a warning before its time
OWN_QUEUE = "orders jobs of a server's queue"
SERVERS_ONLY = "is for jobs of a server"
ELSEWHERE = "leave it out, or submit to a server or to Slurm"
# Of ``JobSchedule``: what needs a queue that orders jobs.
ORDERED = ("after", "array", "begin_ns", "deadline_ns", "time_min")
# What no engine of this name can carry out: the rule, and what helps.
REFUSED = {
    "slurm": {
        "priority": (OWN_QUEUE, 'give --qos, or --set backend.slurm.options=["--nice=100"]'),
        "preemptible": ("is for Slurm's partitions and QoS to say", "give --qos, or a partition"),
        "webhook": (SERVERS_ONLY, "give --mail"),
    },
    "ray": {
        "qos": (OWN_QUEUE, "leave it out"),
        "priority": (OWN_QUEUE, "leave it out"),
        "preemptible": (OWN_QUEUE, "leave it out"),
        "constraint": ("names features of a server's nodes", "start Ray on such nodes alone"),
        "requeue": ("Ray has no queue that the job could go back to", "leave it out"),
        **dict.fromkeys(ORDERED, ("Ray has no queue: jobs start at once", ELSEWHERE)),
        "held": ("Ray has no queue: jobs start at once", ELSEWHERE),
        "partition": ("Ray has no partitions", "start Ray on such nodes alone"),
        "project": ("Ray keeps no accounts", ELSEWHERE),
        "exclusive": ("agents take the nodes that Ray gives them", "leave it out"),
        "mail": ("Ray sends no mail", ELSEWHERE),
        "webhook": (SERVERS_ONLY, "leave it out"),
    },
    "kubernetes": {
        "qos": (OWN_QUEUE, "set backend.kubernetes.queue"),
        "priority": (OWN_QUEUE, "set backend.kubernetes.priority_class"),
        "preemptible": (OWN_QUEUE, "set backend.kubernetes.priority_class"),
        "constraint": (
            "names features of a server's nodes",
            "set backend.kubernetes.gpu_product or topology",
        ),
        "requeue": ("Kubernetes takes no job back into a queue", "leave it out"),
        **dict.fromkeys(ORDERED, ("Kubernetes has no such order of jobs", ELSEWHERE)),
        "project": ("Kubernetes keeps no accounts", "set backend.kubernetes.queue"),
        "exclusive": ("agents ask for GPUs, cores and memory of a node", "leave it out"),
        "mail": ("Kubernetes sends no mail", ELSEWHERE),
        "webhook": (SERVERS_ONLY, "leave it out"),
    },
}
# Fields of ``JobSchedule`` as `phalanx submit` is given them, where they are called otherwise.
SCHEDULE_OPTIONS = {
    "begin_ns": "--begin",
    "deadline_ns": "--deadline",
    "held": "--hold",
    "budget_gpu_seconds": "--budget-gpu-hours",
    "budget_micro_dollars": "--budget-dollars",
}
# Options of ``phalanx lead`` that repeat those of ``phalanx submit``.
OF_LEAD = (
    "team",
    "least",
    "most",
    "retries",
    "slot_cpus",
    "minutes",
    "first_step_minutes",
    "hang_minutes",
    "idle_minutes",
)


def fitted(engine: str, wanted: RequestedWork) -> RequestedWork:
    """The work as this engine carries it out; ConfigError names what it cannot."""
    plain = RequestedWork()
    for name, (rule, fix) in REFUSED[engine].items():
        of_schedule = name in JobSchedule.__struct_fields__
        asked, usual = (wanted.schedule, plain.schedule) if of_schedule else (wanted, plain)
        if (given := getattr(asked, name)) != getattr(usual, name):
            shown = written(given) if isinstance(given, str | int | float) else ""
            raise ConfigError(option(name), "" if given is True else shown, rule, fix)
    if engine == "ray":  # the process here leads the job, and has it all
        return wanted
    environment = {**wanted.backend.environment, **wanted.environment}
    carried = structs.replace(wanted.backend, environment=environment)
    wanted = structs.replace(wanted.with_backend(carried), environment={})
    return _fitted_to_slurm(wanted) if engine == "slurm" else _fitted_to_kubernetes(wanted)


def _fitted_to_kubernetes(wanted: RequestedWork) -> RequestedWork:
    """A partition is a queue there: Kueue's."""
    backend, asked = wanted.backend, wanted.schedule.partition
    if not asked:
        return wanted
    queue = _one("partition", asked, "backend.kubernetes.queue", backend.kubernetes.queue)
    kubernetes = structs.replace(backend.kubernetes, queue=queue)
    return wanted.with_backend(structs.replace(backend, kubernetes=kubernetes))


def _fitted_to_slurm(wanted: RequestedWork) -> RequestedWork:
    """Slurm's own limits and classes are what --minutes, --qos and --constraint mean there.

    The job ends by itself shortly before the limit, or with --requeue has turn after turn.
    """
    backend, slurm = wanted.backend, wanted.backend.slurm
    if wanted.requeue and not slurm.requeue:
        rule = "contradicts backend.slurm.requeue = false"
        raise ConfigError("--requeue", "", rule, "leave one of them out")
    hours, minutes = backend.hours, 0.0
    if wanted.minutes:
        hours = _one("minutes", wanted.minutes / 60, "backend.hours", backend.hours)
        if not wanted.requeue:
            minutes = wanted.minutes - (slurm.signal_seconds + EARLY_SECONDS) / 60
            if minutes <= 0:
                least = (slurm.signal_seconds + EARLY_SECONDS) / 60
                rule = "leaves no time before the warning (backend.slurm.signal_seconds)"
                raise ConfigError("--minutes", f"{wanted.minutes:g}", rule, f"above {least:g}")
    qos, constraint = slurm.qos, slurm.constraint
    if wanted.qos != RequestedWork().qos:
        qos = _one("qos", wanted.qos, "backend.slurm.qos", slurm.qos)
    if wanted.constraint:
        features = "".join(wanted.constraint.split())
        constraint = _one("constraint", features, "backend.slurm.constraint", constraint)
    slurm = _scheduled_by_slurm(structs.replace(slurm, qos=qos, constraint=constraint), wanted)
    made = structs.replace(backend, hours=hours, slurm=slurm)
    asked = wanted.schedule
    budgets = JobSchedule(
        budget_gpu_seconds=asked.budget_gpu_seconds,
        budget_micro_dollars=asked.budget_micro_dollars,
    )
    return structs.replace(wanted.with_backend(made), minutes=minutes, schedule=budgets)


def _scheduled_by_slurm(slurm: Slurm, wanted: RequestedWork) -> Slurm:
    """When, after what and how often, in Slurm's own options; jobs to wait for are Slurm's."""
    asked = wanted.schedule
    partition, account, dependency = slurm.partition, slurm.account, slurm.dependency
    if asked.partition:
        partition = _one("partition", asked.partition, "backend.slurm.partition", partition)
    if asked.project:
        account = _one("project", asked.project, "backend.slurm.account", account)
    if asked.after:
        jobs = ",".join(f"{each.kind}:{each.job}" for each in asked.after)
        dependency = _one("after", jobs, "backend.slurm.dependency", dependency)
    if asked.exclusive is False:
        rule = "agents take whole nodes of Slurm: all cores for loaders and keepers"
        raise ConfigError("--share", "", rule, "leave it out")
    if wanted.minutes and asked.time_min > wanted.minutes:
        rule = f"is above --minutes {wanted.minutes:g}"
        raise ConfigError("--time-min", f"{asked.time_min:g}", rule, "give less")
    if asked.array is not None and slurm.array:
        raise ConfigError("--array", "", "contradicts backend.slurm.array", "leave one of them out")
    for name in ("partition", "project", "mail"):
        if not re.fullmatch(r"[A-Za-z0-9._,:%+@-]*", getattr(asked, name)):
            rule = "must be one word that Slurm reads"
            raise ConfigError(option(name), written(getattr(asked, name)), rule, "leave blanks out")
    options = (*slurm.options, *_slurm_options(asked))
    return structs.replace(
        slurm, partition=partition, account=account, dependency=dependency, options=options
    )


def _slurm_options(asked: JobSchedule) -> Iterator[str]:
    if (array := asked.array) is not None:
        step = f":{array.step}" if array.step > 1 else ""
        width = f"%{array.width}" if array.width else ""
        yield f"--array={array.first}-{array.index(array.count - 1)}{step}{width}"
    for name, at_ns in (("begin", asked.begin_ns), ("deadline", asked.deadline_ns)):
        if at_ns:
            yield f"--{name}={datetime.fromtimestamp(at_ns // 10**9):%Y-%m-%dT%H:%M:%S}"
    if asked.held:
        yield "--hold"
    if asked.time_min:
        yield f"--time-min={math.ceil(asked.time_min)}"
    if asked.mail:
        yield f"--mail-user={asked.mail}"
        yield "--mail-type=END,FAIL,INVALID_DEPEND"


def _one(name: str, given: T, key: str, setting: T) -> T:
    """What an option and a setting both say; refused where they differ."""
    if setting and setting != given:
        rule = f"contradicts {key} = {written(setting)}"
        raise ConfigError(option(name), written(given), rule, "leave one of them out")
    return given


def option(name: str) -> str:
    """A field as `phalanx submit` is given it."""
    return SCHEDULE_OPTIONS.get(name) or f"--{name.replace('_', '-')}"


def lead_words(wanted: RequestedWork) -> tuple[str, ...]:
    """Options of the leading process that say what was asked for."""
    plain = RequestedWork()
    argv: list[str] = ["--name", wanted.title]
    for name in OF_LEAD:
        if (given := getattr(wanted, name)) != getattr(plain, name):
            argv += [option(name), f"{given:g}" if isinstance(given, float) else str(given)]
    asked = wanted.schedule
    if asked.budget_gpu_seconds:
        argv += [option("budget_gpu_seconds"), f"{asked.budget_gpu_seconds / 3600:g}"]
    if asked.budget_micro_dollars:
        argv += [option("budget_micro_dollars"), f"{asked.budget_micro_dollars / 1e6:g}"]
    return tuple(argv)


def environment_file(backend: Backend) -> str:
    """Variables of a program as the leading process reads them, a line each; "": none."""
    lines = []
    for name, value in backend.environment.items():
        if "\n" in value or "\r" in value:
            rule = "has several lines, which a batch script does not carry"
            raise ConfigError("--env", name, rule, "put it into a file that the program reads")
        lines.append(f'{name}="{value}"\n')
    return "".join(lines)
