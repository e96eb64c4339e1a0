"""Traces of chosen steps, for a person to open in a trace viewer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from phalanx.config import Log
from phalanx.train.run_folder import RunFolder


class StepProfiler:
    """Writes ``logs/trace-rank-N.json`` of the steps ``log.profile_steps = [first, last)``."""

    def __init__(self, log: Log, run_folder: RunFolder) -> None:
        self._steps = range(*log.profile_steps) if log.profile_steps else range(0)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._path = run_folder.logs / f"trace-rank-{rank}.json"
        self._profile: profile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """The run may end before the last traced step: what there is, is kept."""
        if self._profile is not None:
            self._finish(self._profile)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace what runs inside if this step is asked for."""
        if step in self._steps and self._profile is None:
            self._profile = self._started()
        yield
        if self._profile is not None and step >= self._steps[-1]:
            self._finish(self._profile)

    def _started(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        tracer = profile(activities=activities)
        tracer.start()
        return tracer

    def _finish(self, tracer: profile) -> None:
        self._profile = None
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        tracer.stop()
        tracer.export_chrome_trace(str(self._path))
