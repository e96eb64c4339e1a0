"""Efficiency constants from microbenchmarks of one device."""

from __future__ import annotations

from msgspec import Struct, structs

from phalanx.config import ConfigError
from phalanx.hardware import Gpu, lookup
from phalanx.plan.cost.constants import Constants
from phalanx.plan.machine import family_of, power_of

# The planner's name for the fused kernels of each family that torch chooses today.
KERNELS = {"volta": "flash", "ampere": "flash2"}


class Measured(Struct, frozen=True, kw_only=True):
    """What one device does: rates of large operations, and the gap between small ones."""

    device: str  # as torch names it
    matmul_flops: dict[str, float]  # FLOP/s by precision
    matmul_depth: int  # K of the product that was timed
    attention_flops: float  # forward, causal, heads of 128
    attention_backward_flops: float
    memory_bytes_per_second: float
    kernel_seconds: float


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
    attention = _share(measured.attention_flops * undone, _peak(gpu, "bfloat16"))
    return structs.replace(
        base,
        matmul=base.matmul | shares,
        attention=base.attention | {kernel: attention},
        attention_backward=measured.attention_backward_flops / measured.attention_flops,
        memory=_share(measured.memory_bytes_per_second, gpu.memory_bandwidth),
        kernel_seconds=measured.kernel_seconds,
    )


def _peak(gpu: Gpu, kind: str) -> float:
    return gpu.peak_flops.get(kind) or gpu.peak_flops["float16"]


def _share(reached: float, peak: float) -> float:
    return min(1.0, reached / peak)
