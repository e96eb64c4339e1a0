"""Published training runs: a CSV row becomes a workload, a mapping and measured seconds.

Columns are those of ``data/published_runs.csv``. Sources count FLOPs in different ways, so what
was measured is brought back to seconds of a step: from the iteration time, from tokens/s, or
from TFLOP/s by the source's own formula.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from phalanx.config import ConfigError, LatentAttention, Model, Moe
from phalanx.hardware import Cluster, ClusterFile, gpus_by_key, make_cluster
from phalanx.plan.evidence.columns import tidy
from phalanx.plan.evidence.fields import (
    MOST,
    SkippedRowError,
    integer,
    number,
    precision,
    recompute,
    zero,
)
from phalanx.plan.evidence.traits import Traits, traits_of
from phalanx.plan.memory.model_counts import flops_per_token, parameters
from phalanx.plan.workload import Mapping, Recompute, Software, Workload

GB = 2.0**30
LONG_SEQUENCE = 16384  # tokens; nobody puts two such samples into one micro-batch by choice
USUAL_VOCAB = 51200


class PublishedRun(Struct, frozen=True, kw_only=True):
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


def read_runs(path: Path, *, assume: bool = False) -> tuple[list[PublishedRun], list[Skipped]]:
    """All comparable runs of a CSV file, and the others with reasons.

    ``assume``: also runs that do not give their micro-batch, where it can only have been one.
    """
    with path.open(newline="", encoding="utf-8-sig") as lines:
        heading = lines.readline()
        lines.seek(0)
        separator = max(",\t;", key=heading.count)
        reader = csv.DictReader(lines, delimiter=separator)
        twice = [name for name, n in Counter(reader.fieldnames or ()).items() if n > 1 and name]
        if twice:
            rule = f'has the column "{twice[0]}" more than once'
            raise ConfigError("file", str(path), rule, "keep one of them")
        return parse_runs(reader, assume=assume)


def parse_runs(
    rows: Iterable[dict[str, str]], *, assume: bool = False
) -> tuple[list[PublishedRun], list[Skipped]]:
    """Runs of parsed rows, and the skipped ones with reasons."""
    runs, skipped = [], []
    for line, row in enumerate(tidy(rows), start=2):
        try:
            runs.append(_run(line, row, assume))
        except (SkippedRowError, ConfigError) as refused:
            skipped.append(Skipped(line, str(refused)))
    return runs, skipped


def _run(line: int, row: dict[str, str], assume: bool) -> PublishedRun:
    traits = traits_of(row)
    if assume and not row.get("microbatch") and integer(row, "seq", 1) >= LONG_SEQUENCE:
        row = row | {"microbatch": "1"}
        complete = False
    else:
        complete = all(row.get(key) for key in ("tp", "pp", "microbatch", "global_batch"))
    if traits.refuse:
        raise SkippedRowError(traits.refuse)
    gpus = integer(row, "num_gpus")
    cluster = _cluster(row, gpus)
    mapping = _mapping(row, gpus)
    model = _model(row, mapping.pipeline)
    if mapping.pipeline > model.layers:
        raise SkippedRowError(f"pp = {mapping.pipeline} exceeds {model.layers} layers")
    # Some count embedding and loss as layers: 128 stages of a model of 126.
    most = model.layers // mapping.pipeline
    mapping = structs.replace(mapping, virtual_stages=min(mapping.virtual_stages, most))
    workload = Workload(
        model=model,
        sequence=integer(row, "seq"),
        global_batch=_global_batch(row, mapping),
        routing_skew=traits.routing_skew,
        trains=traits.trains,
    )
    memory_text = row.get("mem_gb", "").upper()
    oom = "OOM" in memory_text or "OUT OF MEMORY" in memory_text
    seconds = _seconds(row, workload, mapping, cluster, traits, gpus)
    memory = None if oom else number(row, "mem_gb")
    memory_bytes = memory * GB if memory is not None else None
    if seconds is None and memory_bytes is None and not oom:
        raise SkippedRowError("no time, rate or memory was measured")
    return PublishedRun(
        row=line,
        source=row.get("source", ""),
        project=traits.project,
        workload=workload,
        mapping=mapping,
        software=traits.software,
        cluster=cluster,
        seconds=seconds,
        memory_bytes=memory_bytes,
        out_of_memory=oom,
        complete=complete,
        recompute_known=bool(row.get("recompute")),
    )


def _global_batch(row: dict[str, str], mapping: Mapping) -> int:
    """Samples in a step; a batch in tokens (4M) is brought to samples.

    Where the stated batch does not come out even over the replicas (sources round, and quote
    GPUs that did not all take part), the nearest that does was run.
    """
    samples: float = integer(row, "global_batch")
    if re.search(r"[mM]|tok", row["global_batch"]):
        samples = samples / integer(row, "seq")
    unit = mapping.data * mapping.micro_batch
    return max(1, round(samples / unit)) * unit


def _mapping(row: dict[str, str], gpus: int) -> Mapping:
    tensor, pipeline = integer(row, "tp"), integer(row, "pp")
    context = integer(row, "cp", 1)
    if gpus % (tensor * pipeline * context):
        raise SkippedRowError(
            f"tp * pp * cp = {tensor * pipeline * context} does not divide {gpus} GPUs"
        )
    data = gpus // (tensor * pipeline * context)  # a few sources misprint their own
    if not row.get("microbatch"):
        raise SkippedRowError("microbatch is missing")
    stages = row.get("vpp", "").lower()
    virtual = 2 if stages.startswith(">") else 1
    if not stages.startswith(">") and stages not in ("none", "no"):
        virtual = integer(row, "vpp", 1)
    if pipeline == 1:
        virtual = 1
    dual = "dualpipe" in row.get("notes", "").lower() and pipeline > 1 and virtual == 1
    return Mapping(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        expert=integer(row, "ep", 1),
        zero=zero(row.get("zero_fsdp", "")),
        micro_batch=integer(row, "microbatch"),
        recompute=recompute(row.get("recompute", "")),
        schedule="dualpipe" if dual else "interleaved" if virtual > 1 else "1f1b",
        virtual_stages=2 if dual else virtual,
        precision=precision(row.get("precision", "")),
    )


def _model(row: dict[str, str], pipeline: int) -> Model:
    if not row.get("hidden") or not row.get("ffn"):
        raise SkippedRowError("the model's shape is not given")
    dim, vocab = integer(row, "hidden"), integer(row, "vocab", USUAL_VOCAB)
    name = row.get("model", "").lower()
    written = row["ffn"].replace(",", "").lower()
    if integer(row, "experts", 1) > 1 and "moe" not in written:
        written = f"moe{written}"  # one width beside experts is theirs
    moe_text = re.search(r"moe(\d+)", written)
    dense_text = re.match(r"(\d+)(?:\.0*)?(?![\w.])", written)
    if not moe_text and not dense_text:
        raise SkippedRowError(f"ffn = {row['ffn']!r} is not a number")
    widths = [int(found[1]) for found in (dense_text, moe_text) if found]
    if not all(1 <= width <= MOST["ffn"] for width in widths):
        raise SkippedRowError(f"ffn = {row['ffn']!r} must be 1 to {MOST['ffn']:,}")
    ffn = widths[0]
    heads = integer(row, "heads", _usual_heads(dim))
    gated = moe_text is not None or ffn != 4 * dim or "llama" in name
    shape: dict[str, Any] = {
        "dim": dim,
        "heads": heads,
        "ffn": ffn,
        "vocab": vocab,
        "mlp": "swiglu" if gated else "gelu",
    }
    if row.get("kv_heads", "").upper() == "MLA":
        latent = LatentAttention()  # DeepSeek-V3's ranks and widths
        wide = latent.content_head_dim + latent.rope_head_dim
        shape |= {"latent": latent, "kv_heads": heads, "head_dim": wide}
    else:
        shape |= {"kv_heads": integer(row, "kv_heads", heads)}
        shape |= {"head_dim": 128 if name.startswith("qwen3") else _usual_width(dim, heads)}
    if moe_text is not None:
        shape["moe"] = _experts(row, int(moe_text[1]), dense_text is not None)
    layers = integer(row, "layers", 0) or _layers_from_size(name, dim, vocab, pipeline)
    if row.get("vocab", "").startswith("~"):
        shape["vocab"] = _vocab_from_size(name, dim, vocab, layers)
    return Model(layers=layers, **shape)


def _experts(row: dict[str, str], ffn: int, dense_first: bool) -> Moe:
    """DeepSeek's shape (a dense width beside the experts') has a shared expert as well."""
    first = (3 if "deepseek" in row.get("model", "").lower() else 1) if dense_first else 0
    return Moe(
        experts=integer(row, "experts"),
        top_k=min(integer(row, "topk"), integer(row, "experts")),
        ffn=ffn,
        shared_experts=1 if dense_first else 0,
        shared_ffn=ffn if dense_first else 0,
        first_dense_layers=first,
    )


def _usual_width(dim: int, heads: int) -> int:
    """Width of a head: the model's share, unless that cannot be rotated in pairs."""
    share, rest = divmod(dim, heads)
    return 64 if rest or share % 2 else share


