"""Turns what steps leave on the device into records; ends runs whose losses stay no numbers."""

from __future__ import annotations

import math
import resource
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from phalanx.config import Job, batch_ramp
from phalanx.hardware import lookup
from phalanx.plan.memory.model_counts import StepFlops, flops_per_token
from phalanx.train.exits import NonFiniteLoss
from phalanx.train.measure.timing import StepTime, StepTimer
from phalanx.train.report.records import StepParts, StepRecord

if TYPE_CHECKING:
    from phalanx.train.trainer import StepOutcome

ETA_STEPS = 20  # recent steps whose mean predicts the rest


class Peak(NamedTuple):
    """What MFU is a share of: FLOP/s of all devices together, or why that is unknown."""

    flops_per_second: float | None
    basis: str


class Meter:
    """Collects the outcomes of steps and makes their records at the log interval."""

    def __init__(
        self, job: Job, device: torch.device, timer: StepTimer, generation: int = 0
    ) -> None:
        self._job = job
        self._device = device
        self._timer = timer
        self._generation = generation
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._world_size = dist.get_world_size() if dist.is_initialized() else 1
        self._flops: dict[int, StepFlops] = {}  # by the length of samples
        self._ramp = batch_ramp(job)
        self._peak = device_peak(job, device, self._world_size)
        self._pending: list[_Pending] = []
        self._recent_seconds: deque[float] = deque(maxlen=ETA_STEPS)
        self._warming_up = True
        self._non_finite_steps = 0
        self._step_seconds = self._data_seconds = self._peer_seconds = 0.0
        self.skipped_steps = self.damaged_samples = self.unlabelled_steps = 0

    @property
    def data_share(self) -> float:
        """Share of the recorded step time that was spent waiting for data."""
        return self._data_seconds / self._step_seconds if self._step_seconds else 0.0

    @property
    def oddities(self) -> dict[str, int]:
        """What a run should have none of."""
        return {
            "skipped_steps": self.skipped_steps,
            "damaged_samples": self.damaged_samples,
            "steps_without_labels": self.unlabelled_steps,
        }

    def waiting_text(self) -> str:
        """How much of the step time made no progress, in words."""
        text = f"{self.data_share:.2%} of the step time waiting for data"
        if self._step_seconds and self._world_size > 1:
            share = self._peer_seconds / self._step_seconds
            text += f", {share:.0%} in communication that nothing hid"
        return text

    def add(
        self, step: int, tokens_seen: int, outcome: StepOutcome, snapshot_every: int = 0
    ) -> None:
        """Keep the outcome of a finished step; nothing is waited for."""
        self._timer.close_step()
        self._pending.append(_Pending(step, tokens_seen, outcome, snapshot_every))

    def records(self) -> list[StepRecord]:
        """Records of the steps since the last call, for one transfer from the device."""
        if not self._pending:
            return []
        values = _to_host([pending.outcome for pending in self._pending])
        times = self._timer.drain()
        peak_bytes = peak_memory_bytes(self._device)
        steps = zip(self._pending, values, times, strict=True)
        made = [self._record(pending, host, time, peak_bytes) for pending, host, time in steps]
        self._pending = []
        return made

    def check_finite(self, records: list[StepRecord]) -> None:
        """Raise when the run has made no finite step for ``train.max_non_finite`` steps.

        Every rank sees the same values, so all of them stop at the same step.
        """
        for record in records:
            self._non_finite_steps = self._non_finite_steps + 1 if record.non_finite else 0
            if self._non_finite_steps >= self._job.train.max_non_finite > 0:
                first = record.step - self._non_finite_steps + 1
                raise NonFiniteLoss(first, self._non_finite_steps)

    def _record(
        self, pending: _Pending, host: HostValues, time: StepTime, peak_bytes: int
    ) -> StepRecord:
        step, tokens_seen, outcome, snapshot_every = pending
        tokens_per_second = outcome.tokens / time.seconds if time.seconds > 0 else 0.0
        self._step_seconds += time.seconds
        self._data_seconds += time.parts.data
        self._peer_seconds += time.parts.peer_wait or 0.0
        self.skipped_steps += bool(host.skipped)
        self.damaged_samples += outcome.damaged
        self.unlabelled_steps += not outcome.labels
        sample_seconds = self._sample_seconds(time.seconds / outcome.samples)
        samples_left = self._ramp.samples(self._job.train.steps) - self._ramp.samples(step)
        parts, estimated = self._split_pipeline(time.parts)
        flops = self._flops_of(outcome.tokens // outcome.samples)
        return StepRecord(
            job=self._job.name,
            generation=self._generation,
            rank=self._rank,
            step=step,
            first_sample=outcome.first_sample,
            samples=outcome.samples,
            tokens=outcome.tokens,
            tokens_seen=tokens_seen,
            damaged=outcome.damaged,
            loss=_finite(host.loss),
            grad_norm=_finite(host.grad_norm),
            learning_rate=outcome.learning_rate,
            step_seconds=time.seconds,
            parts=parts,
            sends=time.sends,
            estimated=estimated,
            tokens_per_second=tokens_per_second,
            mfu=self._share_of_peak(tokens_per_second * flops.model_flops),
            hfu=self._share_of_peak(tokens_per_second * flops.hardware_flops),
            mfu_basis=self._peak.basis,
            peak_memory_bytes=peak_bytes,
            eta_seconds=max(samples_left, 0) * sample_seconds,
            snapshot_every=snapshot_every,
            skipped=bool(host.skipped),
            non_finite=not (math.isfinite(host.loss) and math.isfinite(host.grad_norm)),
        )

    def _flops_of(self, sequence: int) -> StepFlops:
        if sequence not in self._flops:
            job = self._job
            self._flops[sequence] = flops_per_token(
                job.model,
                sequence,
                job.log.mfu,
                job.memory.recompute,
                frozen=job.adapter.kind != "none",
                reference=job.preference.kind != "none",
            )
        return self._flops[sequence]

    def _sample_seconds(self, seconds: float) -> float:
        """Mean of recent steps, without the first: it compiles and warms up."""
        recent = self._recent_seconds
        if self._warming_up and recent:
            self._warming_up = False
            recent.clear()
        recent.append(seconds)
        return sum(recent) / len(recent)

    def _split_pipeline(self, parts: StepParts) -> tuple[StepParts, tuple[str, ...]]:
        """The parts, and the names of those that are attributed rather than measured."""
        if self._job.parallel.pipeline == 1:
            return parts, ()
        # A schedule interleaves the two, so only their sum is measured. Backward costs twice
        # the forward, and full recompute repeats the forward in it.
        both = parts.forward + parts.backward
        forward = both / (4 if self._job.memory.recompute == "full" else 3)
        split = msgspec.structs.replace(parts, forward=forward, backward=both - forward)
        return split, ("forward", "backward")

    def _share_of_peak(self, flops_per_second: float) -> float | None:
        peak = self._peak.flops_per_second
        return flops_per_second / peak if peak else None


class _Pending(NamedTuple):
    """A finished step whose values are still on the device."""

    step: int
    tokens_seen: int
    outcome: StepOutcome
    snapshot_every: int


class HostValues(NamedTuple):
    """What a step leaves on the device, read back."""

    loss: float
    grad_norm: float
    skipped: float


def _to_host(outcomes: list[StepOutcome]) -> list[HostValues]:
    # One stack, one transfer, whatever the number of steps.
    scalars = [
        value.detach().to(torch.float32).reshape(())
        for outcome in outcomes
        for value in (outcome.loss, outcome.grad_norm, outcome.skipped)
    ]
    flat = torch.stack(scalars).tolist()
    return [HostValues(*flat[first : first + 3]) for first in range(0, len(flat), 3)]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def device_peak(job: Job, device: torch.device, world_size: int) -> Peak:
    """Peak FLOP/s of the run's devices in the precision its matmuls use."""
    if device.type == "cpu":
        return Peak(None, "n/a on cpu")
    name = torch.cuda.get_device_name(device)
    precision = _matmul_precision(job)
    gpu = lookup(name)
    peak = gpu.peak_flops.get(precision) if gpu is not None else None
    if peak is None:
        return Peak(None, f"unknown peak: {name} in {precision}")
    basis = f"{job.log.mfu} attention, {precision} peak {peak / 1e12:.1f} TFLOP/s"
    return Peak(peak * world_size, basis)


def _matmul_precision(job: Job) -> str:
    if job.precision.fp8:
        return "fp8"
    if job.precision.compute == "float32" and torch.get_float32_matmul_precision() != "highest":
        return "tf32"
    return job.precision.compute


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held at once: on the device since the last call, or by the process on CPU."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak
