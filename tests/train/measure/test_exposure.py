"""Exposed communication is what no compute ran beside."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from phalanx.checkpoint import Checkpointer
from phalanx.parallel import build_mesh
from phalanx.train.measure.exposure import DeviceActivity, activity_of, communication
from phalanx.train.rank import loop
from phalanx.train.rank.local_orders import LocalOrders
from phalanx.train.report.records import StepRecord
from phalanx.train.report.run_folder import create
from phalanx.train.trainer import Trainer
from tests.ranks import run_ranks
from tests.train.forked_runs import Run, small_job, start

__all__ = ["start"]

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("compute", "talking", "all_talk", "exposed"),
    [
        ([(0, 4)], [], 0, 0),
        ([(0, 4)], [(4, 6)], 2, 2),  # after all compute
        ([(0, 4)], [(1, 3)], 2, 0),  # hidden
        ([(0, 4)], [(3, 6)], 3, 2),  # partly
        ([(0, 4), (5, 8)], [(3, 6)], 3, 1),
        ([(8, 9)], [(0, 2), (1, 3)], 3, 3),  # two collectives at once count once
        ([(5, 6), (0, 1)], [(5, 6)], 1, 0),  # in any order
    ],
)
def test_only_uncovered_communication_is_exposed(
    compute: list[tuple[float, float]],
    talking: list[tuple[float, float]],
    all_talk: float,
    exposed: float,
) -> None:
    found = communication(DeviceActivity(talking, compute), steps=2)
    assert found.seconds_per_step == pytest.approx(all_talk / 2)
    assert found.exposed_seconds_per_step == pytest.approx(exposed / 2)


class Event(NamedTuple):
    """A raw profiler event."""

    label: str
    start: int
    end: int
    device: DeviceType = DeviceType.CPU
    thread: int = 1

    def name(self) -> str:
        return self.label

    def device_type(self) -> DeviceType:
        return self.device

    def start_ns(self) -> int:
        return self.start * 10**9

    def duration_ns(self) -> int:
        return (self.end - self.start) * 10**9

    def start_thread_id(self) -> int:
        return self.thread


def test_on_cuda_kernels_count_and_copies_to_the_host_hide_nothing() -> None:
    gpu = DeviceType.CUDA
    found = activity_of(
        [
            Event("gemm", 0, 4, gpu),
            Event("ncclDevKernel_AllReduce_Sum_bf16", 3, 7, gpu),
            Event("Memcpy PtoP (Device -> Device)", 8, 9, gpu),
            Event("Memcpy DtoH (Device -> Pinned)", 4, 9, gpu),
            Event("cudaLaunchKernel", 0, 9),  # the host's side of it
        ]
    )
    assert found == DeviceActivity([(3, 7), (8, 9)], [(0, 4)])


def test_on_cpu_the_main_threads_waits_are_no_compute() -> None:
    found = activity_of(
        [
            Event("aten::mm", 0, 10),
            Event("aten::mul", 10, 11),
            Event("_c10d_functional::wait_tensor", 4, 9),  # inside of an operation on a DTensor
            Event("gloo:all_reduce", 3, 9, thread=7),
            Event("aten::add_", 3, 9, thread=7),  # gloo's own arithmetic
        ]
    )
    assert found == DeviceActivity([(3, 9)], [(0, 4), (9, 11)])


def test_a_trace_that_shows_no_compute_measures_nothing() -> None:
    assert activity_of([Event("gloo:all_reduce", 0, 1)]) is None
    assert activity_of([]) is None


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def write(self, records: list[Any]) -> None:
        self.records += [record for record in records if isinstance(record, StepRecord)]


def run_loop(
    folder: Path, world_size: int, overrides: dict[str, object], slow_step: int = 0
) -> list[StepRecord]:
    """The records of this rank; in the slow step the last rank is late with its forward pass."""
    job = small_job(folder, world_size, checkpoint__at_end="false", **overrides)
    made = Trainer(job, build_mesh(job, CPU), CPU)
    begin = made.engine._begin

    def late(*args: Any, **named: Any) -> None:
        if made.step + 1 == slow_step and dist.get_rank() == world_size - 1:
            time.sleep(SLOW_SECONDS)
        begin(*args, **named)

    made.engine._begin = late  # type: ignore[method-assign]
    sinks = Kept()
    run_folder = create(job)
    saves = Checkpointer(run_folder.checkpoints)
    loop.train(loop.attach(made, run_folder, sinks, saves, LocalOrders()))  # type: ignore[arg-type]
    made.close()
    return sinks.records


SLOW_SECONDS = 2.0  # much more than a busy machine holds a rank up
SLOW_STEP = 5


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, {"parallel__zero": 3}),
        (2, {"parallel__zero": 0}),
        (2, {"parallel__zero": 0, "train__deterministic": "true"}),
        (2, {"parallel__pipeline": 2}),
        (2, {"parallel__tensor": 2}),
        (2, {"parallel__context": 2, "parallel__context_method": "ring"}),
        (2, {"parallel__context": 2, "parallel__context_method": "ulysses"}),
    ],
    ids=["fsdp", "ddp", "ddp-apart", "pipeline", "tensor", "ring", "ulysses"],
)
def test_whatever_splits_the_model_a_late_rank_is_told_by_its_own_work_alone(
    world_size: int, overrides: dict[str, object], tmp_path: Path
) -> None:
    ranks = run_ranks(world_size, run_loop, tmp_path, world_size, overrides, SLOW_STEP)
    *waiting, slow = (records[SLOW_STEP - 1].parts for records in ranks)
    assert slow.own is not None and slow.peer_wait is not None
    assert slow.own >= 0.9 * SLOW_SECONDS and slow.peer_wait < 0.5 * SLOW_SECONDS
    for parts in waiting:
        assert parts.peer_wait is not None and parts.own is not None
        assert parts.peer_wait >= 0.8 * SLOW_SECONDS  # that it saw, wherever it waited
        assert parts.own < 0.5 * SLOW_SECONDS
    for records in ranks:  # every step is measured, none is estimated
        assert all(record.parts.peer_wait is not None for record in records)
        assert "peer_wait" not in records[-1].estimated


def traced(folder: Path) -> tuple[list[StepRecord], list[str]]:
    job = small_job(folder, 2, log__profile_steps="[3, 5]", checkpoint__at_end="false")
    run_folder = create(job)
    made = Trainer(job, build_mesh(job, CPU), CPU)
    sinks = Kept()
    saves = Checkpointer(run_folder.checkpoints)
    loop.train(loop.attach(made, run_folder, sinks, saves, LocalOrders()))  # type: ignore[arg-type]
    made.close()
    return sinks.records, sorted(path.name for path in run_folder.logs.iterdir())


def test_steps_traced_for_a_person_have_a_summary_beside_the_trace(tmp_path: Path) -> None:
    for rank, (records, files) in enumerate(run_ranks(2, traced, tmp_path)):
        assert len(records) == 6
        assert files == [f"trace-rank-{rank}.communication.json", f"trace-rank-{rank}.json"]


def test_the_end_of_a_run_says_what_communication_cost(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(small_job(tmp_path))
    assert run.wait() == 0
    assert "in communication that nothing hid" in run.exit.message
    assert "  comm " in run.text
