"""Steps of a small model on the device at hand, for what no term of the step model counts."""

from __future__ import annotations

import gc
import time

import torch
from msgspec import structs

from phalanx.config import PRESETS, Data, Job, Memory, Schedule, Train, resolve
from phalanx.parallel.mesh import build_mesh
from phalanx.plan.cost.measured import TimedStep
from phalanx.plan.question.emit import mapping_of, workload_of
from phalanx.train.trainer import Trainer

PRESET, LAYERS, SEQUENCE, MICRO_BATCH = "llama3-1b", 6, 4096, 2
MICRO_BATCHES = (2, 6)
WARM_SECONDS = 3.0  # of steps before the clock is read: power limits bite by then
STEPS = 8


def timed_steps() -> tuple[TimedStep, ...]:
    """The same model with few and with more micro-batches."""
    return tuple(_timed(small_job(count)) for count in MICRO_BATCHES)


def small_job(micro_batches: int) -> Job:
    """A job that any card which trains can hold."""
    job = Job(
        name="calibrate",
        model=structs.replace(PRESETS[PRESET], layers=LAYERS),
        data=Data(source="synthetic", sequence=SEQUENCE),
        schedule=Schedule(kind="constant"),
        memory=Memory(recompute="none"),
        train=Train(steps=1000, global_batch=MICRO_BATCH * micro_batches, micro_batch=MICRO_BATCH),
    )
    return resolve(job, 1)


def _timed(job: Job) -> TimedStep:
    device = torch.device("cuda", torch.cuda.current_device())
    trainer = Trainer(job, build_mesh(job, device), device)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_SECONDS:
        trainer.train_step()
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        trainer.train_step()
        trainer.timer.close_step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / STEPS
    trainer.close()
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return TimedStep(workload=workload_of(job), mapping=mapping_of(job), seconds=seconds)
