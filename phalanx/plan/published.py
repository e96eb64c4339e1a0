"""Published training runs: a CSV row becomes a workload, a mapping and measured seconds.

Columns are those of ``data/published_runs.csv``. Sources count FLOPs in different ways, so what
was measured is brought back to seconds of a step: from the iteration time, from tokens/s, or
from TFLOP/s by the source's own formula.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from phalanx.config import LatentAttention, Model, Moe
from phalanx.hardware import Cluster, ClusterFile, gpus_by_key, make_cluster
from phalanx.plan.counts import flops_per_token, parameters
from phalanx.plan.traits import Traits, traits_of
from phalanx.plan.workload import Mapping, Precision, Recompute, Software, Workload

GB = 2.0**30


class Run(Struct, frozen=True, kw_only=True):
    """One published run in the planner's terms."""

    row: int  # line of the file, the header being 1
    source: str
    project: str
    workload: Workload
    mapping: Mapping
    software: Software
    cluster: Cluster
    seconds: float | None  # of a step; None where the run gave no time
    memory_bytes: float | None
    out_of_memory: bool
    complete: bool  # gives TP, PP, micro-batch and global batch itself
    recompute_known: bool

    @property
    def kind(self) -> str:
        """Group of the error table."""
        return "moe" if self.workload.model.moe is not None else "dense"


class Skipped(Struct, frozen=True):
    """A row that cannot be compared, and why."""

    row: int
    reason: str


class _RefusedError(Exception):
    """Why a row is skipped."""


def read_runs(path: Path) -> tuple[list[Run], list[Skipped]]:
    """All comparable runs of a CSV file, and the others with reasons."""
    with path.open(newline="", encoding="utf-8") as lines:
        return parse_runs(csv.DictReader(lines))


def parse_runs(rows: Iterable[dict[str, str]]) -> tuple[list[Run], list[Skipped]]:
    """Runs of parsed rows, and the skipped ones with reasons."""
    runs, skipped = [], []
    for number, row in enumerate(rows, start=2):
        try:
            runs.append(_run(number, {key: (value or "").strip() for key, value in row.items()}))
        except _RefusedError as refused:
            skipped.append(Skipped(number, str(refused)))
    return runs, skipped


def _run(number: int, row: dict[str, str]) -> Run:
    traits = traits_of(row)
    if traits.refuse:
        raise _RefusedError(traits.refuse)
    gpus = _integer(row, "num_gpus")
    cluster = _cluster(row, gpus)
    mapping = _mapping(row, gpus)
    model = _model(row, mapping.pipeline)
    if mapping.pipeline > model.layers:
        raise _RefusedError(f"pp = {mapping.pipeline} exceeds {model.layers} layers")
    # Some count embedding and loss as layers: 128 stages of a model of 126.
    most = model.layers // mapping.pipeline
    mapping = structs.replace(mapping, virtual_stages=min(mapping.virtual_stages, most))
    workload = Workload(
        model=model,
        sequence=_integer(row, "seq"),
        global_batch=_integer(row, "global_batch"),
        routing_skew=traits.routing_skew,
        trains=traits.trains,
    )
    memory_text = row.get("mem_gb", "").upper()
    oom = memory_text == "OOM"
    seconds = _seconds(row, workload, mapping, cluster, traits, gpus)
    memory_bytes = float(memory_text) * GB if memory_text and not oom else None
    if seconds is None and memory_bytes is None and not oom:
        raise _RefusedError("no time, rate or memory was measured")
    return Run(
        row=number,
        source=row.get("source", ""),
        project=traits.project,
        workload=workload,
        mapping=mapping,
        software=traits.software,
        cluster=cluster,
        seconds=seconds,
        memory_bytes=memory_bytes,
        out_of_memory=oom,
        complete=all(row.get(key) for key in ("tp", "pp", "microbatch", "global_batch")),
        recompute_known=bool(row.get("recompute")),
    )


def _integer(row: dict[str, str], key: str, default: int | None = None) -> int:
    text = row.get(key, "")
    if not text:
        if default is None:
            raise _RefusedError(f"{key} is missing")
        return default
    match = re.fullmatch(r"~?(\d+(?:\.\d+)?)([kKmM]?)", text)
    if match is None:
        raise _RefusedError(f"{key} = {text!r} is not a number")
    scale = {"": 1, "k": 1000, "m": 1_000_000}[match[2].lower()]
    value = round(float(match[1]) * scale)
    if value < 1:
        raise _RefusedError(f"{key} = {text!r} must be at least 1")
    return value