def _usual_heads(dim: int) -> int:
    """Heads of the width nearest to 128 that divides the model's."""
    counts = [n for n in range(1, dim + 1) if dim % n == 0 and n % 8 == 0] or [1]
    return min(counts, key=lambda n: abs(dim / n - 128))


def _layers_from_size(name: str, dim: int, vocab: int, pipeline: int) -> int:
    """Layers of a GPT of so many billion parameters, in whole stages."""
    match = re.search(r"-(\d+(?:\.\d+)?)b", name)
    if match is None:
        raise SkippedRowError("layers is missing")
    layers = (float(match[1]) * 1e9 - vocab * dim) / (12 * dim**2)
    if not 0 < layers <= MOST["layers"]:
        raise SkippedRowError(f"layers is missing, and {name!r} of width {dim} does not say it")
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
        raise SkippedRowError(f"unknown gpu {text!r}" if text else "gpu is missing")
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


GPU_NAMES = "gb300|gb200|b300|b200|h800|h200|h100|a800|a100|v100|mi355x|mi300x|mi250x|tpu[- ]?v4"


def _gpu_key(text: str) -> str | None:
    """The catalogue's key of a GPU, by its name and what is said about its board."""
    lowered = text.lower()
    match = re.search(rf"(?<![a-z])({GPU_NAMES})(?![0-9])", lowered)
    if match is None:
        return None
    key = "tpu-v4" if match[1].startswith("tpu") else match[1]
    if "500w" in lowered:
        key += "-500w"
    if "dgx-2h" in lowered:
        key += "-450w"
    if "pcie" in lowered:
        key += "-pcie"
    small = re.search(r"(?<![0-9])(40|16) ?gi?b?\b", lowered.split("(")[0])
    if small:
        key += f"-{small[1]}g"
    return key if key in gpus_by_key() else match[1] if match[1] in gpus_by_key() else None


