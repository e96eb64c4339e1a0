"""Predicted against measured memory of our own trainer on one GPU, over many shapes and settings.

    python -m benchmarks.plan_memory_gpu [--seconds 225] [--out runs/plan_memory_gpu.jsonl]

Every shape makes three steps with segments of the allocator that grow (`expandable_segments`, as
the trainer sets it), then with fixed ones; one process serves all shapes of a setting, and another
takes over where it ends early. A line of JSON is written as each shape is done: what tensors took,
what the allocator held and what was gone from the device, each beside its prediction. Shapes are
left out, and said so, when the time is up. `--start-up` makes steps of a tiny model on the CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from msgspec import structs

from phalanx.config import (
    PRESETS,
    Data,
    Ema,
    Job,
    Memory,
    Model,
    Optimizer,
    Precision,
    Schedule,
    Train,
    resolve,
)
from phalanx.hardware import cluster
from phalanx.plan import mapping_of, predict, workload_of
from phalanx.plan.workload import Software
from proof.report import report

BAR = 0.10  # of the measured bytes
STEPS = 3
FIRST_SHARE = 0.65  # of the time, for the trainer's own setting of the allocator
ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
READINGS = ("allocated", "reserved", "device")
GIB = 1 << 30


@dataclass(frozen=True)
class Shape:
    """A job on one GPU."""

    preset: str
    sequence: int
    micro_batch: int
    micro_batches: int = 1
    recompute: str = "none"
    state: str = "float32"
    offload: str = "none"  # "activations" as well
    fp8: bool = False
    ema: bool = False
    changes: dict[str, int] = field(default_factory=dict)  # to the preset
    experts: int = 0  # another number of them

    def model(self) -> Model:
        model = structs.replace(PRESETS[self.preset], **self.changes)
        if self.experts and model.moe is not None:
            model = structs.replace(model, moe=structs.replace(model.moe, experts=self.experts))
        return model

    def job(self) -> Job:
        away = self.offload == "activations"
        memory = {"recompute": self.recompute, "offload": "none" if away else self.offload}
        job = Job(
            name="plan-memory",
            model=self.model(),
            data=Data(source="synthetic", sequence=self.sequence),
            precision=Precision(fp8=self.fp8),
            schedule=Schedule(kind="constant"),
            memory=Memory(**memory, offload_activations=away),  # type: ignore[arg-type]
            optimizer=Optimizer(state=self.state),  # type: ignore[arg-type]
            train=Train(
                steps=1000,
                global_batch=self.micro_batch * self.micro_batches,
                micro_batch=self.micro_batch,
                ema=Ema() if self.ema else None,
            ),
        )
        return resolve(job, 1)


SMALL = {"dim": 1024, "layers": 12, "heads": 16, "kv_heads": 8, "ffn": 4096, "vocab": 32000}
ONE, THREE, EIGHT = "llama3-1b", "llama3-3b", "llama3-8b"
SHAPES = (
    Shape(ONE, 8192, 4),
    Shape(ONE, 8192, 1),
    Shape(ONE, 4096, 4, 4),
    Shape(ONE, 2048, 8),
    Shape(ONE, 8192, 8, recompute="selective"),
    Shape(ONE, 8192, 8, recompute="full"),
    Shape(ONE, 32768, 1),
    Shape(ONE, 32768, 2, recompute="selective"),
    Shape(ONE, 8192, 2, state="bfloat16"),
    Shape(ONE, 8192, 2, 2, state="int8"),
    Shape(ONE, 4096, 2, ema=True),
    Shape(ONE, 8192, 4, fp8=True),
    Shape(ONE, 2048, 4, changes={"layers": 4}),
    Shape(THREE, 8192, 2),
    Shape(THREE, 4096, 1),
    Shape(THREE, 8192, 1, 2),
    Shape(THREE, 8192, 4, recompute="full"),
    Shape(THREE, 8192, 2, recompute="selective", state="int8"),
    Shape(THREE, 8192, 2, fp8=True),
    Shape(EIGHT, 8192, 1, changes={"layers": 16}),
    Shape(EIGHT, 4096, 4, recompute="full", changes={"layers": 12}),
    Shape(EIGHT, 8192, 1, recompute="selective", state="int8"),
    Shape("qwen2.5-7b", 4096, 2, changes={"layers": 8}),
    Shape(ONE, 2048, 16, changes=SMALL),
    Shape(ONE, 4096, 16, 2, changes=SMALL),
    Shape(ONE, 8192, 2, offload="optimizer"),
    Shape(ONE, 8192, 1, offload="activations"),
    Shape("qwen3-8b", 4096, 2, changes={"layers": 8}),  # compiled, and the next two
    Shape("qwen3-moe-30b-a3b", 4096, 4, changes={"layers": 12}, experts=48),
    Shape("qwen3-moe-30b-a3b", 4096, 4, changes={"layers": 6}, experts=48),
)
TINY = (Shape("tiny", 64, 2), Shape("tiny", 64, 1, 2, state="int8", recompute="selective"))


def predicted(shape: Shape, *, expandable: bool) -> dict[str, float]:
    """Bytes by the planner: of tensors, of the allocator, of the device."""
    job = shape.job()
    software = Software(expandable_segments=expandable)
    planned = predict(workload_of(job), mapping_of(job), cluster("h200-8"), software=software)
    return dict(
        zip(
            READINGS,
            (planned.allocated_bytes, planned.reserved_bytes, planned.memory_bytes),
            strict=True,
        )
    )


def measure(shape: Shape, device_type: str) -> dict[str, Any]:
    """Some steps in this process; their peaks. A CPU has none."""
    import torch

    from phalanx.parallel.mesh import build_mesh
    from phalanx.train.trainer import Trainer

    cuda = device_type == "cuda"
    device = torch.device(device_type, 0) if cuda else torch.device("cpu")
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    job, began, trainer, losses = shape.job(), time.perf_counter(), None, []
    row: dict[str, Any] = {"before_bytes": before, "out_of_memory": False}
    try:
        trainer = Trainer(job, build_mesh(job, device), device)
        for step in range(STEPS):
            losses.append(float(trainer.train_step().loss))
            trainer.timer.close_step()
            if cuda and step == 0:  # what building and tuning took does not count
                torch.cuda.synchronize()
                row["first_allocated_bytes"] = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
    except torch.OutOfMemoryError as error:
        row |= {"out_of_memory": True, "error": str(error)[:300]}
    row |= {"losses": losses, "seconds": time.perf_counter() - began}
    if cuda:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        row |= {
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "device_bytes": total - free,
            "device_total_bytes": total,
            "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        }
    if trainer is not None:
        trainer.close()
    del trainer
    _give_back(cuda=cuda)
    return row


def _give_back(*, cuda: bool) -> None:
    """Leave the process as a fresh one."""
    import torch

    torch._dynamo.reset()
    gc.collect()
    if cuda:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def serve(numbers: list[int], device_type: str, deadline: float, *, expandable: bool) -> None:
    """Measure shapes until the time is up; a line each."""
    shapes = SHAPES if device_type == "cuda" else TINY
    context = 0
    if device_type == "cuda":
        import torch

        torch.empty(1, device="cuda")
        free, total = torch.cuda.mem_get_info()
        context = total - free
    for number in numbers:
        if time.time() > deadline:
            break
        shape = shapes[number]
        row: dict[str, Any] = {"number": number, "expandable_segments": expandable}
        row |= {"context_bytes": context}
        row |= {"shape": asdict(shape)} | measure(shape, device_type)
        bytes_by_name = predicted(shape, expandable=expandable)
        row |= {f"predicted_{name}_bytes": value for name, value in bytes_by_name.items()}
        print(json.dumps(row), flush=True)


def rows_of(
    numbers: list[int], device_type: str, deadline: float, *, expandable: bool
) -> Iterator[dict[str, Any]]:
    """Rows from a process of their own; after one that ends early the next goes on behind it."""
    environment = {name: text for name, text in os.environ.items() if "ALLOC_CONF" not in name}
    if not expandable:
        environment[ALLOCATOR] = "expandable_segments:False"
    left = list(numbers)
    while left and time.time() < deadline:
        command = [sys.executable, "-m", "benchmarks.plan_memory_gpu", "--device", device_type]
        command += ["--until", str(deadline), "--serve", ",".join(map(str, left))]
        command += [] if expandable else ["--fixed"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith("{"):
                    row = json.loads(line)
                    left.remove(row["number"])
                    yield row
        if child.returncode == 0:
            return
        print(f"shape {left[0]} ended its process with {child.returncode}", file=sys.stderr)
        left = left[1:]


def error_of(row: dict[str, Any], reading: str) -> float:
    """Predicted over measured, less one."""
    return float(row[f"predicted_{reading}_bytes"] / row[f"{reading}_bytes"] - 1)


def figures_of(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What the claim is judged by: of each shape and setting, all three readings."""
    ran = [row for row in rows if not row["out_of_memory"] and row.get("allocated_bytes")]
    figures: dict[str, float] = {"runs": len(ran), "failed": len(rows) - len(ran)}
    for reading in READINGS:
        errors = [abs(error_of(row, reading)) for row in ran]
        within = sum(error <= BAR for error in errors)
        figures[f"{reading}_within"] = within / max(1, len(errors))
        figures[f"{reading}_worst"] = max(errors, default=0.0)
    return figures


