"""The back of the envelope: each usual formula with its numbers, and where they disagree."""

from __future__ import annotations

from msgspec import Struct

from phalanx.config import ConfigError
from phalanx.hardware import Cluster, cluster, pcie_bandwidth
from phalanx.plan.cost.failures import (
    CORRELATED_FROM_GPUS,
    DAY_SECONDS,
    LLAMA3_PER_1000,
    NODE_GPUS,
    RATES,
    mtbf_seconds,
)
from phalanx.plan.question.quantities import duration, short, size

# AdamW with bf16 compute: weights 2, gradients 2, fp32 master 4, two moments 8.
STATE_BYTES_PER_PARAMETER = 16
# A checkpoint keeps the master and the moments; compute weights and gradients follow from them.
CHECKPOINT_BYTES_PER_PARAMETER = 12


class TextbookCase(Struct, frozen=True, kw_only=True):
    """The usual example; every number can be given."""

    parameters: float = 1e12
    tokens: float = 15e12
    mfu: float = 0.4
    precision: str = "bfloat16"
    tensor: int = 8
    pipeline: int = 16
    micro_batches: int = 64
    batch_tokens: int = 4 * 2**20
    sequence: int = 8192
    bucket_bytes: float = 25e6
    node_mtbf_hours: float = 5e4


class FormulaLine(Struct, frozen=True):
    """One formula, with its numbers put in."""

    topic: str
    formula: str
    numbers: str
    result: str
    value: float
    fits: bool = True  # False: the usual numbers contradict each other here
    note: str = ""


def textbook(
    case: TextbookCase | None = None, on: Cluster | None = None
) -> tuple[FormulaLine, ...]:
    """Every line of the table, for a case on a cluster (1T parameters on 100k H100)."""
    case, on = case or TextbookCase(), on or cluster("h100-100k")
    _refuse(case, on)
    return (
        *_state(case, on),
        *_speed(case, on),
        *_pipeline(case, on),
        *_links(on),
        *_buckets(case, on),
        *_failures(case, on),
    )


def _refuse(case: TextbookCase, on: Cluster) -> None:
    replica = case.tensor * case.pipeline
    if not 1 <= replica <= on.gpus:
        rule = f"a replica of tensor x pipeline = {replica:,} GPUs must fit on {on.gpus:,}"
        raise ConfigError("tp, pp", f"{case.tensor}, {case.pipeline}", rule, "try --tp 1 --pp 1")
    if not 0 < case.mfu <= 1:
        raise ConfigError("mfu", case.mfu, "must be above 0 and at most 1", "e.g. 0.4")
    if case.precision not in on.gpu.peak_flops:
        fix = "it has " + ", ".join(on.gpu.peak_flops)
        raise ConfigError("precision", case.precision, f"{on.gpu.name} has no such peak", fix)


