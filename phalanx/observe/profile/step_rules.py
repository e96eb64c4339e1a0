"""Rules about data, host, products, memory and power."""

from __future__ import annotations

from msgspec import structs

from phalanx.config import Job
from phalanx.observe.profile.advice import (
    LEAST_GAIN,
    Advice,
    SlowCause,
    explain,
    milliseconds,
    size,
)
from phalanx.observe.profile.costs import COMPUTE, Kind
from phalanx.observe.profile.profile import JobProfile
from phalanx.observe.profile.syncs import LOOP_WAIT
from phalanx.plan.grid import grid_of
from phalanx.plan.memory.peak import memory
from phalanx.plan.question.emit import mapping_of, workload_of
from phalanx.plan.workload import Software

LOADER_SHARE = 0.10  # of a step that synthetic data saves
ROOM = 0.9  # of the device's memory that a step may use
WASTED_SHARE, WASTED_BYTES = 0.2, 256 << 20  # of what the allocator holds
GOOD_PRODUCTS = 0.8  # of the measured peak, that large products reach within a step
IDLE_SHARE = 0.15  # of a step without work on the device, from which on its pieces are too small
FULL_POWER = 0.97  # of the default limit


def slow_loader(profile: JobProfile, job: Job) -> Advice | None:
    """The same steps without a corpus are faster."""
    plain, times = profile.synthetic, profile.times
    if plain is None or not times.median_seconds:
        return None
    saved = times.median_seconds - plain.median_seconds
    share = saved / times.median_seconds
    if share < LOADER_SHARE or saved < max(times.spread_seconds, plain.spread_seconds) / 2:
        return None
    deeper = max(4, 2 * job.data.prefetch)
    return Advice(
        cause=SlowCause.SLOW_LOADER,
        title=f"the loader: a step with synthetic data is {share:.0%} shorter",
        gain=share,
        evidence=[
            f"{milliseconds(times.median_seconds)} a step with the corpus, "
            f"{milliseconds(plain.median_seconds)} with synthetic data",
            f"the median step waited {milliseconds(times.data_seconds)} for data",
            "where storage is slower than the steps, stage the shards on a local disk: "
            "`phalanx data stage --help`",
        ],
        setting="data.prefetch",
        value=str(deeper),
        command="phalanx doctor node --group storage",
    )


def host_sync(profile: JobProfile, job: Job) -> Advice | None:
    """The device ran dry while the host waited for it."""
    share = profile.share(Kind.SYNC)
    places = [each for each in profile.syncs if LOOP_WAIT not in each.where]
    if profile.device != "cuda" or share < LEAST_GAIN or not places:
        return None
    own = all("phalanx/train/measure" in each.where for each in places)
    return Advice(
        cause=SlowCause.HOST_SYNC,
        title=f"the host waits for the device inside a step: {share:.0%} of it is idle after that",
        gain=share,
        evidence=[f"{each.calls:.3g} a step at {each.where or '?'}" for each in places[:5]],
        setting="log.every" if own else "",
        value=str(max(10, job.log.every)) if own else "",
        command=explain("log.every"),
    )


def fp32_matmul(profile: JobProfile, job: Job) -> Advice | None:
    """Products in 32 bits on a device that is faster in 16."""
    rates = profile.rates.matmul_flops
    slow, fast = rates.get("float32", 0.0), rates.get("bfloat16", 0.0)
    share = profile.matmul_formats.get("float32", 0.0) / profile.traced_seconds
    if job.precision.compute != "float32" or not slow or fast <= slow:
        return None
    gain = share * (1 - slow / fast)
    if gain < LEAST_GAIN:
        return None
    return Advice(
        cause=SlowCause.FP32_MATMUL,
        title='precision.compute "float32" → "bfloat16": products in fp32 take '
        f"{share:.0%} of a step",
        gain=gain,
        evidence=[
            f"measured here: {slow / 1e12:.3g} TFLOP/s in fp32, {fast / 1e12:.3g} in bf16",
            "master weights and sums stay fp32",
        ],
        setting="precision.compute",
        value="bfloat16",
        command=explain("precision.compute"),
    )


def recompute(profile: JobProfile, job: Job) -> Advice | None:
    """Forward is repeated although memory would hold what it keeps."""
    share = profile.recomputed_seconds / profile.traced_seconds
    if job.memory.recompute == "none" or share < LEAST_GAIN:
        return None
    modes = ("none", "selective") if job.memory.recompute == "full" else ("none",)
    for mode in modes:
        needed = _needed(
            profile, job, structs.replace(job, memory=structs.replace(job.memory, recompute=mode))
        )
        if needed <= ROOM * profile.memory.limit_bytes:
            return Advice(
                cause=SlowCause.RECOMPUTE,
                title=f'memory.recompute "{job.memory.recompute}" → "{mode}": '
                f"{share:.0%} of a step repeats forward",
                gain=share if mode == "none" else share / 2,
                evidence=[
                    f"{milliseconds(profile.recomputed_seconds)} of backward repeat forward",
                    f"about {size(needed)} needed of {size(profile.memory.limit_bytes)}; "
                    f"now {size(profile.memory.peak_bytes)}",
                ],
                setting="memory.recompute",
                value=mode,
                command=explain("memory.recompute"),
            )
    return None