def show(rows: list[dict[str, Any]]) -> None:
    """A line each, and what the defaults of the stack should be by these runs."""
    for row in rows:
        shape = {name: value for name, value in row["shape"].items() if value}
        name = " ".join(f"{value}" for value in shape.values())
        setting = "expandable" if row["expandable_segments"] else "fixed"
        if row["out_of_memory"] or not row.get("allocated_bytes"):
            print(f"{name:70} {setting:10} out of memory" if row["out_of_memory"] else name)
            continue
        cells = (f"{row[f'{r}_bytes'] / GIB:6.1f} {error_of(row, r):+6.1%}" for r in READINGS)
        print(f"{name:70} {setting:10} " + "  ".join(cells))
    for expandable in (True, False):
        mine = [r for r in rows if r["expandable_segments"] == expandable]
        mine = [r for r in mine if r.get("allocated_bytes") and not r["out_of_memory"]]
        if mine:
            beyond = [r["reserved_bytes"] / r["allocated_bytes"] - 1 for r in mine]
            beside = [r["device_bytes"] - r["reserved_bytes"] for r in mine]
            print(
                f"expandable_segments {expandable}: the allocator holds "
                f"{statistics.median(beyond):.3f} more than is in use (most {max(beyond):.3f}), "
                f"{statistics.median(beside) / 1e9:.2f} GB beside it are gone"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=225.0)
    parser.add_argument("--out", default="runs/plan_memory_gpu.jsonl")
    parser.add_argument("--start-up", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--fixed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        numbers = [int(number) for number in options.serve.split(",")]
        serve(numbers, options.device, options.until, expandable=not options.fixed)
        return 0
    device = "cpu" if options.start_up else "cuda"
    numbers = list(range(len(TINY if options.start_up else SHAPES)))
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    began, rows = time.time(), []
    with out.open("w") as file:
        for expandable, share in ((True, FIRST_SHARE), (False, 1.0)):
            deadline = began + share * options.seconds
            for row in rows_of(numbers, device, deadline, expandable=expandable):
                rows.append(row)
                file.write(json.dumps(row) + "\n")
                file.flush()
    show(rows)
    print(f"{len(rows)} of {2 * len(numbers)} in {time.time() - began:.0f} s; lines in {out}")
    if options.start_up:
        return 0 if len(rows) == 2 * len(numbers) else 1
    return report("plan-memory-gpu", figures_of(rows))


if __name__ == "__main__":
    sys.exit(main())
