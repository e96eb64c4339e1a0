"""Settings of a job that may be tuned, and what may be tried for each.

Only those that leave what is learned alone, up to rounding: the global batch, the model, the data's
order, number formats and the mesh stay. A job that wants the same bits whatever its number of
replicas (``train.virtual_replicas``) keeps its micro-batch too, which decides the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs

from phalanx.config import ConfigError, Job, check, resolve

Value = bool | int | float | str
Choice = tuple[Value, ...]  # a value for each setting, in their order

ENVIRONMENT = "backend.environment."
UNSET = ""  # of a variable: it is left to NCCL
NCCL: dict[str, tuple[str, ...]] = {
    "NCCL_ALGO": ("Ring", "Tree", "NVLS"),
    "NCCL_PROTO": ("Simple", "LL128", "LL"),
    "NCCL_MIN_NCHANNELS": ("8", "16", "32"),
    "NCCL_MAX_CTAS": ("8", "16", "32"),
}
BUCKETS_MB = (5.0, 25.0, 100.0)
PREFETCHED_LAYERS = (0, 1, 2, 4)
STEPS_AHEAD = (0, 1, 4, 16)
PARALLEL_READS = (8, 16, 32, 64)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
RECOMPUTES = ("none", "selective", "full")


class Setting(Struct, frozen=True, kw_only=True):
    """A setting and the values that are tried for it."""

    key: str
    values: tuple[Value, ...]
    planned: bool = False  # the planner's step model knows what it does

    @property
    def ordered(self) -> bool:
        """Whether neighbouring values are alike."""
        return not any(isinstance(value, str | bool) for value in self.values)


class TunedMachine(Struct, frozen=True, kw_only=True):
    """What the choice of values depends on beside the job."""

    cuda: bool
    cores: int
    ranks: int


def settings_of(job: Job, on: TunedMachine) -> tuple[Setting, ...]:
    """What can be tuned of a job on this machine: settings with more than one value."""
    axes = resolve(job, on.ranks).parallel
    wanted: dict[str, tuple[tuple[Value, ...], bool]] = {}
    if not job.train.virtual_replicas:
        wanted["train.micro_batch"] = (_micro_batches(job, axes.data), True)
    wanted["memory.recompute"] = (RECOMPUTES, True)
    if on.cuda:
        wanted["train.compile"] = (("auto", "off"), True)
    else:
        wanted["train.cpu_threads"] = (_threads(on), False)
    if axes.pipeline > 1:
        wanted["parallel.schedule"] = (SCHEDULES, True)
        wanted["parallel.virtual_stages"] = ((0,), True)
    if axes.data > 1 and axes.zero == 0:
        wanted["parallel.ddp_bucket_mb"] = (BUCKETS_MB, False)
    if axes.data > 1 and axes.zero == 3:
        wanted["parallel.prefetch_layers"] = (PREFETCHED_LAYERS, False)
    wanted["data.prefetch"] = (STEPS_AHEAD, False)
    if "://" in job.data.path or any("://" in each.path for each in job.data.blend.values()):
        wanted["data.store.parallel_reads"] = (PARALLEL_READS, False)
    if on.cuda and on.ranks > 1:
        wanted |= {ENVIRONMENT + name: ((UNSET, *found), False) for name, found in NCCL.items()}
    made = []
    for key, (values, planned) in wanted.items():
        every = _with_present(values, value_of(job, key))
        if len(every) > 1:
            made.append(Setting(key=key, values=every, planned=planned))
    return tuple(made)


def _with_present(values: tuple[Value, ...], present: Value) -> tuple[Value, ...]:
    every = dict.fromkeys((*values, present))
    return tuple(every) if isinstance(present, str) else tuple(sorted(every))


def _micro_batches(job: Job, replicas: int) -> tuple[int, ...]:
    """Powers of two up to all samples of a replica in the smallest batch, and those as a whole."""
    batches = [job.train.global_batch, *(stage.global_batch for stage in job.train.batch_ramp)]
    most = max(1, min(batches) // replicas)
    return (*(1 << power for power in range(most.bit_length())), most)


def _threads(on: TunedMachine) -> tuple[int, ...]:
    most = max(1, on.cores // on.ranks)
    return (*(1 << power for power in range(most.bit_length())), most)


def value_of(job: Job, key: str) -> Value:
    """What a job has at a key; of a variable that it does not set, ``UNSET``."""
    if key.startswith(ENVIRONMENT):
        return job.backend.environment.get(key.removeprefix(ENVIRONMENT), UNSET)
    value: Any = job
    for name in key.split("."):
        value = getattr(value, name)
    found: Value = value
    return found


def changed(job: Job, values: Mapping[str, Value]) -> Job:
    """The job with other values at some keys."""
    for key, value in values.items():
        if key.startswith(ENVIRONMENT):
            rest = dict(job.backend.environment)
            rest.pop(name := key.removeprefix(ENVIRONMENT), None)
            environment = rest if value == UNSET else {**rest, name: str(value)}
            backend = structs.replace(job.backend, environment=environment)
            job = structs.replace(job, backend=backend)
        else:
            job = _replaced(job, key.split("."), value)
    return job


def _replaced(section: Any, path: list[str], value: Value) -> Any:
    name, *below = path
    new = _replaced(getattr(section, name), below, value) if below else value
    return structs.replace(section, **{name: new})


def runs(job: Job, ranks: int) -> bool:
    """Whether the rules let a job start on so many ranks."""
    try:
        check(job, ranks)
    except ConfigError:
        return False
    return True
