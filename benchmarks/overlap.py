"""How much communication hides behind compute, read from profiler traces of gloo ranks.

    python -m benchmarks.overlap

One gang of forked CPU ranks holds a trainer for each setting and lets them take turns, so that
all settings meet the same load of the machine: first timed steps, then traced ones.
Exits with 1 when the settings meant to overlap do not overlap at all.

On one machine gloo's copies need the cores that compute needs, so hiding them saves no time.
``--link 4gbit`` (Linux, as root) runs in a network namespace whose loopback is that slow:
communication then waits as it does on a network, and the step times show what hiding is worth.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # before torch is imported

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.traces import LAYER_RANGE, StepTrace
from phalanx.config import Job, check, job_from_table, resolve
from phalanx.parallel import build_mesh
from phalanx.train.measure.intervals import Interval, intersect, merge, total
from phalanx.train.trainer import Trainer
from proof.report import report
from tests.ranks import run_ranks

RANKS = 2
LAYERS = 6
TRACED_STEPS = 3  # of each setting; the median is shown, since a busy machine delays a rank

# Ten megabytes of weights a layer, and tens of milliseconds of compute on one core.
MODEL = {"dim": 512, "layers": LAYERS, "heads": 8, "kv_heads": 8, "ffn": 1024, "vocab": 512}
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp, 4 MB buckets": {"zero": 0, "ddp_bucket_mb": 4.0},
    "ddp, one bucket": {"zero": 0, "ddp_bucket_mb": 1000.0},
    "fsdp, prefetch 1": {"zero": 3, "prefetch_layers": 1},
    "fsdp, prefetch 0": {"zero": 3, "prefetch_layers": 0},
}
FIGURES = {
    "ddp, 4 MB buckets": "ddp_hidden",
    "ddp, one bucket": "ddp_one_bucket_hidden",
    "fsdp, prefetch 1": "fsdp_hidden",
    "fsdp, prefetch 0": "fsdp_no_prefetch_hidden",
}
HIDING = ("ddp, 4 MB buckets", "fsdp, prefetch 1")  # the settings that must overlap

LEGEND = """\
step: least, median and greatest of the timed ones
comm: bucket all-reduces (DDP) or weight gathers (FSDP) of a step, with waits for the peer
hidden: share of comm beside backward's (DDP) or the model's (FSDP) calculations, rank by rank
early: buckets that reduce while earlier layers run backward (DDP), or layers whose successor's
  gather begins before they end, over forward and backward (FSDP)
blocking: reduce-scatters, which FSDP awaits on gloo (on CUDA they have a stream of their own)"""


class Reading(NamedTuple):
    """What one rank's trace says; times in milliseconds."""

    communication_ms: float  # of bucket reductions, or of gathers
    hidden_share: float  # of that, beside compute of backward (DDP) or of the model (FSDP)
    early: int  # buckets that reduce while earlier layers run; gathers begun ahead of need
    possible: int
    blocking_reduction_ms: float  # FSDP on gloo: reduce-scatters, which the main thread awaits
    details: list[str]


def make_job(parallel: dict[str, Any]) -> Job:
    table = {
        "model": MODEL,
        "data": {"sequence": 128, "prefetch": 0},
        "parallel": parallel,
        "precision": {"compute": "float32"},
        "train": {"steps": 100, "global_batch": 2 * RANKS, "micro_batch": 2, "device": "cpu"},
    }
    job = resolve(job_from_table(table), RANKS)
    check(job, RANKS)
    return job


def mark_layers(trainer: Trainer) -> None:
    """Put a profiler range around the forward of every layer."""
    for name, block in trainer.engine.parts[0].layers.items():
        marker = record_function(f"{LAYER_RANGE}{name}")
        block.register_forward_pre_hook(lambda *_, marker=marker: marker.__enter__() and None)
        # Before FSDP's hook, which already works for the next layer.
        block.register_forward_hook(
            lambda *_, marker=marker: marker.__exit__(None, None, None), prepend=True
        )


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """On a rank: seconds of every timed step by setting; traces are left in ``folder``."""
    warnings.simplefilter("ignore")  # torch's advice to authors, once for each rank and setting
    device = torch.device("cpu")
    trainers: dict[str, Trainer] = {}
    for name, parallel in SETTINGS.items():
        job = make_job(parallel)
        trainers[name] = Trainer(job, build_mesh(job, device), device)
        mark_layers(trainers[name])
        for _ in range(2):  # DDP settles its buckets in the first step
            trainers[name].train_step()
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for _ in range(rounds):
        for name, trainer in trainers.items():
            dist.barrier()
            began = time.perf_counter()
            trainer.train_step()
            seconds[name].append(time.perf_counter() - began)
    for number in range(TRACED_STEPS):
        for name, trainer in trainers.items():
            with profile(activities=[ProfilerActivity.CPU]) as trace:
                dist.barrier()
                trainer.train_step()
            trace.export_chrome_trace(str(trace_path(folder, name, dist.get_rank(), number)))
    for trainer in trainers.values():
        trainer.close()
    return seconds


def trace_path(folder: Path, setting: str, rank: int, number: int) -> Path:
    return folder / f"{setting.replace(', ', '-').replace(' ', '-')}-rank-{rank}-{number}.json"


