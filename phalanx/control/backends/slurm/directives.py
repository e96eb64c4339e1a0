"""What Slurm is asked for: the lines of #SBATCH, each with the reason why it is there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from phalanx.config import Backend, ConfigError
from phalanx.control.backends.need import Need
from phalanx.control.backends.requested import EARLY_SECONDS

DEFAULT_HOURS = 24.0  # of an allocation where nothing says how long
START_SECONDS = 600  # that a predicted time limit leaves for staging, loading and compiling


class ScriptOptions(Struct, frozen=True, kw_only=True):
    """What a script is made of."""

    name: str
    backend: Backend
    need: Need
    python: str
    folder: str  # that the job runs in
    runs: Path  # folder of this name's runs, on shared storage
    job_toml: str = ""  # "": a program
    argv: tuple[str, ...] = ()
    environment: str = ""  # of a program, as a file has it
    slot_cpus: int = 1  # that a node must have at least
    longest_hours: float = 0.0  # that the partition gives; 0: not limited, or not known
    lead: tuple[str, ...] = ()  # more options of the leading process
    switches: int = 0
    segment: bool = True  # this Slurm has it
    exclude: tuple[str, ...] = ()
    quarantined: int = 0  # of those, how many Phalanx found itself
    server: str = ""  # "": the controller runs in the job
    policy: str = ""


class Directive(Struct, frozen=True):
    """A line, or several, and why."""

    text: str
    why: str = ""


def directives(options: ScriptOptions) -> Iterator[Directive]:
    """All of them, as a script has them."""
    for directive in (
        *_who(options),
        *_nodes(options),
        *_place(options),
        *_time(options),
        *_fate(options),
    ):
        yield Directive(f"#SBATCH {directive.text}", directive.why)


# Of a batch script alone.
SCRIPT_ONLY = ("--output", "--open-mode", "--requeue", "--no-requeue", "--array", "--signal")


def allocation_words(options: ScriptOptions) -> list[str]:
    """What salloc is asked for: the same nodes as by a script."""
    parts = (_who, _nodes, _place, _time, _fate)
    words = [line.text for part in parts for line in part(options)]
    return [word for word in words if not word.startswith(SCRIPT_ONLY)]


def _who(options: ScriptOptions) -> Iterator[Directive]:
    slurm = options.backend.slurm
    yield Directive(f"--job-name={options.name}")
    for name in ("account", "partition", "qos", "reservation"):
        if value := getattr(slurm, name):
            yield Directive(f"--{name}={value}", f"backend.slurm.{name}")
    output = f"{options.runs}/slurm-%j.out"
    yield Directive(f"--output={output}", "One file for all turns of the job:")
    yield Directive("--open-mode=append", "a requeued job adds to it")


def _nodes(options: ScriptOptions) -> Iterator[Directive]:
    need, slurm = options.need, options.backend.slurm
    spare = f" and {need.spares} that stand by in the same allocation" if need.spares else ""
    yield Directive(
        f"--nodes={need.nodes}", f"{need.slots} for the gang of {need.ranks} ranks{spare}"
    )
    yield Directive(
        "--ntasks-per-node=1",
        "One task a node: the agent. It starts the workers, and binds each\n"
        "to its GPU, cores and NUMA node by itself.",
    )
    if need.wants_gpus:
        kind = f"{slurm.gpu_type}:" if slurm.gpu_type else ""
        gpus = f"{kind}{need.gpus_per_node}"
        flag = f"--gres=gpu:{gpus}" if slurm.gres else f"--gpus-per-node={gpus}"
        yield Directive(flag, "One rank a GPU")
    if options.slot_cpus > 1:
        yield Directive(f"--mincpus={options.slot_cpus}", "--slot-cpus")
    yield Directive(
        "--exclusive", "All cores of the node for loaders and keepers, and no noisy guest"
    )
    if need.memory_bytes:
        gib = math.ceil(need.memory_bytes / 2**30)
        yield Directive(
            f"--mem={gib}G",
            "As predicted: each rank's process, and six snapshots of its state\n"
            "(four of its own, two of its neighbour's)",
        )
    else:
        yield Directive(
            "--mem=0", "All memory of the node: snapshots live there (no backend.cluster)"
        )


def _place(options: ScriptOptions) -> Iterator[Directive]:
    slurm = options.backend.slurm
    if slurm.constraint:
        yield Directive(f"--constraint={slurm.constraint}", "backend.slurm.constraint")
    if slurm.nodelist:
        yield Directive(f"--nodelist={slurm.nodelist}", "backend.slurm.nodelist")
    if options.exclude:
        found = f", {options.quarantined} of which Phalanx quarantined" * bool(options.quarantined)
        yield Directive(f"--exclude={','.join(options.exclude)}", f"Nodes to stay away from{found}")
    if options.switches:
        yield Directive(
            f"--switches={options.switches}@{slurm.switches_minutes}",
            f"As few leaf switches as {options.need.nodes} nodes need; Slurm may wait\n"
            f"{slurm.switches_minutes} minutes for them. Ranks are ordered by leaf inside.",
        )
    if slurm.segment and options.segment:
        yield Directive(f"--segment={slurm.segment}", "Nodes of one block stay together")


def _time(options: ScriptOptions) -> Iterator[Directive]:
    need, slurm = options.need, options.backend.slurm
    if need.hours:
        hours, why = need.hours, "--minutes, or backend.hours"
        if need.predicted:
            hours += (START_SECONDS + slurm.signal_seconds) / 3600
            why = f"{need.predicted};\n{START_SECONDS // 60} minutes to start, and the warning"
        yield Directive(f"--time={_clock(hours)}", why)
        if need.least_hours < hours and not any(
            line.startswith("--time-min") for line in slurm.options
        ):
            yield Directive(
                f"--time-min={_clock(need.least_hours)}",
                "Backfill may start it with less: it goes on in the next allocation",
            )
    else:
        hours = min(DEFAULT_HOURS, options.longest_hours or DEFAULT_HOURS)
        then = "then back to the queue" if slurm.requeue else "then it ends"
        yield Directive(
            f"--time={_clock(hours, math.floor)}",
            f"Nobody said how long (--minutes, backend.hours or backend.cluster): {hours:g} h or\n"
            f"what the partition gives, {then}",
        )
    yield Directive(
        f"--signal=B:USR1@{slurm.signal_seconds}",
        f"{slurm.signal_seconds} s before the limit, or when preempted (sites with\n"
        "preempt_send_user_signal), the script is told: snapshot, flush, requeue.",
    )


def _fate(options: ScriptOptions) -> Iterator[Directive]:
    slurm = options.backend.slurm
    if slurm.requeue:
        yield Directive("--requeue", "Preempted, or its first node lost: back to the queue")
    else:
        yield Directive("--no-requeue", "backend.slurm.requeue = false")
    yield Directive("--no-kill", "The loss of a node is ours to deal with: a spare takes its place")
    if slurm.dependency:
        yield Directive(f"--dependency={slurm.dependency}", "backend.slurm.dependency")
        yield Directive("--kill-on-invalid-dep=yes", "Do not wait for ever for what cannot come")
    if slurm.array:
        width = f"%{slurm.array_width}" if slurm.array_width else ""
        yield Directive(f"--array=0-{slurm.array - 1}{width}", "Members, and how many at a time")
    for option in slurm.options:
        yield Directive(option, "backend.slurm.options")


def refuse_short(backend: Backend) -> None:
    """A job that is warned as soon as it starts would be requeued for ever."""
    least = (backend.slurm.signal_seconds + EARLY_SECONDS) / 3600
    if backend.hours and _minutes(backend.hours) < _minutes(least):
        rule = (
            f"is too short for a warning {backend.slurm.signal_seconds} s before the limit "
            f"(backend.slurm.signal_seconds), which Slurm may send {EARLY_SECONDS} s early"
        )
        raise ConfigError("backend.hours", str(backend.hours), rule, f"at least {least:.3g}")


def _minutes(hours: float) -> int:
    return max(1, math.ceil(hours * 60))


def _clock(hours: float, rounded: Callable[[float], int] = math.ceil) -> str:
    minutes = max(1, rounded(hours * 60))
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02d}:{rest % 60:02d}:00"
