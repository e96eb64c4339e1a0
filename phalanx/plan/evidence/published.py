"""Published training runs: a CSV row becomes a workload, a mapping and measured seconds.

Columns are those of ``data/published_runs.csv``. Sources count FLOPs in different ways, so what
was measured is brought back to seconds of a step: from the iteration time, from tokens/s, or
from TFLOP/s by the source's own formula.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.hardware import Cluster
from phalanx.plan.evidence.columns import tidy
from phalanx.plan.evidence.devices import cluster_of
from phalanx.plan.evidence.fields import (
    MemoryKind,
    SkippedRowError,
    integer,
    memory_kind,
    number,
    recompute,
)
from phalanx.plan.evidence.layout import (
    NO_RECOMPUTE,
    ROUNDED_BATCH,
    filled_in,
    mapping_of_row,
    samples,
    whole_batch,
)
from phalanx.plan.evidence.shapes import model_of
from phalanx.plan.evidence.sources import (
    Counting,
    counting_of,
    project_of,
    routing_skew_of,
    software_of_row,
    trained_of,
    with_source_facts,
)
from phalanx.plan.machine import computes, family_of, machine_of
from phalanx.plan.memory.model_counts import flops_per_token, parameters
from phalanx.plan.workload import Mapping, Recompute, Software, Workload

GB = 2.0**30
FULLEST = 1.1  # of a device's memory, that a reading can be
LONG_SEQUENCE = 16384  # tokens; nobody puts two such samples into one micro-batch by choice


class PublishedRun(Struct, frozen=True, kw_only=True):
    """One published run in the planner's terms."""

    row: int  # line of the file, the header being 1
    source: str
    project: str
    workload: Workload
    mapping: Mapping
    software: Software
    cluster: Cluster
    seconds: float | None  # of a step; None where the run gave no time
    memory_bytes: float | None
    out_of_memory: bool
    memory_kind: MemoryKind = "device"  # that the reading is of
    complete: bool  # gives TP, PP, micro-batch and global batch itself
    recompute_known: bool
    assumed: tuple[str, ...] = ()  # what its cells contradict or leave open, and what is taken

    @property
    def kind(self) -> str:
        """Group of the error table."""
        return self.workload.kind


