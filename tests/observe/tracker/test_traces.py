"""Traces of several ranks become one picture on one clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from phalanx.config import Log
from phalanx.observe.tracker.traces import merge_traces, trace_of
from phalanx.train.measure.profile import ProfileAsk, StepProfiler, asked_path
from phalanx.train.measure.timing import StepTimer
from phalanx.train.report.run_folder import RunFolder


def trace(base: int, *events: dict[str, Any]) -> dict[str, Any]:
    return {"baseTimeNanoseconds": base, "traceEvents": list(events)}


def test_events_of_one_moment_meet_whatever_the_clocks_say() -> None:
    at = {"ph": "X", "name": "step", "pid": 7, "tid": 1, "ts": 100.0, "dur": 5.0}
    named = {"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}
    merged = json.loads(
        merge_traces(
            # Rank 1's node is two seconds ahead, and its trace began a second later.
            {0: trace(10**12, named, at), 1: trace(10**12 + 3 * 10**9, named, at)},
            {0: 0.0, 1: 2.0},
        )
    )
    steps = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert [event["ts"] for event in steps] == [100.0, 1_000_100.0]
    assert len({event["pid"] for event in steps}) == 2
    names = [e["args"]["name"] for e in merged["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 python", "rank 1 python"]


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "M", "name": "process_name", "pid": 1, "args": ["x"]},
        {"ph": "M", "name": "process_name", "pid": 1, "args": "x"},
        {"ph": "X", "name": "step", "pid": [1], "ts": 1.0},
        {"ph": "X", "name": "step", "pid": {"a": 1}, "ts": True},
    ],
)
def test_an_event_of_an_odd_form_does_not_cost_the_other_ranks_traces(
    event: dict[str, Any],
) -> None:
    """A program of a job's own may write what it likes there."""
    sound = {"ph": "X", "name": "sound", "pid": 7, "ts": 1.0, "dur": 1.0}
    merged = json.loads(merge_traces({0: trace(0, event, sound)}, {}))
    assert "sound" in [each["name"] for each in merged["traceEvents"]]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"traceEvents": 3}', '{"x": 1}'])
def test_what_is_no_trace_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="rank 3: no trace"):
        trace_of(text.encode(), "rank 3")


def test_steps_that_somebody_asks_for_while_the_job_runs_are_traced(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    ask, timer = ProfileAsk(), StepTimer(torch.device("cpu"))
    profiler = StepProfiler(Log(), folder, timer, ask)
    for step in range(1, 8):
        if step == 3:
            ask.ask(2)
        profiler.start(step)
        torch.ones(8) @ torch.ones(8)
        profiler.stop(step)
        timer.close_step()
    profiler.close()
    found = sorted(path.name for path in folder.logs.glob("trace-*.json"))
    assert asked_path(folder, 3, 0).name in found
    events = trace_of(asked_path(folder, 3, 0).read_bytes(), "it")["traceEvents"]
    assert sum(event.get("name") == "aten::dot" for event in events) == 2
    assert not list(folder.logs.glob("*.tmp"))
