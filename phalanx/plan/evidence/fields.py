"""Numbers and words of one row of a table of runs; what cannot be meant is refused."""

from __future__ import annotations

import re
from typing import Literal, get_args

from phalanx.plan.workload import OFFLOADS, Precision, Recompute

LARGEST = 10**9
MemoryKind = Literal["allocated", "reserved", "device"]
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
MOST = {"layers": 4096, "hidden": 2**18, "heads": 8192, "kv_heads": 8192, "experts": 2**16}
MOST |= {"ffn": 2**22, "seq": 2**24, "num_gpus": 10**7, "vpp": 4096, "microbatch": 2**16}
MOST |= {"topk": 1024}


class SkippedRowError(Exception):
    """Why a row is skipped."""


def integer(row: dict[str, str], key: str, default: int | None = None) -> int:
    """A whole number, also as "8k", "1,024" or "~128"; SkippedRowError where there is none."""
    text = row.get(key, "")
    if not text:
        if default is None:
            raise SkippedRowError(f"{key} is missing")
        return default
    match = re.fullmatch(r"[~≈]?(\d[\d,_]*(?:\.\d+)?)\s*([kKmM]?)", text)
    if match is None:
        raise SkippedRowError(f"{key} = {text!r} is not a number")
    thousand = 1024 if key == "seq" else 1000
    scale = {"": 1, "k": thousand, "m": thousand**2}[match[2].lower()]
    value = round(float(re.sub("[,_]", "", match[1])) * scale)
    most = MOST.get(key, LARGEST)
    if not 1 <= value <= most:
        raise SkippedRowError(f"{key} = {text!r} must be 1 to {most:,}")
    return value


def number(row: dict[str, str], key: str) -> float | None:
    """A positive number, with or without its unit; None where the cell is blank."""
    text = row.get(key, "")
    if not text:
        return None
    match = re.fullmatch(r"[~≈]?(-?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(%|s|[GT]i?B)?", text)
    if match is None:
        raise SkippedRowError(f"{key} = {text!r} is not a number")
    value = float(match[1].replace(",", ""))
    if not 0 < value < LARGEST:
        raise SkippedRowError(f"{key} = {text!r} must be above 0 and below {LARGEST:,}")
    return value


def zero(text: str) -> int:
    """The level of ZeRO that a way of sharding amounts to; HSDP is ZeRO 3 with replicas."""
    text = text.lower()
    level = re.search(r"(?:zero|stage)[-_ ]*([0-3])(?!\d)", text) or re.fullmatch(
        r"([0-3])(?:\.0)?", text
    )
    if level:
        return int(level[1])
    if "grad_op" in text:
        return 2
    if "no_shard" in text:
        return 0
    if "fsdp" in text or "hsdp" in text or "shard" in text:
        return 3
    return 1 if "dist" in text else 0


def stated_shards(text: str) -> int:
    """Ranks that hold one full set of shards, where a way of sharding says so; else 0."""
    match = re.search(r"(\d+)-way", text) or re.search(r"[fh]sdp[-_ ]?\d+x(\d+)", text)
    match = match or re.search(r"[fh]sdp[-_ =]*(\d+)", text)
    ranks = int(match[1]) if match else 0
    return ranks if ranks > 2 else 0  # FSDP2 is the second version of FSDP


def recompute(text: str) -> Recompute | None:
    """How much is recomputed, a list of modules being a selection; None where nothing is said."""
    text = text.lower()
    if not text or re.match(r"(not|un)[ -]?(stated|given|published|specified|known)", text):
        return None
    if text.startswith(("full", "uniform", "block", "yes", "true", "all")):
        return "full"
    return "none" if text in ("none", "no", "false", "off", "0") else "selective"


def memory_kind(text: str) -> MemoryKind:
    """What a reading is of; what is gone from the device where nothing is said."""
    for kind in MEMORY_KINDS:
        if kind in text.lower():
            return kind
    if text:
        raise SkippedRowError(f"mem_kind = {text!r} is not one of {', '.join(MEMORY_KINDS)}")
    return "device"


def offload(text: str) -> str:
    """What leaves the device, one of OFFLOADS; "" where a text speaks of nothing that does."""
    text = text.lower()
    if text in OFFLOADS:
        return text
    if not re.search(r"offload|infinity|cpu|host|nvme", text) or "no offload" in text:
        return ""
    where = "-nvme" if "nvme" in text or "infinity" in text else ""
    state = "parameters" if re.search(r"param|weight|infinity", text) else "optimizer"
    activations = re.search(r"activation", text)
    if activations and not re.search(r"optim|param|weight|state", text):
        return "activations" + where
    return state + where + ("+activations" if activations else "")


def precision(text: str) -> Precision:
    """The format of the products; bfloat16 where nothing is said."""
    text = text.lower()
    if "rowwise" in text:  # these kernels accumulate slowly: no faster than 16 bits
        return "bfloat16"
    for name in ("nvfp4", "mxfp8", "fp8"):
        if name in text:
            return name
    if "bf16" in text or "bfloat16" in text or not text:
        return "bfloat16"
    if any(word in text for word in ("16", "half", "mixed", "amp")):
        return "float16"
    if any(word in text for word in ("32", "single")):
        return "float32"
    raise SkippedRowError(f"unknown precision {text!r}")
