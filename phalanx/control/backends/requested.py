"""What was asked for beside a job, as an engine takes it: used, or refused with what helps."""

from __future__ import annotations

from typing import TypeVar

from msgspec import structs

from phalanx.config import Backend, ConfigError
from phalanx.config.errors import written
from phalanx.control.server.http.submission import RequestedWork

T = TypeVar("T", float, str)
EARLY_SECONDS = 60  # that Slurm may send a warning before its time
OWN_QUEUE = "orders jobs of a server's queue"
# What no engine of this name can carry out: the rule, and what helps.
REFUSED = {
    "slurm": {
        "priority": (OWN_QUEUE, 'give --qos, or --set backend.slurm.options=["--nice=100"]'),
        "preemptible": ("is for Slurm's partitions and QoS to say", "give --qos, or a partition"),
    },
    "ray": {
        "qos": (OWN_QUEUE, "leave it out"),
        "priority": (OWN_QUEUE, "leave it out"),
        "preemptible": (OWN_QUEUE, "leave it out"),
        "constraint": ("names features of a server's nodes", "start Ray on such nodes alone"),
        "requeue": ("Ray has no queue that the job could go back to", "leave it out"),
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
    },
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
        if (given := getattr(wanted, name)) != getattr(plain, name):
            raise ConfigError(option(name), "" if given is True else written(given), rule, fix)
    if engine == "ray":  # the process here leads the job, and has it all
        return wanted
    environment = {**wanted.backend.environment, **wanted.environment}
    carried = structs.replace(wanted.backend, environment=environment)
    wanted = structs.replace(wanted.with_backend(carried), environment={})
    return _fitted_to_slurm(wanted) if engine == "slurm" else wanted


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
    made = structs.replace(
        backend,
        hours=hours,
        slurm=structs.replace(slurm, qos=qos, constraint=constraint),
    )
    return structs.replace(wanted.with_backend(made), minutes=minutes)


def _one(name: str, given: T, key: str, known: T) -> T:
    """What an option and a setting both say; refused where they differ."""
    if known and known != given:
        rule = f"contradicts {key} = {written(known)}"
        raise ConfigError(option(name), written(given), rule, "leave one of them out")
    return given


def option(name: str) -> str:
    """A field as `phalanx submit` is given it."""
    return f"--{name.replace('_', '-')}"


def lead_words(wanted: RequestedWork) -> tuple[str, ...]:
    """Options of the leading process that say what was asked for."""
    plain = RequestedWork()
    argv: list[str] = ["--name", wanted.title]
    for name in OF_LEAD:
        if (given := getattr(wanted, name)) != getattr(plain, name):
            argv += [option(name), f"{given:g}" if isinstance(given, float) else str(given)]
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