def small_micro_batch(profile: JobProfile, job: Job) -> Advice | None:
    """Work comes in pieces that neither the host nor the matrix units are efficient at."""
    pieces = job.train.global_batch // (job.parallel.data * job.train.micro_batch)
    rates = profile.rates
    if pieces < 2 or not rates.memory_bytes_per_second:
        return None
    products = [k for k in profile.kernels if k.kind == Kind.MATMUL and k.flops]
    seconds, flops = sum(k.seconds for k in products), sum(k.flops for k in products)
    peak = rates.matmul_flops.get(products[0].number_format, 0.0) if products else 0.0
    reached = flops / seconds / peak if seconds and peak else GOOD_PRODUCTS
    tokens = job.train.micro_batch * job.data.sequence // job.parallel.context
    idle = profile.share(Kind.HOST)
    few = tokens < 4 * peak / rates.memory_bytes_per_second
    if not few and idle < IDLE_SHARE:
        return None
    larger = _largest_that_fits(profile, job, pieces)
    times = larger // job.train.micro_batch
    lost = idle + profile.share(Kind.MATMUL) * max(0.0, 1 - reached / GOOD_PRODUCTS) * few
    gain = lost * (1 - 1 / times)
    if gain < LEAST_GAIN:
        return None
    return Advice(
        cause=SlowCause.SMALL_MICRO_BATCH,
        title=f"train.micro_batch {job.train.micro_batch} → {larger}: {pieces} micro-batches of "
        f"{tokens} tokens a rank",
        gain=gain,
        evidence=[
            f"the device waits {idle:.0%} of a step for the host to launch",
            f"products reach {reached:.0%} of what was measured with large ones",
            f"memory: {size(profile.memory.peak_bytes)} of {size(profile.memory.limit_bytes)}",
        ],
        setting="train.micro_batch",
        value=str(larger),
        command=explain("train.micro_batch"),
    )


def power_cap(profile: JobProfile, job: Job) -> Advice | None:
    """Somebody set the card's power limit below its default."""
    power = profile.power
    if power is None or power.limit_watts >= FULL_POWER * power.default_limit_watts:
        return None
    slower = max(0.0, 1 - power.clock_mhz / power.highest_clock_mhz)
    return Advice(
        cause=SlowCause.POWER_CAP,
        title=f"the power limit is {power.limit_watts:.0f} W of {power.default_limit_watts:.0f} W",
        gain=slower * sum(profile.share(kind) for kind in COMPUTE),
        evidence=[
            f"under load: {power.draw_watts:.0f} W, {power.clock_mhz:.0f} MHz of "
            f"{power.highest_clock_mhz:.0f} MHz",
        ],
        command="phalanx doctor node --only gpu.power",
    )


def fragmentation(profile: JobProfile, job: Job) -> Advice | None:
    """The allocator holds memory that no tensor can use."""
    memory = profile.memory
    wasted = memory.reserved_bytes - memory.peak_bytes
    if profile.device != "cuda":
        return None
    much = wasted > WASTED_SHARE * memory.reserved_bytes and wasted > WASTED_BYTES
    if not much and not memory.retries:
        return None
    evidence = [
        f"{size(memory.reserved_bytes)} held, at most {size(memory.peak_bytes)} in use at once",
        f"{memory.retries} allocations had to give memory back to the driver first",
    ]
    if memory.allocator:
        evidence.append(f"PYTORCH_ALLOC_CONF={memory.allocator}: without it segments can grow")
    return Advice(
        cause=SlowCause.FRAGMENTATION,
        title=f"{size(max(0, wasted))} of the device's memory are held in pieces and not used",
        gain=0.0,
        evidence=evidence,
        command="unset PYTORCH_ALLOC_CONF",
    )


def recompiles(profile: JobProfile, job: Job) -> Advice | None:
    """Blocks are compiled again after the first steps."""
    if not profile.recompiles:
        return None
    return Advice(
        cause=SlowCause.RECOMPILES,
        title=f"{profile.recompiles} graphs were compiled after the first steps",
        gain=LEAST_GAIN,
        evidence=[f"{profile.graphs} graphs in all; TORCH_LOGS=recompiles says why"],
        setting="train.compile",
        value="off",
        command=explain("train.compile"),
    )


def _needed(profile: JobProfile, job: Job, other: Job) -> int:
    """Bytes at the peak with other settings: as measured, and what the planner says they add."""
    grid = grid_of([mapping_of(job), mapping_of(other)])
    kept = memory(workload_of(job), grid, Software()).activations
    return round(profile.memory.peak_bytes + float(kept[1] - kept[0]))


def _largest_that_fits(profile: JobProfile, job: Job, most_times: int) -> int:
    """The largest micro-batch that memory holds, doubled as often as there are micro-batches."""
    best = rows = job.train.micro_batch
    while rows * 2 <= job.train.micro_batch * most_times:
        rows *= 2
        other = structs.replace(job, train=structs.replace(job.train, micro_batch=rows))
        if _needed(profile, job, other) > ROOM * profile.memory.limit_bytes:
            break
        best = rows
    return best