def _number(row: dict[str, str], key: str) -> float | None:
    try:
        value = float(row.get(key, "") or "nan")
    except ValueError:
        raise _RefusedError(f"{key} = {row[key]!r} is not a number") from None
    if value <= 0:
        raise _RefusedError(f"{key} = {row[key]!r} must be positive")
    return value if value == value else None


def _mapping(row: dict[str, str], gpus: int) -> Mapping:
    tensor, pipeline = _integer(row, "tp"), _integer(row, "pp")
    context = _integer(row, "cp", 1)
    if gpus % (tensor * pipeline * context):
        raise _RefusedError(
            f"tp * pp * cp = {tensor * pipeline * context} does not divide {gpus} GPUs"
        )
    data = gpus // (tensor * pipeline * context)  # a few sources misprint their own
    if not row.get("microbatch"):
        raise _RefusedError("microbatch is missing")
    stages = row.get("vpp", "").lstrip(">")
    virtual = 2 if row.get("vpp", "").startswith(">") else int(stages or 1)
    if pipeline == 1:
        virtual = 1
    return Mapping(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        expert=_integer(row, "ep", 1),
        zero=_zero(row.get("zero_fsdp", "")),
        micro_batch=_integer(row, "microbatch"),
        recompute=_recompute(row.get("recompute", "")),
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        precision=_precision(row.get("precision", "")),
    )


def _zero(text: str) -> int:
    text = text.lower()
    if "grad_op" in text or "zero-2" in text:
        return 2
    if "fsdp" in text or "full_shard" in text or "zero-3" in text:
        return 3
    return 1 if "distopt" in text or "zero-1" in text else 0


def _recompute(text: str) -> Recompute:
    text = text.lower()
    if text.startswith("full"):
        return "full"
    return "none" if text in ("", "none") else "selective"


def _precision(text: str) -> Precision:
    text = text.lower()
    if "rowwise" in text:  # these kernels accumulate slowly: no faster than 16 bits
        return "bfloat16"
    for name in ("nvfp4", "mxfp8", "fp8"):
        if name in text:
            return name
    if "bf16" in text or not text:
        return "bfloat16"
    return "float16" if "fp16" in text else "float32"


def _model(row: dict[str, str], pipeline: int) -> Model:
    if not row.get("hidden") or not row.get("ffn"):
        raise _RefusedError("the model's shape is not given")
    dim, vocab = _integer(row, "hidden"), _integer(row, "vocab")
    name = row.get("model", "").lower()
    moe_text = re.search(r"moe(\d+)", row["ffn"])
    dense_text = re.match(r"\d+", row["ffn"])
    ffn = int(dense_text[0]) if dense_text else int(moe_text[1]) if moe_text else 0
    heads = _integer(row, "heads", _usual_heads(dim))
    gated = moe_text is not None or ffn != 4 * dim or "llama" in name
    shape: dict[str, Any] = {
        "dim": dim,
        "heads": heads,
        "ffn": ffn,
        "vocab": vocab,
        "mlp": "swiglu" if gated else "gelu",
    }
    if row.get("kv_heads", "").upper() == "MLA":
        latent = LatentAttention()
        wide = latent.content_head_dim + latent.rope_head_dim
        shape |= {"latent": latent, "kv_heads": heads, "head_dim": wide}
    else:
        wide = 128 if name.startswith("qwen3") else 64 if dim % heads else dim // heads
        shape |= {"kv_heads": _integer(row, "kv_heads", heads), "head_dim": wide}
    if moe_text is not None:
        shape["moe"] = _experts(row, int(moe_text[1]), dense_text is not None)
    layers = int(row.get("layers") or _layers_from_size(name, dim, vocab, pipeline))
    if row["vocab"].startswith("~"):
        shape["vocab"] = _vocab_from_size(name, dim, vocab, layers)
    return Model(layers=layers, **shape)


def _experts(row: dict[str, str], ffn: int, dense_first: bool) -> Moe:
    """DeepSeek's shape (a dense width beside the experts') has a shared expert as well."""
    first = (3 if "deepseek" in row["model"].lower() else 1) if dense_first else 0
    return Moe(
        experts=_integer(row, "experts"),
        top_k=_integer(row, "topk"),
        ffn=ffn,
        shared_experts=1 if dense_first else 0,
        shared_ffn=ffn if dense_first else 0,
        first_dense_layers=first,
    )


def _usual_heads(dim: int) -> int:
    """Heads of the width nearest to 128 that divides the model's."""
    counts = [n for n in range(1, dim + 1) if dim % n == 0 and n % 8 == 0] or [1]
    return min(counts, key=lambda n: abs(dim / n - 128))