class Skipped(Struct, frozen=True):
    """A row that cannot be compared, and why."""

    row: int
    reason: str


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a file whose columns are separated by commas, tabs or semicolons."""
    with path.open(newline="", encoding="utf-8-sig") as lines:
        heading = lines.readline()
        lines.seek(0)
        separator = max(",\t;", key=heading.count)
        reader = csv.DictReader(lines, delimiter=separator)
        twice = [name for name, n in Counter(reader.fieldnames or ()).items() if n > 1 and name]
        if twice:
            rule = f'has the column "{twice[0]}" more than once'
            raise ConfigError("file", str(path), rule, "keep one of them")
        return list(reader)


def parse_runs(
    rows: Iterable[dict[str, str]], *, assume: bool = False
) -> tuple[list[PublishedRun], list[Skipped]]:
    """Runs of parsed rows, and the skipped ones with reasons.

    ``assume``: also runs that do not give their micro-batch, where it can only have been one.
    """
    runs, skipped = [], []
    for line, row in enumerate(tidy(rows), start=2):
        try:
            runs.append(_run(line, row, assume))
        except (SkippedRowError, ConfigError) as refused:
            skipped.append(Skipped(line, str(refused)))
    return runs, skipped


def _run(line: int, row: dict[str, str], assume: bool) -> PublishedRun:
    if "linear attention" in row.get("notes", "").lower():
        raise SkippedRowError("linear attention is not modelled")
    row, assumed = filled_in(with_source_facts(row))
    complete = all(row.get(key) for key in ("tp", "pp", "microbatch", "global_batch"))
    if assume and not row.get("microbatch") and integer(row, "seq", 1) >= LONG_SEQUENCE:
        row = row | {"microbatch": "1"}
    gpus = integer(row, "num_gpus")
    cluster = cluster_of(row, gpus)
    mapping = mapping_of_row(row, gpus, cluster.gpus_per_node)
    if not computes(cluster.gpu, mapping.precision):
        raise SkippedRowError(f"{cluster.gpu.name} has no {mapping.precision}")
    model = model_of(row, mapping.pipeline)
    if mapping.pipeline > model.layers:
        raise SkippedRowError(f"pp = {mapping.pipeline} exceeds {model.layers} layers")
    # Some count embedding and loss as layers: 128 stages of a model of 126.
    most = model.layers // mapping.pipeline
    mapping = structs.replace(mapping, virtual_stages=min(mapping.virtual_stages, most))
    workload = Workload(
        model=model,
        sequence=integer(row, "seq"),
        global_batch=whole_batch(row, mapping),
        routing_skew=routing_skew_of(row),
        trains=trained_of(row),
    )
    if workload.global_batch != round(samples(row)):
        assumed.append(ROUNDED_BATCH)
    software, unknown = software_of_row(row, family_of(cluster.gpu), mapping)
    assumed += unknown
    recompute_known = recompute(row.get("recompute", "")) is not None
    if not recompute_known:
        assumed.append(NO_RECOMPUTE)
    memory_text = row.get("mem_gb", "").upper()
    oom = "OOM" in memory_text or "OUT OF MEMORY" in memory_text
    seconds = _seconds(row, workload, mapping, cluster)
    memory_bytes = None if oom else _memory_bytes(row, cluster)
    if seconds is None and memory_bytes is None and not oom:
        raise SkippedRowError("no time, rate or memory was measured")
    if seconds is not None:
        _refuse_impossible(workload, mapping, cluster, seconds)
    return PublishedRun(
        row=line,
        source=row.get("source", ""),
        project=project_of(row),
        workload=workload,
        mapping=mapping,
        software=software,
        cluster=cluster,
        seconds=seconds,
        memory_bytes=memory_bytes,
        out_of_memory=oom,
        memory_kind=memory_kind(row.get("mem_kind", "")),
        complete=complete,
        recompute_known=recompute_known,
        assumed=tuple(assumed),
    )


def _seconds(
    row: dict[str, str], workload: Workload, mapping: Mapping, cluster: Cluster
) -> float | None:
    counting, gpus = counting_of(row), mapping.gpus
    iteration = number(row, "iter_time_s")
    if iteration is not None:
        _refuse_contradiction(row, workload, counting, iteration * gpus)
        return iteration
    rate = number(row, "tokens_per_s_per_gpu")
    if rate is not None:
        return workload.tokens / (rate * gpus)
    tera, percent = number(row, "tflops_per_gpu"), number(row, "mfu_pct")
    if tera is None and percent is None:
        return None
    if tera is None:
        peak = cluster.gpu.peak_flops
        wanted = "fp8" if mapping.precision in ("fp8", "mxfp8", "nvfp4") else "bfloat16"
        assert percent is not None
        if percent < 1:
            raise SkippedRowError(f"mfu_pct = {row['mfu_pct']!r} is below 1: percents are meant")
        tera = percent / 100 * peak.get(wanted, next(iter(peak.values()))) / 1e12
        counting = structs.replace(counting, flops="model")
    flops = _counted_flops(workload, counting)
    return flops / (tera * 1e12 * gpus)


def _refuse_contradiction(
    row: dict[str, str], workload: Workload, counting: Counting, gpu_seconds: float
) -> None:
    """A row whose time and TFLOP/s differ by half or more describes two different batches."""
    tera = number(row, "tflops_per_gpu")
    if tera is None:
        return
    ratio = _counted_flops(workload, counting) / (tera * 1e12 * gpu_seconds)
    if not 0.5 < ratio < 2.0:
        raise SkippedRowError(f"its time and its TFLOP/s disagree by a factor of {ratio:.2f}")


def _refuse_impossible(
    workload: Workload, mapping: Mapping, cluster: Cluster, seconds: float
) -> None:
    """A step that is faster than the GPUs' peak is another unit, or another batch."""
    if workload.trains == "adapters":
        return  # frozen weights have no gradients
    needed = _counted_flops(workload, Counting(attention="causal")) / (seconds * mapping.gpus)
    peak = machine_of(cluster, mapping.gpus).peak(mapping.precision)
    if needed > peak:
        raise SkippedRowError(f"its speed is {needed / peak:.3g} times the GPU's peak")


def _memory_bytes(row: dict[str, str], cluster: Cluster) -> float | None:
    read = number(row, "mem_gb")
    if read is None:
        return None
    # A device of 180 GB is sold with 167 GiB, and a reading may be in either.
    if read * GB > FULLEST * cluster.gpu.memory_bytes:
        there = cluster.gpu.memory_bytes / GB
        raise SkippedRowError(f"mem_gb = {row['mem_gb']!r} exceeds the device's {there:.0f} GiB")
    return read * GB


def _counted_flops(workload: Workload, counting: Counting) -> float:
    again: Recompute = "full" if counting.flops == "hardware" else "none"
    per_token = flops_per_token(workload.model, workload.sequence, counting.attention, again)
    assert parameters(workload.model).total > 0
    flops = per_token.hardware_flops if counting.flops == "hardware" else per_token.model_flops
    return float(flops) * workload.tokens
