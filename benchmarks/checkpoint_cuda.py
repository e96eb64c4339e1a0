"""Checkpoints of a 1B model in training on one GPU: what a save adds, and what its flush costs."""

from __future__ import annotations

import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.tensor import DTensor

from benchmarks.checkpoint import Times
from phalanx.checkpoint import Checkpointer
from phalanx.config import PRESETS, Data, Job, Schedule, Train, resolve
from phalanx.parallel.mesh import build_mesh
from phalanx.train.trainer import Trainer

WINDOW_STEPS = 4
BATCH, SEQUENCE = 4, 8192
PEER_ROUNDS = 1  # of DCP, which takes a minute and adds seconds


class Bench:
    """A trainer, its normal step time, and saves beside it."""

    def __init__(self, folder: Path, preset: str) -> None:
        self.folder = folder
        self.device = torch.device("cuda", 0)
        job = resolve(
            Job(
                name="checkpoint",
                model=msgspec.structs.replace(PRESETS[preset], tied_embedding=False),
                data=Data(source="synthetic", sequence=SEQUENCE),
                schedule=Schedule(kind="constant"),
                train=Train(steps=1_000_000, global_batch=BATCH, micro_batch=BATCH),
            ),
            1,
        )
        self.trainer = Trainer(job, build_mesh(job, self.device), self.device)
        self.times: Times = {}
        self.before_update: Callable[[], Any] = lambda: None  # of whatever is measured
        self.window(2 * WINDOW_STEPS)  # compiles and warms up
        windows = [self.window(WINDOW_STEPS) for _ in range(5)]
        self.step_seconds = statistics.median(windows) / WINDOW_STEPS
        self.times["step: normal"] = [seconds / WINDOW_STEPS for seconds in windows]

    def window(self, steps: int, before: Callable[[], Any] = lambda: None) -> float:
        """Seconds of some steps, with something first; the device is waited for at the end only."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        before()
        for _ in range(steps):
            self.trainer.train_step(before_update=self.before_update)
            self.trainer.timer.close_step()
        torch.cuda.synchronize()
        self.trainer.timer.drain()
        return time.perf_counter() - began

    def note(self, name: str, seconds: float) -> None:
        print(f"{name}: {seconds:.4f} s", file=sys.stderr, flush=True)  # a run may be cut off
        self.times.setdefault(name, []).append(seconds)

    def save(self, name: str, start: Callable[[], Any], is_done: Callable[[], bool]) -> None:
        """One save in training: what it adds, then steps until it is durable."""
        call: list[float] = []

        def begin() -> None:
            began = time.perf_counter()
            start()
            call.append(time.perf_counter() - began)

        began = time.perf_counter()
        took = self.window(WINDOW_STEPS, begin)
        self.note(f"stall: {name}, call alone", call[0])
        self.note(f"stall: {name}, added", took - WINDOW_STEPS * self.step_seconds)
        while not is_done():
            self.note(f"step: while {name} writes", self.window(WINDOW_STEPS) / WINDOW_STEPS)
        self.note(f"durable: {name}", time.perf_counter() - began)


def measure_ours(bench: Bench, rounds: int) -> None:
    trainer = bench.trainer
    checkpointer = Checkpointer(bench.folder / "phalanx", keep=1)
    began = time.perf_counter()
    made = checkpointer.prepare_background(
        trainer.tensors(),
        generation=0,
        step=0,
        device=bench.device,
        lease_seconds=5.0,
        overlap=True,
    )
    bench.note("start: memory made and pinned", time.perf_counter() - began)
    assert made, "the keeper has no memory"
    bench.before_update = checkpointer.before_update
    for _ in range(rounds):
        bench.save(
            "phalanx",
            lambda: checkpointer.save(trainer.step, trainer.tensors(), trainer.extra()),
            lambda: bool(checkpointer.poll()),
        )
    checkpointer.finish()
    checkpointer.close()
    bench.before_update = lambda: None
    shutil.rmtree(bench.folder / "phalanx", ignore_errors=True)  # the keeper may still remove, too


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on this rank; with one rank that is all of it."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def measure_dcp(bench: Bench, rounds: int) -> None:
    """DCP's own best here: a reused stager, pinned memory, staging beside the next forward."""
    trainer = bench.trainer
    state = {name: plain(tensor) for name, tensor in trainer.tensors().items()}
    stager = DefaultStager(StagingOptions(use_shared_memory=False))
    # torch 2.11 empties a stager after each save, so that a second one by it fails.
    stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]
    for number in range(rounds):
        path = bench.folder / f"dcp-{number}"
        found: list[Any] = []

        def start(path: Path = path, found: list[Any] = found) -> None:
            found.append(async_save(state, checkpoint_id=path, async_stager=stager))
            bench.before_update = lambda: found[0].staging_completion.result()

        def uploaded(found: list[Any] = found) -> bool:
            return bool(found[0].upload_completion.done())

        bench.save("dcp", start, uploaded)
        found[0].upload_completion.result()
        shutil.rmtree(path, ignore_errors=True)
    bench.before_update = lambda: None


def run_on_cuda(folder: Path, rounds: int, preset: str) -> tuple[Times, dict[str, float], int]:
    """Both sides one after the other; times, figures and the bytes of a checkpoint."""
    store = FileStore(str(folder / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        bench = Bench(folder, preset)
        total = sum(tensor.numel() * 4 for tensor in bench.trainer.tensors().values())
        measure_ours(bench, rounds)
        measure_dcp(bench, PEER_ROUNDS)
    finally:
        dist.destroy_process_group()
    times = bench.times
    added = statistics.median(times["stall: phalanx, added"])
    writing = times.get("step: while phalanx writes", times["step: normal"])
    slower = statistics.median(writing) / bench.step_seconds
    figures = {
        "added_seconds": added,
        "step_while_writing": slower,
        "added_of_dcp": added / max(1e-9, statistics.median(times["stall: dcp, added"])),
    }
    return times, figures, total