def _layers_from_size(name: str, dim: int, vocab: int, pipeline: int) -> int:
    """Layers of a GPT of so many billion parameters, in whole stages."""
    match = re.search(r"-(\d+(?:\.\d+)?)b", name)
    if match is None:
        raise _RefusedError("layers is missing")
    layers = (float(match[1]) * 1e9 - vocab * dim) / (12 * dim**2)
    return max(1, round(layers / pipeline)) * pipeline


def _vocab_from_size(name: str, dim: int, stated: int, layers: int) -> int:
    """A vocabulary that is only stated roughly, from what the layers leave of the model's size."""
    match = re.search(r"-(\d+(?:\.\d+)?)b", name)
    left = float(match[1]) * 1e9 - 12 * layers * dim**2 if match else 0.0
    implied = left / dim
    return round(implied / 1024) * 1024 if stated / 2 < implied < 2 * stated else stated


def _cluster(row: dict[str, str], gpus: int) -> Cluster:
    text = row.get("gpu", "")
    key = _gpu_key(text)
    if key is None:
        raise _RefusedError(f"unknown gpu {text!r}")
    described: dict[str, Any] = {"gpu": key, "gpus": gpus}
    everything = f"{text} {row.get('source', '')} {row.get('notes', '')}"
    cards = re.search(r"(\d+)x(\d+)G\b", everything)
    per_node = re.search(r"(\d+) ?Gbps|(\d+) Gb/s per node", everything)
    gigabits = 0.0
    if cards:
        gigabits = float(cards[1]) * float(cards[2])
    elif per_node:
        gigabits = float(per_node[1] or per_node[2])
    if gigabits:
        described |= {"nic": "hdr", "nics_per_gpu": gigabits / 8 / 200}
    if "grand teton" in text.lower():
        described["node"] = "grand-teton"
    if "jean zay" in text.lower():
        described |= {"nic": "opa100", "nics_per_gpu": 0.5, "link": "nvlink3-4"}
    if gpus > 8 and gpus % 8:
        described["gpus_per_node"] = 4 if gpus % 4 == 0 else 1
    return make_cluster(text, ClusterFile(**described))


def _gpu_key(text: str) -> str | None:
    known = gpus_by_key()
    words = text.lower().split("(")[0].strip()
    if "500w" in words:
        return "h100-500w"
    if words.startswith("v100"):
        return "v100-450w" if "dgx-2h" in text.lower() else "v100"
    parts = re.split(r"[-\s]", words)
    for length in range(len(parts), 0, -1):
        candidate = "-".join(parts[:length])
        if candidate in known:
            return candidate
    return None


def _seconds(
    row: dict[str, str],
    workload: Workload,
    mapping: Mapping,
    cluster: Cluster,
    traits: Traits,
    gpus: int,
) -> float | None:
    iteration = _number(row, "iter_time_s")
    if iteration is not None:
        _refuse_contradiction(row, workload, traits, iteration * gpus)
        return iteration
    rate = _number(row, "tokens_per_s_per_gpu")
    if rate is not None:
        return workload.tokens / (rate * gpus)
    tera, percent = _number(row, "tflops_per_gpu"), _number(row, "mfu_pct")
    if tera is None and percent is None:
        return None
    if tera is None:
        peak = cluster.gpu.peak_flops
        wanted = "fp8" if mapping.precision in ("fp8", "mxfp8", "nvfp4") else "bfloat16"
        assert percent is not None
        tera = percent / 100 * peak.get(wanted, next(iter(peak.values()))) / 1e12
        counted = "model"
    else:
        counted = traits.flops
    flops = _counted_flops(workload, counted, traits)
    return flops / (tera * 1e12 * gpus)


def _refuse_contradiction(
    row: dict[str, str], workload: Workload, traits: Traits, gpu_seconds: float
) -> None:
    """A row whose time and TFLOP/s differ by half or more describes two different batches."""
    tera = _number(row, "tflops_per_gpu")
    if tera is None:
        return
    ratio = _counted_flops(workload, traits.flops, traits) / (tera * 1e12 * gpu_seconds)
    if not 0.5 < ratio < 2.0:
        raise _RefusedError(f"its time and its TFLOP/s disagree by a factor of {ratio:.2f}")


def _counted_flops(workload: Workload, counted: str, traits: Traits) -> float:
    recompute: Recompute = "full" if counted == "hardware" else "none"
    per_token = flops_per_token(
        workload.model, workload.sequence, traits.attention_flops, recompute
    )
    assert parameters(workload.model).total > 0
    flops = per_token.hardware_flops if counted == "hardware" else per_token.model_flops
    return float(flops) * workload.tokens