def _seconds(
    row: dict[str, str],
    workload: Workload,
    mapping: Mapping,
    cluster: Cluster,
    traits: Traits,
    gpus: int,
) -> float | None:
    iteration = number(row, "iter_time_s")
    if iteration is not None:
        _refuse_contradiction(row, workload, traits, iteration * gpus)
        return iteration
    rate = number(row, "tokens_per_s_per_gpu")
    if rate is not None:
        return workload.tokens / (rate * gpus)
    tera, percent = number(row, "tflops_per_gpu"), number(row, "mfu_pct")
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
    tera = number(row, "tflops_per_gpu")
    if tera is None:
        return
    ratio = _counted_flops(workload, traits.flops, traits) / (tera * 1e12 * gpu_seconds)
    if not 0.5 < ratio < 2.0:
        raise SkippedRowError(f"its time and its TFLOP/s disagree by a factor of {ratio:.2f}")


def _counted_flops(workload: Workload, counted: str, traits: Traits) -> float:
    again: Recompute = "full" if counted == "hardware" else "none"
    per_token = flops_per_token(workload.model, workload.sequence, traits.attention_flops, again)
    assert parameters(workload.model).total > 0
    flops = per_token.hardware_flops if counted == "hardware" else per_token.model_flops
    return float(flops) * workload.tokens
