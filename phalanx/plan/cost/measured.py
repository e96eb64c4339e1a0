"""Efficiency constants from what one device was timed at: operations, steps of a small model."""

from __future__ import annotations

from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.hardware import ClusterFile, Gpu, lookup, make_cluster
from phalanx.plan.cost.constants import Constants
from phalanx.plan.cost.predict import predict
from phalanx.plan.machine import family_of, power_of
from phalanx.plan.workload import Mapping, Software, Workload

# The planner's name for the fused kernels of each family that torch chooses today.
KERNELS = {"volta": "flash", "ampere": "flash2"}
USUAL_HEAD = 128  # whose share stands for heads that were not measured


class MeasuredAttention(Struct, frozen=True, kw_only=True):
    """Causal attention with heads of one width, FLOP/s."""

    forward: float
    backward: float


class TimedStep(Struct, frozen=True, kw_only=True):
    """A step of training on one device."""

    workload: Workload
    mapping: Mapping
    seconds: float


class Measured(Struct, frozen=True, kw_only=True):
    """What one device does: rates of large operations, and the gap between small ones."""

    device: str  # as torch names it
    matmul_flops: dict[str, float]  # FLOP/s by precision
    matmul_depth: int  # K of the product that was timed
    attention: dict[int, MeasuredAttention]  # by head width
    attention_sequence: int  # of those
    attention_depth: float  # tokens of the sequence that diagonal and ends of rows cost
    boost: float  # how much faster products run in a step with hardly any
    memory_bytes_per_second: float
    kernel_seconds: float
    steps: tuple[TimedStep, ...] = ()  # two that differ in their micro-batches


def constants_from(measured: Measured, base: Constants) -> Constants:
    """The base constants with what was measured put in, as shares of the device's peaks."""
    gpu = lookup(measured.device)
    if gpu is None:
        fix = "add it to phalanx/hardware/gpus.toml"
        raise ConfigError("device", measured.device, "is not in the catalogue", fix)
    family = family_of(gpu)
    # The step model lowers shares for boards with little power: what was measured has that in it.
    undone = power_of(gpu) ** -base.power
    deeper = 1 + base.matmul_depth / measured.matmul_depth
    shares = {
        # Every 16-bit format goes by one name: the units run them alike.
        f"{family}:{'bfloat16' if kind == 'float16' else kind}": _share(
            flops * deeper * undone, _peak(gpu, kind)
        )
        for kind, flops in measured.matmul_flops.items()
    }
    kernel = f"{family}:{KERNELS.get(family, 'flash3')}"
    longer = 1 + measured.attention_depth / measured.attention_sequence
    attention = {
        head: _share(rates.forward * longer * undone, _peak(gpu, "bfloat16"))
        for head, rates in measured.attention.items()
    }
    backward = {head: rates.backward / rates.forward for head, rates in measured.attention.items()}
    constants = structs.replace(
        base,
        matmul=base.matmul | shares,
        attention=base.attention
        | {kernel: attention[USUAL_HEAD]}
        | {f"{kernel}:{head}": share for head, share in attention.items()},
        attention_backward=backward[USUAL_HEAD],
        attention_backward_of={f"{kernel}:{head}": ratio for head, ratio in backward.items()},
        attention_depth=measured.attention_depth,
        boost=measured.boost,
        memory=_share(measured.memory_bytes_per_second, gpu.memory_bandwidth),
        kernel_seconds=measured.kernel_seconds,
        runs=base.runs | {f"{Software().name}:dense": len(measured.steps)},
    )
    return _with_steps(constants, measured.steps, gpu) if measured.steps else constants


def _with_steps(constants: Constants, steps: tuple[TimedStep, ...], gpu: Gpu) -> Constants:
    """What no term counts, and the host's own time, from two steps of one small model."""
    on = make_cluster(gpu.key, ClusterFile(gpu=gpu.key, gpus=1, gpus_per_node=1, domain_gpus=1))
    bare = structs.replace(constants, unmodelled=0.0, step_seconds=0.0)
    short, long = sorted(steps, key=lambda step: step.seconds)
    least, most = (
        predict(step.workload, step.mapping, on, constants=bare).step_seconds
        for step in (short, long)
    )
    if most <= least:
        rule, fix = "the longer step is predicted no longer", "measure two numbers of micro-batches"
        raise ConfigError("steps", [short.seconds, long.seconds], rule, fix)
    scale = max(1.0, (long.seconds - short.seconds) / (most - least))
    host = max(0.0, short.seconds / scale - least)
    return structs.replace(constants, unmodelled=scale - 1, step_seconds=host)


def _peak(gpu: Gpu, kind: str) -> float:
    return gpu.peak_flops.get(kind) or gpu.peak_flops["float16"]


def _share(reached: float, peak: float) -> float:
    return min(1.0, reached / peak)