def _state(case: TextbookCase, on: Cluster) -> tuple[FormulaLine, ...]:
    state = STATE_BYTES_PER_PARAMETER * case.parameters
    # The envelope divides by the vendor's decimal gigabytes.
    memory = on.gpu.memory_bytes / 2**30 * 1e9
    checkpoint = CHECKPOINT_BYTES_PER_PARAMETER * case.parameters
    write = checkpoint / (on.nodes * 1e9)
    return (
        FormulaLine(
            "training state",
            "(2 weights + 2 gradients + 4 master + 8 moments) x parameters",
            f"{STATE_BYTES_PER_PARAMETER} B x {short(case.parameters)}",
            size(state),
            state,
        ),
        FormulaLine(
            "GPUs to hold it",
            "state / memory of a GPU",
            f"{size(state)} / {memory / 1e9:.0f} GB",
            f">= {-(-state // memory):,.0f} GPUs",
            -(-state // memory),
            note="without a byte of activations; in practice half the memory or less is for state",
        ),
        FormulaLine(
            "checkpoint",
            "(4 master + 8 moments) x parameters; written at 1 GB/s a node",
            f"{CHECKPOINT_BYTES_PER_PARAMETER} B x {short(case.parameters)}; "
            f"/ ({on.nodes:,} x 1 GB/s)",
            f"{size(checkpoint)} in {duration(write)}",
            checkpoint,
        ),
    )


def _tokens_per_second(case: TextbookCase, on: Cluster) -> float:
    return on.gpus * on.gpu.peak_flops[case.precision] * case.mfu / (6 * case.parameters)


def _speed(case: TextbookCase, on: Cluster) -> tuple[FormulaLine, ...]:
    peak = on.gpu.peak_flops[case.precision]
    speed = _tokens_per_second(case, on)
    days = case.tokens / speed / DAY_SECONDS
    return (
        FormulaLine(
            "speed",
            "GPUs x peak x MFU / (6 x parameters)",
            f"{on.gpus:,} x {peak / 1e12:.1f} TFLOP/s x {case.mfu:.0%} "
            f"/ (6 x {short(case.parameters)})",
            f"{short(speed)} tok/s",
            speed,
        ),
        FormulaLine(
            "tokens a day",
            "speed x 86,400 s",
            f"{short(speed)} tok/s x 86,400 s",
            f"{short(speed * DAY_SECONDS)} tokens",
            speed * DAY_SECONDS,
        ),
        FormulaLine(
            "time to train",
            "tokens / speed",
            f"{short(case.tokens)} / {short(speed)} tok/s",
            f"{days:.0f} days",
            days,
            note="of healthy steps only: failures come on top",
        ),
    )


def _pipeline(case: TextbookCase, on: Cluster) -> tuple[FormulaLine, ...]:
    replicas = on.gpus // (case.tensor * case.pipeline)
    sequences = case.batch_tokens // case.sequence
    stages, micro = case.pipeline, case.micro_batches
    bubble = (stages - 1) / (micro + stages - 1)
    needed = replicas * micro * case.sequence
    return (
        FormulaLine(
            "bubble",
            "(p - 1) / (m + p - 1)",
            f"{stages - 1} / ({micro} + {stages - 1})",
            f"{bubble:.1%}",
            bubble,
        ),
        FormulaLine(
            "replicas",
            "GPUs / (tensor x pipeline)",
            f"{on.gpus:,} / ({case.tensor} x {case.pipeline})",
            f"{replicas:,} replicas",
            replicas,
        ),
        FormulaLine(
            "sequences in a batch",
            "batch tokens / sequence",
            f"{_binary(case.batch_tokens)} / {_binary(case.sequence)}",
            f"{sequences:,} sequences",
            sequences,
            fits=sequences >= replicas,
            note=f"too few for {replicas:,} replicas: {replicas - sequences:,} have nothing to do"
            if sequences < replicas
            else f"{sequences / replicas:.1f} for each of {replicas:,} replicas",
        ),
        FormulaLine(
            "batch for that bubble",
            "replicas x m x sequence",
            f"{replicas:,} x {micro} x {_binary(case.sequence)}",
            f"{short(needed)} tokens",
            needed,
            fits=needed <= case.batch_tokens,
            note=f"a batch of {_binary(case.batch_tokens)} tokens cannot give every replica "
            f"{micro} micro-batches"
            if needed > case.batch_tokens
            else "",
        ),
    )


def _links(on: Cluster) -> tuple[FormulaLine, ...]:
    inside, outside = on.domain_bandwidth, on.network_bandwidth
    return (
        FormulaLine(
            "NVLink to network",
            "NVLink both ways / network one way",
            f"{2 * inside / 1e9:.0f} GB/s / {outside / 1e9:.0f} GB/s",
            f"{2 * inside / outside:.0f}x",
            2 * inside / outside,
            fits=False,
            note="vendors add both directions of NVLink and quote one of the network",
        ),
        FormulaLine(
            "the same, one way",
            "NVLink one way / network one way",
            f"{inside / 1e9:.0f} GB/s / {outside / 1e9:.0f} GB/s",
            f"{inside / outside:.0f}x",
            inside / outside,
        ),
        FormulaLine(
            "PCIe 5.0 x16",
            "32 GT/s x 16 lanes / 8 bits x 128/130",
            "32e9 x 16 / 8 x 128/130",
            f"{pcie_bandwidth(5) / 1e9:.1f} GB/s one way",
            pcie_bandwidth(5),
        ),
    )


def _buckets(case: TextbookCase, on: Cluster) -> tuple[FormulaLine, ...]:
    replicas = on.gpus // (case.tensor * case.pipeline)
    factor = 2 * (replicas - 1) / replicas
    gradients = 2 * case.parameters / (case.tensor * case.pipeline)
    buckets = -(-gradients // case.bucket_bytes)
    one = factor * case.bucket_bytes / on.network_bandwidth
    steps = 2 * (replicas - 1)
    latency = steps * on.network_latency_seconds
    backward = 2 / 3 * case.batch_tokens / _tokens_per_second(case, on)
    hidden = min(1.0, backward / (buckets * one))
    return (
        FormulaLine(
            "ring all-reduce moves",
            "2 (n - 1) / n of the bytes, n replicas",
            f"2 x {replicas - 1:,} / {replicas:,}",
            f"{factor:.4f} x",
            factor,
        ),
        FormulaLine(
            "one bucket",
            "2 (n - 1) / n x bucket / network",
            f"{factor:.3f} x {size(case.bucket_bytes)} / {on.network_bandwidth / 1e9:.0f} GB/s",
            duration(one),
            one,
            fits=latency <= one,
            note=f"its {steps:,} hops of {on.network_latency_seconds * 1e6:.1f} us take "
            f"{duration(latency)}: buckets for a ring this long must be larger, or the sum a tree"
            if latency > one
            else "",
        ),
        FormulaLine(
            "buckets of a step",
            "2 B x parameters / (tensor x pipeline) / bucket",
            f"{size(gradients)} / {size(case.bucket_bytes)}",
            f"{buckets:,.0f} buckets, {duration(buckets * one)}",
            buckets,
        ),
        FormulaLine(
            "their overlap",
            "backward (2/3 of a step) / time of all buckets",
            f"{duration(backward)} / {duration(buckets * one)}",
            f"{hidden:.0%} hidden",
            hidden,
            fits=hidden >= 1,
            note="the rest is exposed: a larger batch, or more GPUs a replica, hides it"
            if hidden < 1
            else "",
        ),
    )


def _failures(case: TextbookCase, on: Cluster) -> tuple[FormulaLine, ...]:
    hours = case.node_mtbf_hours / on.nodes
    half_hour_node = 0.5 * on.nodes
    rsc = RATES["rsc-1"].per_1000_node_days
    lines = [
        FormulaLine(
            "time between failures",
            "MTBF of a node / nodes",
            f"{case.node_mtbf_hours:,.0f} h / {on.nodes:,}",
            f"{hours:.3g} h",
            hours,
            fits=hours <= 1,
            note=f"not the half hour that is usually quoted beside it: that needs nodes of "
            f"{half_hour_node:,.0f} h, {24e3 / half_hour_node:.2f} failures per 1000 node-days"
            if hours > 1
            else "",
        ),
        FormulaLine(
            "Llama 3",
            "54 days / 419 interruptions, 16,384 GPUs",
            "1,296 h / 419",
            f"{mtbf_seconds(16384, LLAMA3_PER_1000) / 3600:.1f} h",
            mtbf_seconds(16384, LLAMA3_PER_1000) / 3600,
            note=f"{LLAMA3_PER_1000:.2f} per 1000 node-days",
        ),
    ]
    for gpus in (16384, 131072):
        seconds = mtbf_seconds(gpus, rsc, correlated=False)
        worse = mtbf_seconds(gpus, rsc)
        lines.append(
            FormulaLine(
                f"{rsc} per 1000 node-days",
                "1000 days / (nodes x rate)",
                f"1000 days / ({gpus // NODE_GPUS:,} x {rsc}), {gpus:,} GPUs",
                f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min",
                seconds / 3600,
                note=f"linear; with correlated domains {duration(worse)}"
                if gpus > CORRELATED_FROM_GPUS
                else "",
            )
        )
    return tuple(lines)


def _binary(number: int) -> str:
    """4194304 as 4M and 8192 as 8k, where it is exact."""
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if number % unit == 0:
            return f"{number // unit:,}{letter}"
    return f"{number:,}"
