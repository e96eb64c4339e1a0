"""The columns of a table of runs, however their author spelled, scaled or left them blank."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from phalanx.plan.stacks import TRAITS

# Column -> other spellings, in lower case without separators.
SPELLINGS = {
    "source": ("reference", "paper", "url"),
    "model": ("modelname", "name"),
    "layers": ("numlayers", "nlayers", "nlayer", "l"),
    "hidden": ("hiddensize", "dmodel", "dim", "modeldim", "h"),
    "heads": ("numheads", "nheads", "attentionheads", "numattentionheads", "a"),
    "kv_heads": ("numkvheads", "nkvheads", "numkeyvalueheads", "querygroups", "numquerygroups"),
    "ffn": ("ffnhidden", "ffnhiddensize", "ffnsize", "intermediatesize", "dff", "ffndim"),
    "vocab": ("vocabsize", "vocabulary"),
    "seq": ("seqlen", "seqlength", "sequence", "sequencelength", "contextlength"),
    "experts": ("numexperts", "nexperts"),
    "topk": ("activeexperts", "moetopk", "routertopk"),
    "gpu": ("gputype", "gpumodel", "device", "hardware", "accelerator"),
    "num_gpus": ("gpus", "ngpus", "gpucount", "worldsize", "devices", "numdevices"),
    "tp": ("tensor", "tensorparallel", "tpsize", "tensormodelparallelsize"),
    "pp": ("pipeline", "pipelineparallel", "ppsize", "pipelinemodelparallelsize"),
    "dp": ("data", "dataparallel", "dpsize"),
    "cp": ("context", "contextparallel", "cpsize", "contextparallelsize"),
    "ep": ("expert", "expertparallel", "epsize", "expertmodelparallelsize"),
    "vpp": ("virtualstages", "virtualpipeline", "interleave", "vp", "virtualpp"),
    "zero_fsdp": ("zero", "fsdp", "zerostage", "shard", "sharding", "shardingstrategy"),
    "replicate": ("dpreplicate", "replicas", "replicatedegree", "dataparallelreplicatedegree"),
    "microbatch": ("mbs", "microbatchsize", "mb"),
    "global_batch": ("gbs", "globalbatchsize", "batchsize", "batch"),
    "ga": ("gas", "gradaccum", "gradaccumsteps", "gradientaccumulation", "accumulationsteps"),
    "precision": ("dtype", "format"),
    "recompute": ("activationcheckpointing", "checkpointing", "recomputation", "ac", "actckpt"),
    "offload": ("offloading", "cpuoffload", "zerooffload"),
    "mem_gb": ("memgib", "memorygb", "memorygib", "peakmemgb", "peakmemorygb", "memory"),
    "mem_kind": ("memkind", "memorykind", "memoryis"),
    "tflops_per_gpu": ("tflops", "tflopspergpu", "tflopsgpu", "modeltflops", "tflopssgpu"),
    "mfu_pct": ("mfu", "mfupercent"),
    "tokens_per_s_per_gpu": (
        "tokenspersecpergpu",
        "tokenspersecondpergpu",
        "tokenssgpu",
        "tokssgpu",
        "toksgpu",
        "tokenssecgpu",
        "tgs",
    ),
    "iter_time_s": (
        "itertime",
        "iterationtime",
        "iterationtimes",
        "steptime",
        "steptimes",
        "stepseconds",
        "secondsperstep",
        "timeperstep",
    ),
    "stack": ("framework", "software", "trainer", "codebase"),
    "project": (),
    "counted_flops": (),
    "attention_flops": (),
    "routing": ("routermode", "expertrouting"),
    "trains": ("trained", "finetuning"),
    "notes": ("note", "comment", "comments", "remarks"),
}
# Column -> spellings whose numbers must be divided.
MILLISECONDS = ("itertimems", "iterationtimems", "steptimems", "timeperstepms")
BLANKS = ("", "nan", "n/a", "na", "null", "-", "--", "\u2014", "\u2013", "?", "unknown")
BEYOND_HEADINGS = "(beyond the headings)"
_KNOWN = {
    re.sub(r"[^a-z0-9]", "", spelling): column
    for column, others in SPELLINGS.items()
    for spelling in (column, *others)
} | dict.fromkeys(MILLISECONDS, "iter_time_s")
READ = frozenset((*SPELLINGS, *TRAITS))


def tidy(rows: Iterable[Mapping[Any, Any]]) -> Iterator[dict[str, str]]:
    """Rows with this project's column names and stripped values; blank is ""."""
    for row in rows:
        tidied: dict[str, str] = {}
        for heading, value in row.items():
            if heading is None or not isinstance(value, str):
                continue  # cells beyond the headings, or missing at the end of a line
            spelled = re.sub(r"[^a-z0-9]", "", heading.lower())
            column = column_of(heading)
            text = _value(column, value)
            if text and spelled in MILLISECONDS:
                text = _divided(text, 1000)
            if text or column not in tidied:
                tidied[column] = text
        yield tidied


def unread_columns(rows: Iterable[Mapping[Any, Any]]) -> dict[str, int]:
    """Headings that no prediction reads, with the rows that say something there."""
    found: Counter[str] = Counter()
    for row in rows:
        for heading, value in row.items():
            if heading is None:
                found[BEYOND_HEADINGS] += any(cell.strip() for cell in value)
            elif isinstance(value, str) and column_of(heading) not in READ:
                found[heading.strip()] += value.strip().lower() not in BLANKS
    return {heading: count for heading, count in found.items() if count}


def column_of(heading: str) -> str:
    """This project's name of a column; an unknown heading as it stands, in lower case."""
    return _KNOWN.get(re.sub(r"[^a-z0-9]", "", heading.lower()), heading.strip().lower())


def _value(column: str, value: str) -> str:
    text = value.strip().strip("\ufeff").strip()
    if text.lower() in BLANKS:
        return ""
    if column == "iter_time_s" and re.fullmatch(r"[\d.,]+ ?ms", text):
        return _divided(text[:-2], 1000)
    return text


def _divided(text: str, by: float) -> str:
    try:
        return repr(float(text.replace(",", "")) / by)
    except ValueError:
        return text
