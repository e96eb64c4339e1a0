"""Traces of several ranks as one, on one clock, for Perfetto.

Each rank's trace counts microseconds from a base of its own node's clock. Here all of them count
from the earliest base, corrected by how far each node's clock is ahead of the server's, and each
rank becomes a process of its own in the picture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

RANK_PIDS = 1 << 24  # room for the process numbers of one rank


def merge_traces(traces: Mapping[int, dict[str, Any]], skew_seconds: Mapping[int, float]) -> bytes:
    """Traces by rank as one JSON document; ValueError names the rank whose trace is none."""
    bases = {
        rank: _base(rank, trace) - skew_seconds.get(rank, 0.0) * 1e9
        for rank, trace in traces.items()
    }
    start = min(bases.values(), default=0.0)
    events: list[dict[str, Any]] = []
    for rank in sorted(traces):
        shift = (bases[rank] - start) / 1e3
        numbers: dict[str, int] = {}
        for event in traces[rank]["traceEvents"]:
            if not isinstance(event, dict):
                continue
            moved = dict(event)
            given = str(moved.get("pid", 0))
            moved["pid"] = rank * RANK_PIDS + numbers.setdefault(given, len(numbers))
            if isinstance(moved.get("ts"), int | float):
                moved["ts"] = moved["ts"] + shift
            if "id" in moved:
                moved["id"] = f"{rank}:{moved['id']}"
            if moved.get("ph") == "M" and moved.get("name") == "process_name":
                told = moved.get("args")
                name = told.get("name", "") if isinstance(told, dict) else ""
                moved["args"] = {"name": f"rank {rank} {name}".strip()}
            events.append(moved)
    whole = {"traceEvents": events, "baseTimeNanoseconds": int(start), "displayTimeUnit": "ms"}
    return msgspec.json.encode(whole)


def trace_of(data: bytes, name: str) -> dict[str, Any]:
    """A trace of torch's profiler; ValueError names the one that is none."""
    try:
        trace = msgspec.json.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{name}: no trace ({error})") from None
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise ValueError(f"{name}: no trace (it has no traceEvents)")
    return trace


def _base(rank: int, trace: dict[str, Any]) -> float:
    base = trace.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int | float):
        raise ValueError(f"rank {rank}: the trace's base time is {base!r}")
    return float(base)
