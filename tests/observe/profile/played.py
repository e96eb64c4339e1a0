"""Traces and profiles that are made up: what a GPU would have said, in microseconds."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.config import Job, job_from_table, resolve
from phalanx.observe.profile.profile import JobProfile, Origin, StepTimes
from phalanx.train.profile.facts import STEP_RANGE, DeviceRates, MemoryFacts

Event = dict[str, Any]
GIB = 1 << 30
MAIN = 7  # the host's thread


def span(cat: str, name: str, start: float, end: float, **arguments: Any) -> Event:
    args = {key.replace("_", " "): value for key, value in arguments.items()}
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": cat, "name": name, "tid": MAIN, "args": args, **times}


def phase(name: str, start: float, end: float) -> Event:
    return span("user_annotation", name, start, end)


def operation(
    name: str,
    number: int,
    start: float,
    end: float,
    *,
    dims: list[list[int]] | None = None,
    dtype: str = "c10::BFloat16",
    sequence: int = -1,
) -> Event:
    event = span("cpu_op", name, start, end)
    shapes = dims or []
    event["args"] = {
        "External id": number,
        "Input Dims": shapes,
        "Input type": [dtype] * len(shapes),
    }
    if sequence >= 0:
        event["args"]["Sequence number"] = sequence
    return event


def launch(number: int, at: float) -> Event:
    return span("cuda_runtime", "cudaLaunchKernel", at, at + 2, correlation=number)


def kernel(name: str, number: int, start: float, end: float, **arguments: Any) -> Event:
    event = span("kernel", name, start, end, correlation=number, **arguments)
    event["args"]["External id"] = number
    return event


def nccl(name: str, group: str, start: float, end: float, elements: int) -> Event:
    event = span("kernel", f"ncclDevKernel_{name}", start, end)
    event["args"] = {
        "Collective name": name,
        "Process Group Description": group,
        "dtype": "BFloat16",
        "In msg nelems": elements,
        "Out msg nelems": elements,
    }
    return event


def trace(*events: Event, step: tuple[float, float] = (0.0, 1000.0)) -> dict[str, Any]:
    return {"traceEvents": [phase(STEP_RANGE, *step), *events]}


def played_job(**settings: object) -> Job:
    """A job of one GPU whose every setting is as it should be."""
    table: dict[str, Any] = {
        "name": "played",
        "model": {"dim": 1024, "layers": 8, "heads": 8, "ffn": 4096, "vocab": 32000},
        "data": {"sequence": 4096},
        "train": {"steps": 10, "global_batch": 4, "micro_batch": 4},
    }
    given = [f"{key.replace('__', '.')}={value}" for key, value in settings.items()]
    return resolve(job_from_table(table, given), 1)


def played_profile(job: Job | None = None, **fields: Any) -> JobProfile:
    """A healthy profile of 100 ms steps on one H200."""
    healthy: dict[str, Any] = {
        "name": "played",
        "origin": Origin(
            created="2026-01-01T00:00:00Z", host="n1", commit="a" * 40, changed=False, torch="2.13"
        ),
        "device": "cuda",
        "device_name": "NVIDIA H200",
        "world_size": 1,
        "job": msgspec.to_builtins(job or played_job()),
        "times": times(0.1),
        "synthetic": None,
        "traced_seconds": 0.1,
        "kinds": {"matmul": 0.06, "norm and elementwise": 0.03, "launch gap": 0.01},
        "phases": {},
        "axes": [],
        "kernels": [],
        "matmul_formats": {"bfloat16": 0.06},
        "recomputed_seconds": 0.0,
        "gaps": 3,
        "longest_gap_seconds": 1e-4,
        "syncs": [],
        "rates": DeviceRates({"float32": 300e12, "bfloat16": 700e12}, 4e12),
        "peak_flops": 989e12,
        "mfu": 0.5,
        "memory": MemoryFacts(
            limit_bytes=140 * GIB, state={}, peak_bytes=40 * GIB, reserved_bytes=42 * GIB
        ),
        "memory_line": [],
        "power": None,
        "graphs": 0,
        "recompiles": 0,
    }
    return JobProfile(**{**healthy, **fields})


def times(seconds: float, spread: float = 0.001, data: float = 0.0) -> StepTimes:
    return StepTimes(
        median_seconds=seconds, spread_seconds=spread, steps=8, data_seconds=data, tokens=16384
    )
