"""A rank's signals on a real GPU: nothing waits for them, they cost little, and they name it."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from phalanx.cluster.jobs.job import GangShape
from phalanx.train.measure import wait_hooks
from phalanx.train.measure.timing import StepTimer
from phalanx.train.report.records import StepRecord, read_records
from tests.gpu import shared_gpu
from tests.observe.replay import replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
WORLD = 4
WITHIN = 50
ROOT = Path(__file__).parents[2]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(DEVICE)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=DEVICE)
    yield
    dist.destroy_process_group()


def report(line: str) -> None:
    """For whoever runs this with ``-s``."""
    sys.stdout.write(f"{line}\n")


def step(timer: StepTimer, x: torch.Tensor, collectives: int) -> None:
    """Work and every kind of wait for peers."""
    ready = torch.cuda.Event()
    beside = torch.cuda.Stream()
    for i in range(collectives):
        with timer.phase("forward"):
            torch.mm(x, x)
        match i % 4:
            case 0:
                dist.all_reduce(x)
            case 1:
                work = dist.all_reduce(x, async_op=True)
                assert work is not None
                work.wait()
            case 2:
                functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
            case _:
                with torch.cuda.stream(beside):
                    ready.record(beside)
                torch.cuda.current_stream().wait_event(ready)
    timer.close_step()


@pytest.mark.usefixtures("group")
def test_no_step_waits_for_the_device() -> None:
    timer = StepTimer(DEVICE, peer_waits=True)
    x = torch.eye(2048, device=DEVICE)
    step(timer, x, 4)
    timer.drain()
    timer.restart()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):
            step(timer, x, 16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made = timer.drain()
    assert len(made) == 30
    for each in made:
        assert each.parts.peer_wait is not None and each.parts.own is not None
        assert 0 <= each.parts.peer_wait < each.seconds
        assert 0 < each.parts.own <= each.seconds
        assert each.parts.host is not None and 0 <= each.parts.host <= each.parts.own


@pytest.mark.usefixtures("group")
def test_a_stream_that_is_held_up_counts_as_waiting_and_a_busy_one_does_not() -> None:
    timer = StepTimer(DEVICE, peer_waits=True)
    beside, late = torch.cuda.Stream(), torch.cuda.Event()
    x = torch.eye(4096, device=DEVICE)
    torch.mm(x, x)
    torch.cuda.synchronize()
    timer.restart()
    with torch.cuda.stream(beside):
        torch.cuda._sleep(400_000_000)  # about 0.2 s: a peer that is late
        late.record(beside)
    torch.mm(x, x)
    torch.cuda.current_stream().wait_event(late)
    torch.mm(x, x)
    timer.close_step()
    (step_time,) = timer.drain()
    assert step_time.parts.peer_wait is not None and step_time.parts.own is not None
    assert step_time.parts.peer_wait > 0.8 * step_time.seconds
    assert step_time.parts.own < 0.2 * step_time.seconds


@pytest.mark.usefixtures("group")
def test_signals_cost_a_step_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, steps = 128, 8  # a wait after 1.5 ms of work: FSDP has fewer
    x = torch.eye(8192, device=DEVICE, dtype=torch.bfloat16)

    def seconds(*, on: bool) -> tuple[float, float]:
        """Of a step, and of the host alone."""
        timer = StepTimer(DEVICE, peer_waits=on)
        if not on:
            monkeypatch.setattr(wait_hooks, "_watching", None)
        step(timer, x, waits)
        timer.drain()
        began = time.perf_counter()
        for _ in range(steps):
            step(timer, x, waits)
        torch.cuda.synchronize()
        whole = time.perf_counter() - began
        small = torch.eye(16, device=DEVICE, dtype=torch.bfloat16)
        began = time.perf_counter()
        for _ in range(steps):
            step(timer, small, waits)
        return whole / steps, (time.perf_counter() - began) / steps

    seconds(on=True)
    measured = [(*seconds(on=False), *seconds(on=True)) for _ in range(5)]
    off, host_off, on, host_on = (statistics.median(each) for each in zip(*measured, strict=True))
    report(f"step {off * 1e3:.2f} ms without, {on * 1e3:.2f} ms with: {on / off - 1:+.2%}")
    report(
        f"a wait costs {(on - off) / waits * 1e6:.1f} us of the step, "
        f"{(host_on - host_off) / waits * 1e6:.1f} us of the host"
    )
    assert on < 1.01 * off


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("part", "factor", "expected"),
    [
        # While all share the GPU each has a quarter of it, and what one has more to do it does
        # alone: 40 % more kernels make its own time 10 % longer.
        ("gpu", 1.4, "compute"),
        ("host", 1.25, "host"),
    ],
)
def test_of_four_processes_on_one_gpu_the_slow_one_is_named(
    part: str, factor: float, expected: str, tmp_path: Path
) -> None:
    arguments = [str(WORLD), str(tmp_path), part, str(factor)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.shared_gpu", str(rank), *arguments], cwd=ROOT
        )
        for rank in range(WORLD)
    ]
    try:
        assert [rank.wait(250) for rank in ranks] == [0] * WORLD
    finally:
        for rank in ranks:
            rank.kill()
    records = [
        list(read_records(tmp_path / f"rank-{rank}.jsonl", StepRecord)) for rank in range(WORLD)
    ]
    named = replay(records, GangShape(replicas=WORLD, slot_gpus=1))
    tell(records, part)
    report(str(named))
    assert [(each.rank, each.part) for each in named] == [(WORLD - 1, expected)]
    assert shared_gpu.ONSET < named[0].step <= shared_gpu.ONSET + WITHIN


def tell(records: list[list[StepRecord]], part: str) -> None:
    """Print what the ranks measured, for whoever reads the test's output."""
    for rank, steps in enumerate(records):
        for name, chosen in (("before", steps[5:20]), ("after", steps[25:])):
            own = statistics.median(each.parts.own or 0.0 for each in chosen)
            host = statistics.median(each.parts.host or 0.0 for each in chosen)
            wait = statistics.median(each.parts.peer_wait or 0.0 for each in chosen)
            report(f"{part} rank {rank} {name}: own {own:.4f} host {host:.4f} wait {wait:.4f}")
