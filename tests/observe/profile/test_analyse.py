"""Where traced steps went: on made-up traces of a GPU and of a CPU."""

from __future__ import annotations

import pytest

from phalanx.observe.profile.analyse import analyse
from phalanx.observe.profile.events import read_events
from phalanx.observe.profile.syncs import host_syncs
from tests.observe.profile.played import (
    kernel,
    launch,
    nccl,
    operation,
    phase,
    span,
    trace,
)

MM = {"dims": [[4096, 1024], [1024, 1024]]}


def milli(seconds: float) -> float:
    return round(seconds * 1e6)  # a made-up step has 1000 microseconds


def test_every_microsecond_of_a_step_has_one_kind() -> None:
    """Products over 0-300, gathers over 200-500, the optimizer over 500-600, data over 600-800."""
    found = analyse(
        read_events(
            trace(
                operation("aten::mm", 1, 0, 5, **MM),
                launch(1, 1),
                kernel("nvjet_tst", 1, 0, 300),
                nccl("_allgather_base", "mesh_shard", 200, 500, 1 << 20),
                phase("optimizer", 400, 480),
                operation("aten::add", 2, 410, 420),
                launch(2, 411),
                kernel("elementwise", 2, 500, 600),
                phase("data", 590, 800),
                span("gpu_memcpy", "Memcpy HtoD", 800, 850),
            )
        )
    )
    assert {kind: milli(seconds) for kind, seconds in found.kinds.items()} == {
        "matmul": 300,
        "exposed communication": 200,
        "optimizer": 100,
        "data wait": 200,
        "copy": 50,
        "launch gap": 150,
    }
    assert sum(found.kinds.values()) == pytest.approx(found.seconds) == 1e-3
    (row,) = found.axes
    assert (row.axis, milli(row.seconds), milli(row.exposed_seconds)) == ("shard", 300, 200)
    assert row.bytes == 2 << 20
    product = found.kernels[0]
    assert product.flops == 2 * 4096 * 1024 * 1024
    assert product.intensity == pytest.approx(2 * 4096 * 1024**2 / (2 * (9 * 1024**2)), rel=1e-6)


def test_a_gap_after_a_wait_of_the_host_is_a_sync() -> None:
    events = [
        operation("aten::mm", 1, 0, 5, **MM),
        launch(1, 1),
        kernel("nvjet", 1, 0, 400),
        launch(2, 700),
        kernel("nvjet", 2, 700, 1000),
    ]
    waits = span("cuda_runtime", "cudaStreamSynchronize", 100, 402)
    with_wait = analyse(read_events(trace(*events, waits)))
    assert milli(with_wait.kinds["host sync"]) == 300
    without = analyse(read_events(trace(*events)))
    assert "host sync" not in without.kinds
    assert milli(without.kinds["launch gap"]) == 300


def test_forward_within_backward_is_recomputed() -> None:
    """Operations that record a graph while backward runs are forward's, made again."""
    found = analyse(
        read_events(
            trace(
                phase("forward", 0, 200),
                phase("backward", 200, 900),
                operation("aten::mm", 1, 10, 20, sequence=3, **MM),
                launch(1, 11),
                kernel("nvjet", 1, 10, 200),
                operation("MmBackward0", 9, 300, 500, sequence=3),
                operation("aten::mm", 2, 310, 320, sequence=8, **MM),
                launch(2, 311),
                kernel("nvjet", 2, 320, 400),
                operation("aten::mm", 3, 410, 420, **MM),
                launch(3, 411),
                kernel("nvjet", 3, 420, 700),
            )
        )
    )
    assert milli(found.recomputed_seconds) == 80


def test_on_cpu_the_main_thread_s_innermost_operation_counts() -> None:
    """Python's own time, also inside a node of autograd's graph, is nobody's."""
    gather = span("user_annotation", "gloo:all_gather", 500, 800)
    gather["args"] = {"Input Dims": [[1024]], "Input type": ["float"]}
    gather["tid"] = 99
    found = analyse(
        read_events(
            trace(
                operation("aten::linear", 1, 0, 300, dtype="float", dims=[[8, 8], [8, 8]]),
                operation("aten::mm", 2, 100, 300, dtype="float", dims=[[8, 8], [8, 8]]),
                operation("AddBackward0", 3, 300, 500),
                operation("aten::add", 4, 450, 600, dtype="float", dims=[[8, 8]]),
                gather,
            )
        ),
        "data",
    )
    assert {kind: milli(seconds) for kind, seconds in found.kinds.items()} == {
        "matmul": 200,
        "norm and elementwise": 250,
        "exposed communication": 200,
        "launch gap": 350,
    }
    (row,) = found.axes
    assert (row.axis, row.bytes, milli(row.exposed_seconds)) == ("data", 4096, 200)


def test_a_trace_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no range 'phalanx\.step'"):
        read_events({"traceEvents": [phase("data", 0, 1)]})


def test_syncs_are_named_by_the_innermost_line_outside_torch() -> None:
    def frame(name: str, start: float, end: float) -> dict[str, object]:
        return span("python_function", name, start, end)

    made = trace(
        kernel("nvjet", 1, 0, 10),
        frame("probe.py(12): after_step", 100, 400),
        frame("torch/_tensor.py(900): item", 110, 390),
        frame("<built-in method item of Tensor object>", 120, 380),
        span("cuda_runtime", "cudaStreamSynchronize", 130, 370),
        frame("phalanx/train/trainer.py(344): outcome", 500, 600),
        span("cuda_runtime", "cudaEventSynchronize", 510, 590),
        span("cuda_runtime", "cudaStreamSynchronize", 5000, 5001),
    )
    assert [(sync.where, sync.calls) for sync in host_syncs(made)] == [
        ("probe.py(12): after_step", 1.0),
        ("phalanx/train/trainer.py(344): outcome", 1.0),
    ]
