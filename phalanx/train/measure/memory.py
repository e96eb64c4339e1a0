"""Where a device's memory went when it ran out, and which key to change first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from phalanx.config import Job
from phalanx.parallel import Weight
from phalanx.train.exits import DeviceMemoryError

if TYPE_CHECKING:
    from phalanx.train.trainer import Trainer

GIB = 1 << 30
OPTIMIZER = "optimizer, masters"


def device_memory_error(
    error: torch.OutOfMemoryError, job: Job, trainer: Trainer | None, device: torch.device
) -> DeviceMemoryError:
    """The allocator's complaint with this rank's memory by purpose, and advice that fits it."""
    breakdown = memory_breakdown(trainer, device)
    shares = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in breakdown.items())
    complaint = ". ".join(str(error).split(". ")[:2])
    told = DeviceMemoryError(f"{complaint}. Memory: {shares}", breakdown, advice(job, breakdown))
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    return told


def memory_breakdown(trainer: Trainer | None, device: torch.device) -> dict[str, int]:
    """Bytes on the device by purpose; before the model stands only the allocator's view."""
    parts = state_bytes(trainer, device) if trainer is not None else {}
    stats = torch.cuda.memory_stats(device)
    allocated = stats["allocated_bytes.all.current"]
    parts["activations and buffers"] = max(allocated - sum(parts.values()), 0)
    parts["reserved, unused"] = stats["reserved_bytes.all.current"] - allocated
    parts["device"] = torch.cuda.get_device_properties(device).total_memory
    return parts


def state_bytes(trainer: Trainer, device: torch.device) -> dict[str, int]:
    """Bytes on the device of what lives through a step, by purpose."""
    weights = trainer.engine.weights
    masters = (w.master for w in weights if w.master.data_ptr() != w.local.data_ptr())
    state = (*masters, *trainer.optimizer.tensors().values())
    return {
        "parameters": _bytes((weight.local for weight in weights), device),
        "gradients": _bytes(_gradients(weights), device),
        OPTIMIZER: _bytes(state, device),
    }


def _gradients(weights: list[Weight]) -> Iterator[torch.Tensor]:
    # Not Weight.gradient: it makes zeros where there is none, and there is no memory to make any.
    for weight in weights:
        for gradient in (weight.parameter.grad, getattr(weight.parameter, "main_grad", None)):
            if gradient is not None:
                yield gradient


def _bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.untyped_storage().nbytes() for t in local if t.device.type == device.type)


def advice(job: Job, breakdown: dict[str, int]) -> str:
    """The one or two keys that free the most, judged by what filled the device."""
    steps = []
    if breakdown["reserved, unused"] > breakdown["device"] // 10:
        steps.append(
            "leave PYTORCH_ALLOC_CONF alone or set expandable_segments:True, against fragmentation"
        )
    state = sum(breakdown.get(name, 0) for name in ("parameters", "gradients", OPTIMIZER))
    if breakdown["activations and buffers"] >= state:
        steps += _smaller_activations(job)
    else:
        steps += _smaller_state(job)
    return "; ".join(steps[:3]) + "."


def _smaller_activations(job: Job) -> list[str]:
    steps = []
    if job.train.micro_batch > 1:
        steps.append(
            f"lower train.micro_batch from {job.train.micro_batch} to "
            f"{job.train.micro_batch // 2} (the global batch stays)"
        )
    if job.memory.recompute != "full":
        stronger = "selective" if job.memory.recompute == "none" else "full"
        steps.append(f'set memory.recompute = "{stronger}"')
    if not job.memory.offload_activations:
        steps.append("set memory.offload_activations = true")
    steps.append(f"raise parallel.context (now {job.parallel.context}) or lower data.sequence")
    return steps


def _smaller_state(job: Job) -> list[str]:
    steps = []
    if job.parallel.zero < 3:
        steps.append(f"set parallel.zero = 3 (now {job.parallel.zero})")
    if job.parallel.replicate > 1:
        steps.append(f"lower parallel.replicate (now {job.parallel.replicate})")
    if job.memory.offload != "parameters":
        stronger = "optimizer" if job.memory.offload == "none" else "parameters"
        steps.append(f'set memory.offload = "{stronger}"')
    steps.append("use more devices, or raise parallel.tensor or parallel.pipeline")
    return steps