def read_ddp(trace: StepTrace) -> Reading:
    """Which layers run backward while each bucket reduces."""
    buckets, compute = trace.bucket_reductions, trace.backward_compute
    details, early = [], 0
    for k, bucket in enumerate(buckets):
        beside = [n for n in range(LAYERS) if share([bucket], trace.layer_compute(n, "backward"))]
        early += bool(beside)
        layers = ", ".join(map(str, reversed(beside))) or "none"
        details.append(
            f"bucket {k}: reduces {bucket[0]:.1f}-{bucket[1]:.1f} ms, "
            f"{share([bucket], compute):.0%} beside backward of layers: {layers}"
        )
    hidden = share(buckets, compute)
    return Reading(total(buckets), hidden, early, len(buckets), 0.0, details)


def read_fsdp(trace: StepTrace) -> Reading:
    """For which layers the next one's gather begins before the layer ends."""
    details, early = [], 0
    pairs = [("forward", n, n + 1) for n in range(LAYERS - 1)]
    pairs += [("backward", n, n - 1) for n in range(LAYERS - 1, 0, -1)]
    for direction, layer, following in pairs:
        ends = trace.layer_compute(layer, direction)[-1][1]
        gather = trace.gather_of(following, direction).span
        early += gather[0] < ends
        details.append(
            f"{direction}: layer {layer} ends at {ends:.1f} ms, gather of layer {following} "
            f"{gather[0]:.1f}-{gather[1]:.1f} ms, {share([gather], trace.compute):.0%} hidden"
        )
    gathers = [gather.span for gather in trace.gathers]
    hidden = share(gathers, trace.compute)
    blocking = total(trace.gradient_reductions)
    return Reading(total(gathers), hidden, early, len(pairs), blocking, details)


def read(folder: Path, setting: str) -> list[Reading]:
    """One reading a rank: of its traced steps, the one with the median hidden share."""
    reader = read_ddp if setting.startswith("ddp") else read_fsdp
    readings = []
    for rank in range(RANKS):
        paths = [trace_path(folder, setting, rank, number) for number in range(TRACED_STEPS)]
        steps = sorted((reader(StepTrace.read(path)) for path in paths), key=_hidden_share)
        readings.append(steps[TRACED_STEPS // 2])
    return readings


def share(part: Iterable[Interval], beside: Iterable[Interval]) -> float:
    """How much of ``part`` ran while ``beside`` ran: 0 to 1, and 0 where ``part`` is empty."""
    spans = merge(part)
    whole = total(spans)
    return total(intersect(spans, beside)) / whole if whole else 0.0


def _hidden_share(reading: Reading) -> float:
    return reading.hidden_share


def show(readings: dict[str, list[Reading]], step_ms: dict[str, list[float]]) -> None:
    table = Table(title=f"communication beside compute, {RANKS} gloo ranks")
    for column in ("setting", "step ms", "comm ms", "hidden", "early", "blocking ms"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for name, ranks in readings.items():
        times = step_ms[name]
        table.add_row(
            name,
            f"{min(times):.0f} / {statistics.median(times):.0f} / {max(times):.0f}",
            f"{statistics.mean(r.communication_ms for r in ranks):.0f}",
            " / ".join(f"{r.hidden_share:.0%}" for r in ranks),
            " / ".join(f"{r.early} of {r.possible}" for r in ranks),
            f"{statistics.mean(r.blocking_reduction_ms for r in ranks):.0f}",
        )
    console = Console(width=110, highlight=False)
    console.print(table)
    console.print(LEGEND)
    for name in HIDING:
        console.print(f"\n{name}, rank 0:")
        for line in readings[name][0].details:
            console.print(f"  {line}")


def slow_link(rate: str, folder: Path, rounds: int) -> None:
    """Become this benchmark in a network namespace whose loopback has the given rate."""
    again = [sys.executable, "-m", "benchmarks.overlap", "--rounds", str(rounds)]
    again += ["--folder", str(folder)]
    shape = f"tc qdisc add dev lo root tbf rate {shlex.quote(rate)} burst 1mb latency 400ms"
    script = f"ip link set lo up && {shape} && exec {shlex.join(again)}"
    try:
        os.execvp("unshare", ["unshare", "--net", "sh", "-c", script])
    except FileNotFoundError as error:
        raise SystemExit("--link needs Linux with unshare, ip and tc") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each setting")
    parser.add_argument("--folder", type=Path, default=Path("runs/overlap"))
    parser.add_argument("--link", metavar="RATE", help="slow the loopback down, e.g. 4gbit")
    options = parser.parse_args()
    if options.link:
        slow_link(options.link, options.folder, options.rounds)
    options.folder.mkdir(parents=True, exist_ok=True)
    ranks = run_ranks(RANKS, measure, options.folder, options.rounds, timeout_seconds=300.0)
    step_ms = {name: [1e3 * s for s in ranks[0][name]] for name in SETTINGS}
    readings = {name: read(options.folder, name) for name in SETTINGS}
    show(readings, step_ms)
    found = {
        name: {"step_ms": step_ms[name], "ranks": [r._asdict() for r in readings[name]]}
        for name in SETTINGS
    }
    details = {"load_average": os.getloadavg(), "torch": torch.__version__, "settings": found}
    (options.folder / "overlap.json").write_text(json.dumps(details, indent=2) + "\n")
    print(f"\ntraces and overlap.json are in {options.folder}")
    hidden = {name: min(r.hidden_share or 0.0 for r in readings[name]) for name in SETTINGS}
    return report("overlap", {FIGURES[name]: share for name, share in hidden.items()})


if __name__ == "__main__":
    raise SystemExit(main())
