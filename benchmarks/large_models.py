"""Models that fill one GPU: moments in fewer bits, optimizer state in host memory.

Each row trains in a process of its own and is compared with the 3B, which fits as it is: share of
its model-FLOP utilisation, peak memory beside what the planner says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proof.report import report

SEQUENCE = 8192
GIB = 1 << 30


@dataclass
class Row:
    """One set of settings."""

    name: str
    preset: str
    batch: int
    micro_batch: int
    state: str = "float32"
    offload: str = "none"
    recompute: str = "selective"
    model: dict[str, int] = field(default_factory=dict)  # changes to the preset
    steps: int = 1
    on_nvme: bool = False  # what is offloaded


FOURTEEN = {"dim": 5120, "layers": 40, "heads": 40, "kv_heads": 8, "ffn": 17408}
ROWS = (
    Row("3b", "llama3-3b", 4, 2, recompute="none", steps=6),
    Row("8b-int8", "llama3-8b", 32, 1, state="int8"),
    Row("8b-offload", "llama3-8b", 32, 1, offload="optimizer"),
    Row("14b-int8-offload", "llama3-8b", 16, 1, "int8", "optimizer", "full", FOURTEEN),
)
# Only where they are named: they need a drive, below $LOCAL_NVME.
ON_NVME = (
    Row("8b-int8-nvme", "llama3-8b", 32, 1, "int8", "optimizer", on_nvme=True),
    Row("14b-int8-nvme", "llama3-8b", 16, 1, "int8", "optimizer", "full", FOURTEEN, on_nvme=True),
)


def measure(row: Row) -> dict[str, Any]:
    """Trains a few steps; runs in a process of its own."""
    import msgspec
    import torch

    from phalanx.config import PRESETS, Data, Job, Memory, Optimizer, Schedule, Train, resolve
    from phalanx.hardware import cluster
    from phalanx.parallel.mesh import build_mesh
    from phalanx.plan.cost.predict import predict
    from phalanx.plan.memory.model_counts import flops_per_token
    from phalanx.plan.question.emit import mapping_of, workload_of
    from phalanx.train.trainer import Trainer

    job = Job(
        name=row.name,
        model=msgspec.structs.replace(PRESETS[row.preset], **row.model),
        data=Data(source="synthetic", sequence=SEQUENCE),
        schedule=Schedule(kind="constant"),
        memory=Memory(
            recompute=row.recompute,  # type: ignore[arg-type]
            offload=row.offload,  # type: ignore[arg-type]
            offload_folder="$LOCAL_NVME" if row.on_nvme else "",
        ),
        optimizer=Optimizer(state=row.state),  # type: ignore[arg-type]
        train=Train(steps=1000, global_batch=row.batch, micro_batch=row.micro_batch),
    )
    job = resolve(job, 1)
    device = torch.device("cuda", 0)
    began = time.perf_counter()
    trainer = Trainer(job, build_mesh(job, device), device)
    built = time.perf_counter() - began
    losses = [trainer.train_step().loss]
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(row.steps):
        losses.append(trainer.train_step().loss)
        trainer.timer.close_step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / row.steps
    tokens = row.batch * SEQUENCE
    flops = flops_per_token(job.model, SEQUENCE).model_flops * tokens
    planned = predict(workload_of(job), mapping_of(job), cluster("h200-8"))
    (stage,) = planned.memory
    in_use = (
        stage.weight_bytes
        + stage.gradient_bytes
        + stage.optimizer_bytes
        + stage.activation_bytes
        + stage.working_bytes
    )
    return {
        "row": row.name,
        "parameters": sum(weight.parameter.numel() for weight in trainer.engine.weights),
        "built_seconds": built,
        "first_step_seconds": first,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "model_tflops": flops / seconds / 1e12,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "planned_gib": in_use / GIB,
        "planned_step_seconds": planned.step_seconds,
        "losses": [round(float(loss), 4) for loss in losses],
    }


def main() -> int:
    """Each row in turn; a line of JSON each, then the figures of the claim."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows by name, comma-separated; the 3B first")
    parser.add_argument("--serve", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    by_name = {row.name: row for row in (*ROWS, *ON_NVME)}
    if chosen.serve:
        print(json.dumps(measure(by_name[chosen.serve])))
        return 0
    figures: dict[str, float] = {}
    reference = 0.0
    worst = 1.0  # of peak memory over what the planner said
    for name in chosen.only.split(",") if chosen.only else [row.name for row in ROWS]:
        found = run_row(name)
        reference = reference or found["model_tflops"]
        print(json.dumps(found), flush=True)
        key = name.replace("-", "_")
        figures[f"{key}_tokens_per_second"] = found["tokens_per_second"]
        figures[f"{key}_share"] = found["model_tflops"] / reference
        ratio = found["peak_gib"] / found["planned_gib"]
        worst = max(worst, ratio, 1 / ratio)
    figures["memory_error"] = worst - 1
    return report("large-models", figures)


def run_row(name: str) -> dict[str, Any]:
    """One row, in a process that gives all memory back."""
    command = [sys.executable, "-m", "benchmarks.large_models", "--serve", name]
    here = Path(__file__).resolve().parent.parent
    ran = subprocess.run(command, cwd=here, stdout=subprocess.PIPE, text=True)
    if ran.returncode:
        raise SystemExit(f"{name} ended with {ran.returncode}; see its output above")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
