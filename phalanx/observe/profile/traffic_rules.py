"""Rules about what ranks send each other."""

from __future__ import annotations

from phalanx.config import Job
from phalanx.observe.profile.advice import (
    LEAST_GAIN,
    Advice,
    SlowCause,
    explain,
    milliseconds,
    size,
)
from phalanx.observe.profile.profile import AxisTime, JobProfile

SMALL_MESSAGE = 1 << 20  # bytes: below, a collective costs its latency
USUAL_BUCKET_MB = 25.0


def tiny_buckets(profile: JobProfile, job: Job) -> Advice | None:
    """DDP reduces gradients in pieces whose latency is their cost."""
    if job.parallel.zero != 0 or job.parallel.ddp_bucket_mb >= USUAL_BUCKET_MB:
        return None
    sums = [a for a in profile.axes if "all_reduce" in a.collective or "allreduce" in a.collective]
    calls, moved = sum(a.calls for a in sums), sum(a.bytes for a in sums)
    wanted = max(1.0, moved / (USUAL_BUCKET_MB * 1e6))
    seconds = sum(a.seconds for a in sums)
    if calls < 4 * wanted or not moved or moved / calls > SMALL_MESSAGE:
        return None
    share = seconds / profile.traced_seconds
    if share < LEAST_GAIN:
        return None
    exposed = sum(a.exposed_seconds for a in sums) / profile.traced_seconds
    return Advice(
        cause=SlowCause.TINY_BUCKETS,
        title=f"parallel.ddp_bucket_mb {job.parallel.ddp_bucket_mb:g} → {USUAL_BUCKET_MB:g}: "
        f"{calls:.0f} reductions a step of {size(moved / calls)} each",
        gain=max(exposed, share) * (1 - wanted / calls),
        evidence=[
            f"reductions take {share:.0%} of a step, {exposed:.0%} of it exposed",
            f"{size(moved)} a step fit into {wanted:.0f} buckets of {USUAL_BUCKET_MB:g} MB",
        ],
        setting="parallel.ddp_bucket_mb",
        value=f"{USUAL_BUCKET_MB:g}",
        command=explain("parallel.ddp_bucket_mb"),
    )


def exposed_gathers(profile: JobProfile, job: Job) -> Advice | None:
    """FSDP's gathers come later than the layers that need them."""
    gathers = [a for a in profile.axes if "gather" in a.collective]
    share = _exposed(profile, gathers)
    if job.parallel.zero != 3 or share < LEAST_GAIN:
        return None
    depth = job.parallel.prefetch_layers
    return Advice(
        cause=SlowCause.EXPOSED_GATHERS,
        title=f"FSDP prefetch {depth} → {depth + 1}: exposed gathers {share:.0%}",
        gain=share / 2,
        evidence=[_axis(a) for a in gathers[:3]],
        setting="parallel.prefetch_layers",
        value=str(depth + 1),
        command=explain("parallel.prefetch_layers"),
    )


def exposed_reductions(profile: JobProfile, job: Job) -> Advice | None:
    """Gradients in fp32 keep the fabric busy after backward."""
    sums = [a for a in profile.axes if "reduce" in a.collective]
    share = _exposed(profile, sums)
    halves = job.parallel.reduce_dtype == "float32" and job.precision.compute != "float32"
    if share < LEAST_GAIN or not halves:
        return None
    return Advice(
        cause=SlowCause.EXPOSED_REDUCTIONS,
        title=f'parallel.reduce_dtype "float32" → "compute": exposed reductions {share:.0%}',
        gain=share / 2,
        evidence=[_axis(a) for a in sums[:3]] + ["sums of 16 bits: compare the loss of both"],
        setting="parallel.reduce_dtype",
        value="compute",
        command=explain("parallel.reduce_dtype"),
    )


def tensor_traffic(profile: JobProfile, job: Job) -> Advice | None:
    """Tensor parallelism waits for its gathers."""
    own = [a for a in profile.axes if a.axis == "tensor"]
    share = _exposed(profile, own)
    if job.parallel.async_tensor or profile.device != "cuda" or share < LEAST_GAIN:
        return None
    return Advice(
        cause=SlowCause.TENSOR_TRAFFIC,
        title=f"parallel.async_tensor: {share:.0%} of a step waits for tensor parallelism",
        gain=share / 2,
        evidence=[_axis(a) for a in own[:3]],
        setting="parallel.async_tensor",
        value="true",
        command=explain("parallel.async_tensor"),
    )


def _exposed(profile: JobProfile, rows: list[AxisTime]) -> float:
    return sum(row.exposed_seconds for row in rows) / profile.traced_seconds


def _axis(row: AxisTime) -> str:
    return (
        f"{row.collective} of {row.axis}: {row.calls:.3g} calls of {size(row.bytes_a_call)}, "
        f"{milliseconds(row.seconds)}, {milliseconds(row.exposed_seconds)} exposed"
    )
