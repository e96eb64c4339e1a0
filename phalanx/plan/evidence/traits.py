"""What is known of the software behind a published run, from its source and its columns.

Projects describe their kernels and overlaps in prose, not in columns. These are facts about the
software of a source; nothing here is fitted. A source that is not listed gets the traits of its
time: Hopper and newer mean fused attention and overlap, fp16 with full recompute on Ampere or
Volta means the kernels of 2021.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from phalanx.plan.workload import Software

MEGATRON_2021 = Software(
    attention="unfused",
    fused=True,
    sequence_parallel=False,
    keeps_gathered=False,
    gathers_per_block=12,  # DeepSpeed's ZeRO 3 of that time gathers every parameter by itself
    logarithmic_gathers=False,  # NCCL before 2.23
    overlap_gradients=False,
    overlap_tensor=False,
    overlap_pipeline=False,
    chunked_loss=False,
    balances_head=False,
)
MEGATRON = Software(
    attention="flash3",
    overlap_tensor=True,
    overlap_pipeline=True,
    chunked_loss=False,
    balances_head=True,
    keeps_gathered=False,  # gathered again in backward
    routed_copies=1,  # weights are applied before the second product
)
FSDP = Software(attention="flash2", fused=False, chunked_loss=False, reduce_bytes=2)


class Traits(Struct, frozen=True, kw_only=True):
    """Facts of a source."""

    project: str
    software: Software
    flops: Literal["model", "hardware"] = "model"  # hardware: recompute is counted
    attention_flops: Literal["causal", "palm"] = "palm"
    routing_skew: float = 0.6
    trains: Literal["all", "adapters"] = "all"
    refuse: str = ""


def traits_of(row: dict[str, str]) -> Traits:
    """Traits of a row by its source, or by its hardware and time."""
    source, notes = row.get("source", "").lower(), row.get("notes", "").lower()
    if "linear attention" in notes:
        return Traits(project="", software=MEGATRON, refuse="linear attention is not modelled")
    recompute = row.get("recompute", "").lower()
    return _of_2021(source, recompute) or _of_source(source, notes) or _of_its_time(source, row)


def _of_2021(source: str, recompute: str) -> Traits | None:
    """Sources that ran on the Megatron-LM and DeepSpeed of that time."""
    if "bigscience" in source or "bloom" in source:
        wide = "rebalancing" in source or "2211.05100" in source
        # fp16 gradients; the later sweep accumulates in fp32 beside bf16 ones.
        software = replace(
            MEGATRON_2021, gradient_bytes=6 if wide else 2, reduce_bytes=4 if wide else 2
        )
        return Traits(project="bloom", software=software, flops="hardware")
    if "vtrain" in source:
        return Traits(project="vtrain", software=replace(MEGATRON_2021, reduce_bytes=2))
    if re.search(r"2104\.04473|2201\.11990|2205\.05198|2020\)", source):
        software = replace(MEGATRON_2021, sequence_parallel="+sp" in recompute)
        return Traits(project="megatron", software=software, flops="hardware")
    return None


def _of_source(source: str, notes: str) -> Traits | None:
    """Sources whose software is known by its name."""
    if "llm-foundry" in source:
        return Traits(project="llm-foundry", software=replace(FSDP, attention="flash"))
    if "torchtitan" in source:
        software = replace(
            FSDP,
            fused="eager" not in notes,
            overlap_tensor="async" in notes,
            reduce_bytes=4,
            selective_share=0.5,  # every second matmul
        )
        return Traits(project="torchtitan", software=software)
    if "megatron-bridge" in source or "nemo" in source or "megatron-moe" in source:
        return _of_nemo(source, notes)
    if "dualpipe" in notes:  # its two directions hide each other's exchange
        software = replace(MEGATRON, overlap_expert=True)
        return Traits(project=source.split("/")[0][:40], software=software)
    if "megatron" in source:
        return Traits(project="megatron", software=MEGATRON)
    if "nanotron" in source:  # eager, blocking sends, gathers hidden only in its async mode
        software = replace(
            FSDP, overlap_tensor="async" in notes, overlap_pipeline=False, reduce_bytes=4
        )
        return Traits(project="nanotron", software=software)
    return None


def _of_nemo(source: str, notes: str) -> Traits:
    causal = "megatron-bridge" in source or "modelzoo" in source
    balanced = "real routing" not in notes  # their benchmarks force balance
    software = replace(MEGATRON, overlap_expert="overlap" in notes)
    return Traits(
        project="nemo",
        software=software,
        attention_flops="causal" if causal else "palm",
        routing_skew=0.0 if balanced else 0.6,
        trains="adapters" if "lora" in source else "all",
    )


def _of_its_time(source: str, row: dict[str, str]) -> Traits:
    """A source that is not listed, by its GPU, precision and recompute."""
    recompute, precision = row.get("recompute", "").lower(), row.get("precision", "").lower()
    old = re.match(r"(v100|a100|a800)", row.get("gpu", "").lower()) is not None
    sharded = "fsdp" in row.get("zero_fsdp", "").lower()
    if old and recompute.startswith("full") and "fp16" in precision:
        # FSDP has gathered whole blocks ahead of their use from the beginning.
        ahead = {"gathers_per_block": 1, "overlap_gradients": True, "reduce_bytes": 2}
        software = replace(MEGATRON_2021, **ahead) if sharded else MEGATRON_2021
        return Traits(project=source, software=software)
    kernel = "flash2" if old else "flash3"
    software = replace(FSDP if sharded else MEGATRON, attention=kernel)
    return Traits(project=source.split("/")[0][:40] or "unknown", software=software)
