"""Traces a few steps of a run, and tells what no trace says; a callback around all others."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from phalanx.config import Data
from phalanx.data.feed import steps_read_ahead
from phalanx.train.callback import TRACING, Callback, TrainingRun
from phalanx.train.measure.memory import state_bytes
from phalanx.train.profile.facts import (
    STEP_RANGE,
    DeviceRates,
    MemoryFacts,
    ProfileFacts,
    ProfileFiles,
)
from phalanx.train.profile.power import DriverQuestion, PowerQuestion
from phalanx.train.profile.rates import measure_rates
from phalanx.train.trainer import ALLOCATOR_SETTINGS

if TYPE_CHECKING:
    from phalanx.train.trainer import StepOutcome

# Else each trace is announced in the rank's log; read when the first one begins.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

WARM_STEPS = 3  # that compile, choose algorithms and fill the allocator


def warm_steps(data: Data) -> int:
    """Steps before the first that tells something."""
    return WARM_STEPS + steps_read_ahead(data)


class ProfileRecorder(Callback):
    """After ``timed`` undisturbed steps, ``traced`` ones become a trace, and one more its stacks.

    Python's stacks slow a step down: they only say where in the code something happened.
    """

    claims = frozenset({TRACING})

    def __init__(
        self,
        timed: int,
        traced: int,
        ask_power: Callable[[int], PowerQuestion] = DriverQuestion,
        warm: int = WARM_STEPS,
    ) -> None:
        self.timed = timed
        self._warm = warm
        self.first = warm + timed + 1
        self.last = self.first + traced - 1
        self.steps = self.last + 1
        self._ask_power = ask_power
        self._question: PowerQuestion | None = None
        self._profile: profile | None = None
        self._range: record_function | None = None
        self._state: dict[str, int] = {}
        self._rates = DeviceRates({}, 0.0)
        self._graphs = self._retries = 0

    def begin(self, run: TrainingRun) -> None:
        """Every rank measures at the same time: they share cores and power."""
        self._rates = measure_rates(run.trainer.device)

    def before_step(self, run: TrainingRun) -> None:
        step = run.step + 1
        if run.rank != 0 or step <= self._warm:
            return
        device = run.trainer.device
        if step == self._warm + 1:
            self._graphs = _compiled_graphs()
            if device.type == "cuda":
                self._retries = torch.cuda.memory_stats(device)["num_alloc_retries"]
        if step == self.first and device.type == "cuda":
            self._question = self._ask_power(device.index or 0)
        if step in (self.first, self.steps):
            self._start(run, stacks=step == self.steps)
        if step >= self.first:
            self._range = record_function(STEP_RANGE)
            self._range.__enter__()

    def before_update(self, run: TrainingRun) -> None:
        if run.rank == 0 and run.step + 1 == self.first:
            self._state = state_bytes(run.trainer, run.trainer.device)

    def after_step(self, run: TrainingRun, outcome: StepOutcome) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self._profile is None or run.step not in (self.last, self.steps):
            return
        files = ProfileFiles(run.folder)
        self._stop(run, files.trace if run.step == self.last else files.stacks)
        if run.step == self.last:
            files.facts.write_bytes(msgspec.json.encode(self._facts(run)) + b"\n")

    def _start(self, run: TrainingRun, *, stacks: bool) -> None:
        activities = [ProfilerActivity.CPU]
        if run.trainer.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        tracer = profile(
            activities=activities,
            record_shapes=not stacks,
            profile_memory=not stacks,
            with_stack=stacks,
        )
        with run.trainer.timer.phase("tracing"):
            _wait(run.trainer.device)
            tracer.start()
        self._profile = tracer

    def _stop(self, run: TrainingRun, path: Path) -> None:
        tracer, self._profile = self._profile, None
        assert tracer is not None
        with run.trainer.timer.phase("tracing"):
            _wait(run.trainer.device)
            tracer.stop()
            tracer.export_chrome_trace(str(path))

    def _facts(self, run: TrainingRun) -> ProfileFacts:
        device = run.trainer.device
        cuda = device.type == "cuda"
        graphs = _compiled_graphs()
        return ProfileFacts(
            device=device.type,
            device_name=torch.cuda.get_device_name(device) if cuda else _processor(),
            world_size=run.trainer.mesh.world_size,
            traced=(self.first, self.last),
            rates=self._rates,
            memory=self._memory(run),
            power=self._question.answer() if self._question is not None else None,
            graphs=graphs,
            recompiles=graphs - self._graphs,
        )

    def _memory(self, run: TrainingRun) -> MemoryFacts:
        device = run.trainer.device
        allocator = next((os.environ[n] for n in ALLOCATOR_SETTINGS if n in os.environ), "")
        if device.type == "cpu":
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
            share = whole // run.trainer.mesh.world_size
            return MemoryFacts(
                limit_bytes=share,
                state=self._state,
                peak_bytes=resident,
                reserved_bytes=resident,
                allocator=allocator,
            )
        stats = torch.cuda.memory_stats(device)
        return MemoryFacts(
            limit_bytes=torch.cuda.get_device_properties(device).total_memory,
            state=self._state,
            peak_bytes=stats["allocated_bytes.all.peak"],
            reserved_bytes=stats["reserved_bytes.all.current"],
            retries=stats["num_alloc_retries"] - self._retries,
            allocator=allocator,
        )


def _compiled_graphs() -> int:
    """Graphs that dynamo has made; none where nothing asked for it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _processor() -> str:
    """The CPU by its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "CPU"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "CPU")
