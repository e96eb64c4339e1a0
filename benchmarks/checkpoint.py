"""What a checkpoint costs, beside torch's distributed checkpoint (DCP) and the bare disk.

    python -m benchmarks.checkpoint                 # two gloo ranks, 1.6 GB of DTensors
    python -m benchmarks.checkpoint --device cuda   # one GPU, a 1B model in training

On CPU the sides take turns in every round, so that all meet the same load of the machine; the
tables show medians and the paired ratios that are promised. Exits with 1 where one is missed.

A stall is how long a save holds training up: its call, and the wait for its copy after a step of
plain computation, when the weights may change. What is taken counts more: by how much longer that
step lasts than one without a save, with all that competes for the two cores meanwhile.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # before torch is imported

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from phalanx.checkpoint import Checkpointer, Extra
from phalanx.data import Cursor
from proof.report import report
from tests.ranks import run_ranks

RANKS = 2
STEP_SECONDS = 0.6  # of computation, beside which a save is copied and written
LAYER = {  # of a 1B model, its largest tensors
    "attention.qkv": (3072, 2048),
    "attention.out": (2048, 2048),
    "mlp.gate_up": (16384, 2048),
    "mlp.down": (2048, 8192),
}
KINDS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
SMALL = {"square": (2048, 2048)}  # 8 MB on each of two ranks
RAW_BYTES = 16 << 20  # at a time
READERS = 8  # threads of a rank that read raw, as many as Phalanx's own
EXTRA = Extra(tokens=0, cursor=Cursor(), mesh={"data": RANKS}, config_hash="")

Times = dict[str, list[float]]


# ---------------------------------------------------------------- two ranks on CPU


class Bench:
    """One rank's side of the comparison."""

    def __init__(self, folder: Path, total_bytes: int, layer: dict[str, tuple[int, int]]) -> None:
        self.folder = folder
        self.rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (RANKS,))
        layer_bytes = 4 * len(KINDS) * sum(rows * columns for rows, columns in layer.values())
        self.state: dict[str, torch.Tensor] = {
            f"{kind}.layers.{number}.{name}": DTensor.from_local(
                torch.randn(rows // RANKS, columns), mesh, [Shard(0)], run_check=False
            )
            for kind in KINDS
            for number in range(max(1, round(total_bytes / layer_bytes)))
            for name, (rows, columns) in layer.items()
        }
        self.bytes = sum(tensor.to_local().nbytes for tensor in self.state.values())  # type: ignore[attr-defined]
        self.times: Times = {}
        self.group = dist.new_group()  # DCP's thread must not meet the clock's barriers
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        self.checkpointer = Checkpointer(folder / "phalanx", keep=1)
        self.checkpointer.prepare_background(
            self.state, generation=0, step=0, device=torch.device("cpu"), overlap=True
        )
        self.matrix = torch.randn(1024, 1024)
        self.products = 1
        self.products = max(1, round(STEP_SECONDS / min(self.work() for _ in range(5))))
        # The same bytes as a shard, in one piece and aligned.
        self.memory = memoryview(mmap.mmap(-1, self.bytes))
        flat = torch.frombuffer(self.memory, dtype=torch.float32)
        torch.cat([t.to_local().view(-1) for t in self.state.values()], out=flat)  # type: ignore[attr-defined]

    def work(self) -> float:
        """Seconds of a step's computation, of which nothing is saved."""
        began = time.perf_counter()
        for _ in range(self.products):
            self.matrix @ self.matrix
        return time.perf_counter() - began

    def step(self, name: str, save: Callable[[], Any], before_update: Callable[[], Any]) -> Any:
        """A step with a save before it: what the save takes out of training."""

        dist.barrier()
        plain = self.work()
        dist.barrier()
        began = time.perf_counter()
        found = save()
        with_save = self.work()
        before_update()
        took = time.perf_counter() - began
        self.times.setdefault(f"stall: {name}", []).append(took - with_save)
        self.times.setdefault(f"taken: {name}", []).append(took - plain)
        return found

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        """This rank's seconds, from a common start."""
        dist.barrier()
        began = time.perf_counter()
        result = work()
        self.times.setdefault(name, []).append(time.perf_counter() - began)
        return result

    def save_ours(self, step: int) -> None:
        def save(number: int) -> Callable[[], Any]:
            return lambda: self.checkpointer.save(number, self.state, EXTRA)

        self.step("phalanx", save(2 * step - 1), self.checkpointer.before_update)
        self.checkpointer.finish()

        def durable() -> None:
            save(2 * step)()
            self.checkpointer.finish()

        self.timed("durable: phalanx", durable)

    def save_dcp(self, kind: str) -> None:
        path = self.fresh(f"dcp-{kind}")
        name = f"dcp {kind}"
        where: dict[str, Any] = {"checkpoint_id": path, "process_group": self.group}
        if kind == "sync":
            self.step(name, lambda: save(self.state, **where), lambda: None)
            self.times.setdefault(f"durable: {name}", []).append(self.times[f"stall: {name}"][-1])
            return
        if kind == "async, reused stager":
            where["async_stager"] = self.stager
        future = self.step(name, lambda: async_save(self.state, **where), lambda: None)
        future.result()

    def write_raw(self) -> None:
        """The bytes of this rank, large and aligned, past the page cache."""

        def write() -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT
            file = os.open(self.fresh("raw") / f"rank-{self.rank}", flags)
            for offset in range(0, self.bytes, RAW_BYTES):
                os.pwrite(file, self.memory[offset : offset + RAW_BYTES], offset)
            os.fsync(file)
            os.close(file)

        self.timed("durable: raw", write)

    def load_all(self, step: int) -> None:
        """Each side's own files, cold, into the tensors they came from.

        The first to read meets what writing left for the disk to do: another one in every round.
        """
        ours = self.folder / "phalanx" / f"step-{step:08d}"
        dcp_path = self.folder / "dcp-sync"
        raw = self.folder / "raw" / f"rank-{self.rank}"
        self.chill(ours, dcp_path, raw.parent)
        sides: list[tuple[str, Callable[[], Any]]] = [
            ("load: phalanx", lambda: self.checkpointer.load(ours, self.state)),
            ("load: raw", lambda: read_raw(raw)),
            ("load: dcp", lambda: load(self.state, checkpoint_id=dcp_path)),
        ]
        first = step // 2 % 2  # phalanx and raw, which are compared, take turns
        for name, read in (sides[first], sides[1 - first], sides[2]):
            self.timed(name, read)

    def chill(self, *folders: Path) -> None:
        """Have the kernel forget the files' pages."""
        dist.barrier()
        if self.rank == 0:
            for path in (path for folder in folders for path in folder.iterdir()):
                file = os.open(path, os.O_RDONLY)
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(file)
        dist.barrier()

    def fresh(self, name: str) -> Path:
        path = self.folder / name
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        dist.barrier()
        return path


def read_raw(path: Path) -> None:
    """The same bytes as a load, unproved and thrown away."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size = os.fstat(file).st_size
    buffers = [memoryview(mmap.mmap(-1, RAW_BYTES)) for _ in range(READERS)]

    def read(reader: int) -> None:
        for offset in range(reader * RAW_BYTES, size, READERS * RAW_BYTES):
            os.preadv(file, [buffers[reader]], offset)

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, range(READERS)))
    os.close(file)


def measure_rank(
    folder: Path, total_bytes: int, rounds: int, layer: dict[str, tuple[int, int]]
) -> Times:
    bench = Bench(folder, total_bytes, layer)
    for step in range(1, rounds + 1):
        bench.save_ours(step)
        bench.write_raw()
        bench.save_dcp("async")
        bench.save_dcp("async, reused stager")
        bench.save_dcp("sync")
        bench.load_all(2 * step)
    bench.checkpointer.close()
    return bench.times


def figures_on_cpu(times: Times) -> dict[str, float]:
    def paired(name: str, other: str) -> float:
        """Median over rounds of the ratio, which a slow round does not move."""
        pairs = zip(times[name][1:], times[other][1:], strict=True)
        return statistics.median(a / b for a, b in pairs)

    stall, taken = "stall: phalanx", "taken: phalanx"
    warm = statistics.median(times[taken][1:])
    return {
        "stall_seconds": statistics.median(times[stall][1:]),
        "stall_of_dcp_async": paired(stall, "stall: dcp async"),
        "stall_of_dcp_reused": paired(stall, "stall: dcp async, reused stager"),
        "stall_of_dcp_sync": paired(stall, "stall: dcp sync"),
        "taken_of_dcp_async": paired(taken, "taken: dcp async"),
        "taken_of_dcp_reused": paired(taken, "taken: dcp async, reused stager"),
        "taken_of_dcp_sync": paired(taken, "taken: dcp sync"),
        "first_of_warm": times[taken][0] / warm,
        "durable_of_raw": paired("durable: raw", "durable: phalanx"),
        "durable_of_dcp": paired("durable: dcp sync", "durable: phalanx"),
        "load_of_raw": paired("load: raw", "load: phalanx"),
    }


def run_on_cpu(
    folder: Path, total_bytes: int, rounds: int, layer: dict[str, tuple[int, int]]
) -> tuple[Times, dict[str, float]]:
    """All sides, alternating; the times of the slowest rank."""
    found = run_ranks(
        RANKS, measure_rank, folder, total_bytes, rounds, layer, timeout_seconds=1500.0
    )
    slowest: Times = {
        name: [max(each) for each in zip(*(f[name] for f in found), strict=True)]
        for name in found[0]
    }
    return slowest, figures_on_cpu(slowest)


def show(times: Times, total_bytes: int) -> None:
    console = Console(width=100)
    table = Table("", "first s", "median s", "least", "greatest", "MB/s")
    for name, seconds in sorted(times.items()):
        later = seconds[1:] or seconds  # the first is shown apart
        speed = (
            ""
            if not name.startswith(("durable", "load"))
            else f"{total_bytes / statistics.median(later) / 1e6:,.0f}"
        )
        shown = (seconds[0], statistics.median(later), min(later), max(later))
        table.add_row(name, *(f"{each:.3f}" for each in shown), speed)
    console.print(table)


def main() -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description="What a checkpoint costs.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=6, help="the first is shown apart")
    parser.add_argument("--gigabytes", type=float, default=1.6, help="of state, on CPU")
    parser.add_argument("--small", action="store_true", help="8 MB a tensor and rank, on CPU")
    parser.add_argument("--preset", default="llama3-1b", help="of the model, on CUDA")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/checkpoint"))
    options = parser.parse_args()
    shutil.rmtree(options.folder, ignore_errors=True)
    options.folder.mkdir(parents=True)
    total_bytes = int(options.gigabytes * 1e9)
    load = os.getloadavg()[0]
    if options.device == "cuda":
        from benchmarks.checkpoint_cuda import run_on_cuda

        times, figures, total_bytes = run_on_cuda(options.folder, options.rounds, options.preset)
    else:
        layer = SMALL if options.small else LAYER
        times, figures = run_on_cpu(options.folder, total_bytes, options.rounds, layer)
    print(f"{total_bytes / 1e9:.2f} GB of state; load average before: {load:.1f}")
    show(times, total_bytes)
    for name in ("phalanx", "raw", "dcp-sync", "dcp-async", "dcp-async, reused stager"):
        shutil.rmtree(options.folder / name, ignore_errors=True)
    details = {"times": times, "figures": figures, "load": load}
    (options.folder / "report.json").write_text(json.dumps(details, indent=1))
    return report("checkpoint-gpu" if options.device == "cuda" else "checkpoint", figures)


if __name__ == "__main__":
    sys.exit(main())
