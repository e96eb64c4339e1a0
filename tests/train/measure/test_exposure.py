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
from torch.profiler import ProfilerActivity, profile

from phalanx.checkpoint import Checkpointer
from phalanx.parallel import build_mesh
from phalanx.train import trainer
from phalanx.train.measure.exposure import DeviceActivity, activity_of, communication
from phalanx.train.measure.profile import WARM_UP_STEPS, StepProfiler
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
    folder: Path, world_size: int, overrides: dict[str, object], slow_steps: tuple[int, ...] = ()
) -> list[StepRecord]:
    """The records of this rank; in a slow step the others wait for rank 1's first collective."""
    job = small_job(folder, world_size, checkpoint__at_end="false", **overrides)
    made = Trainer(job, build_mesh(job, CPU), CPU)
    reduce = made.agreement.start

    def late(*args: Any) -> torch.Tensor:
        if made.step + 1 in slow_steps and dist.get_rank() == 1:
            time.sleep(SLOW_SECONDS)
        return reduce(*args)

    made.agreement.start = late  # type: ignore[method-assign]
    sinks = Kept()
    run_folder = create(job)
    saves = Checkpointer(run_folder.checkpoints)
    loop.train(loop.attach(made, run_folder, sinks, saves, LocalOrders()))  # type: ignore[arg-type]
    made.close()
    return sinks.records


SLOW_SECONDS = 2.0  # much more than a busy machine holds a rank up
FIRST = WARM_UP_STEPS + 1  # the first step that is sampled


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, {}),
        (2, {"parallel__zero": 0}),
        (2, {"parallel__pipeline": 2}),
        (4, {"parallel__tensor": 2}),
    ],
    ids=["fsdp", "ddp", "pipeline", "fsdp-tensor"],
)
def test_a_sampled_step_is_measured_and_later_ones_are_estimates(
    world_size: int, overrides: dict[str, object], tmp_path: Path
) -> None:
    ranks = run_ranks(world_size, run_loop, tmp_path, world_size, overrides)
    for records in ranks:
        before, sample, *after = records[FIRST - 2 :]
        assert before.parts.exposed_communication is None
        assert "exposed_communication" not in (*before.estimated, *sample.estimated)
        assert after and all("exposed_communication" in r.estimated for r in after)
        for record in (sample, *after):
            exposed = record.parts.exposed_communication
            assert exposed is not None and 0 < exposed < record.step_seconds


def test_a_slow_peer_shows_as_exposed_communication(tmp_path: Path) -> None:
    overrides = {"log__communication_every": 2, "train__steps": FIRST + 2}
    waiting, slow = run_ranks(2, run_loop, tmp_path, 2, overrides, (FIRST,))
    late, usual = waiting[FIRST - 1], waiting[FIRST + 1]
    assert "exposed_communication" not in (*late.estimated, *usual.estimated)
    assert late.parts.exposed_communication >= 0.9 * SLOW_SECONDS
    assert usual.parts.exposed_communication < late.parts.exposed_communication / 2
    # The rank that slept did not wait for anybody.
    assert slow[FIRST - 1].parts.exposed_communication < 0.5 * SLOW_SECONDS


def test_sampling_can_be_turned_off_and_changes_no_bit(tmp_path: Path) -> None:
    off = run_ranks(2, run_loop, tmp_path, 2, {"log__communication_every": 0})[0]
    on = run_ranks(2, run_loop, tmp_path, 2, {"log__communication_every": 1})[0]
    assert all(record.parts.exposed_communication is None for record in off)
    assert all(record.parts.exposed_communication is not None for record in on[FIRST - 1 :])
    assert [(r.loss, r.grad_norm) for r in off] == [(r.loss, r.grad_norm) for r in on]


def beside_another_profiler(folder: Path) -> list[StepRecord]:
    with profile(activities=[ProfilerActivity.CPU]):
        return run_loop(folder, 2, {})


def test_where_another_profiler_runs_the_run_goes_on_without_samples(tmp_path: Path) -> None:
    records = run_ranks(2, beside_another_profiler, tmp_path)[0]
    assert len(records) == 6
    assert all(record.parts.exposed_communication is None for record in records)


def traced_and_sampled(folder: Path) -> tuple[list[StepRecord], list[str]]:
    job = small_job(folder, 2, log__profile_steps="[3, 5]", checkpoint__at_end="false")
    run_folder = create(job)
    made = Trainer(job, build_mesh(job, CPU), CPU)
    sinks = Kept()
    saves = Checkpointer(run_folder.checkpoints)
    loop.train(loop.attach(made, run_folder, sinks, saves, LocalOrders()))  # type: ignore[arg-type]
    made.close()
    return sinks.records, sorted(path.name for path in run_folder.logs.iterdir())


def test_a_sample_waits_until_the_steps_traced_for_a_person_are_over(tmp_path: Path) -> None:
    for rank, (records, files) in enumerate(run_ranks(2, traced_and_sampled, tmp_path)):
        measured = [r.step for r in records if r.parts.exposed_communication is not None]
        assert measured[0] == 5
        assert files == [f"trace-rank-{rank}.communication.json", f"trace-rank-{rank}.json"]


def test_the_end_of_a_run_says_what_communication_cost(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start(small_job(tmp_path))
    assert run.wait() == 0
    assert "in communication that nothing hid" in run.exit.message
    assert "  comm " in run.text


def test_one_rank_has_nobody_to_talk_to(tmp_path: Path) -> None:
    job = small_job(tmp_path, 1, log__communication_every=1)
    profiler = StepProfiler(job.log, create(job), trainer.StepTimer(CPU), first_step=1)
    for step in range(1, 9):
        profiler.start(step)
        torch.ones(2).sum()
        profiler.stop(step)
        assert profiler.exposed_seconds is None
