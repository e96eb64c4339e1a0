"""A trace is read as it happened: what runs, what waits, and which layer it belongs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overlap import read_ddp, read_fsdp
from benchmarks.traces import BACKWARD_NODE, LAYER_RANGE, StepTrace

MAIN, GLOO = 1, 2


def event(
    name: str, start_ms: float, end_ms: float, thread: int = MAIN, sequence: int | None = None
) -> dict[str, Any]:
    arguments = {} if sequence is None else {"Sequence number": sequence}
    times = {"ts": 5e6 + start_ms * 1e3, "dur": (end_ms - start_ms) * 1e3}
    return {"ph": "X", "name": name, "tid": thread, "args": arguments, **times}


def layer_forward(layer: int, start_ms: float, end_ms: float) -> list[dict[str, Any]]:
    return [
        event(f"{LAYER_RANGE}{layer}", start_ms, end_ms),
        event("aten::mm", start_ms, end_ms, sequence=layer),
    ]


def layer_backward(layer: int, start_ms: float, end_ms: float) -> list[dict[str, Any]]:
    return [
        event(f"{BACKWARD_NODE}MmBackward0", start_ms, end_ms, sequence=layer),
        event("aten::mm", start_ms, end_ms),
    ]


def read(folder: Path, events: list[dict[str, Any]]) -> StepTrace:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": [event("ProfilerStep", 0, 0.01), *events]}))
    return StepTrace.read(path)


@pytest.fixture(autouse=True)
def _two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.overlap.LAYERS", 2)


def ddp_step(reductions: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """Forward to 20 ms, backward of layer 1 to 40 and of layer 0 to 60, and two buckets."""
    events = [event("c10d::allreduce_", 0, 0.1), event("gloo:all_reduce", 0, 2, GLOO)]
    events += layer_forward(0, 2, 10) + layer_forward(1, 10, 20)
    events += layer_backward(1, 20, 40) + layer_backward(0, 40, 60)
    for issued, (start, end) in zip((39.9, 59.9), reductions, strict=True):
        events += [event("c10d::allreduce_", issued, issued + 0.1)]
        events += [event("gloo:all_reduce", start, end, GLOO)]
    return events


def test_bucket_beside_backward_of_an_earlier_layer_is_hidden(tmp_path: Path) -> None:
    reading = read_ddp(read(tmp_path, ddp_step([(42, 50), (60, 68)])))
    assert reading.hidden_share == pytest.approx(0.5)
    assert (reading.early, reading.possible) == (1, 2)
    assert "layers: 0" in reading.details[0]


def test_reductions_after_backward_are_exposed(tmp_path: Path) -> None:
    reading = read_ddp(read(tmp_path, ddp_step([(60, 64), (64, 68)])))
    assert reading.hidden_share == 0.0
    assert reading.early == 0


def test_scalars_that_the_trainer_reduces_are_not_buckets(tmp_path: Path) -> None:
    trace = read(tmp_path, ddp_step([(42, 50), (60, 68)]))
    assert len(trace.bucket_reductions) == 2


def fsdp_step(ahead: bool) -> list[dict[str, Any]]:
    """Layers of 10 ms with gathers of 4 ms, either ahead of need or awaited."""
    starts = {0: 0.0, 1: 4.5 if ahead else 14.0, 2: 25.0, 3: 30.5 if ahead else 40.0}
    events: list[dict[str, Any]] = []
    for number, layer in enumerate((0, 1, 1, 0)):
        start = starts[number]
        events += [event(f"FSDP::all_gather (layers.{layer})", start, start + 0.2)]
        events += [event("gloo:all_gather", start, start + 4, GLOO)]
    events += layer_forward(0, 4, 14) + layer_forward(1, 18, 25)
    events += layer_backward(1, 30, 40) + layer_backward(0, 44, 54)
    return events


def test_gather_begun_ahead_is_counted_and_its_hidden_part_measured(tmp_path: Path) -> None:
    reading = read_fsdp(read(tmp_path, fsdp_step(ahead=True)))
    assert (reading.early, reading.possible) == (2, 2)
    # Two of four gathers run beside compute, less the moment of handing them over.
    assert reading.hidden_share == pytest.approx(7.6 / 16)


def test_gather_that_is_awaited_is_exposed(tmp_path: Path) -> None:
    reading = read_fsdp(read(tmp_path, fsdp_step(ahead=False)))
    assert reading.early == 0
    assert reading.hidden_share == 0.0


def test_copies_inside_fsdp_are_not_compute(tmp_path: Path) -> None:
    events = [
        *layer_forward(0, 0, 10),
        event("FSDP::all_gather_copy_out (layers.1)", 20, 30),
        event("aten::split_with_sizes_copy", 28, 30),
    ]
    assert read(tmp_path, events).compute == [(0.0, 10.0)]
