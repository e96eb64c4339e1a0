"""How one row of a table of runs was laid over its GPUs, and what follows where a cell is blank."""

from __future__ import annotations

import re

from phalanx.plan.evidence.fields import (
    SkippedRowError,
    integer,
    offload,
    precision,
    recompute,
    stated_shards,
    zero,
)
from phalanx.plan.workload import Mapping

OTHER_DATA = "dp is not GPUs / (tp * pp * cp), which is taken"
OTHER_BATCH = "global_batch is not dp * microbatch * ga; it is taken"
NO_RECOMPUTE = "recompute is not stated; none is taken"
ROUNDED_BATCH = "global_batch is rounded to whole micro-batches of every replica"


def filled_in(row: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """The row with GPUs, micro-batch and batch that its other cells give, and what they contradict.

    A step has dp * microbatch * ga samples: any one of these and the batch follows from the rest.
    """
    row, assumed = dict(row), []
    model_ranks = integer(row, "tp", 1) * integer(row, "pp", 1) * integer(row, "cp", 1)
    stated = integer(row, "dp", 0)
    if not row.get("num_gpus") and stated:
        row["num_gpus"] = str(model_ranks * stated)
    data = integer(row, "num_gpus") // model_ranks
    if stated and stated != data:
        assumed.append(OTHER_DATA)
    accumulated = integer(row, "ga", 0)
    if not accumulated or not data:
        return row, assumed
    if row.get("microbatch") and row.get("global_batch"):
        if data * integer(row, "microbatch") * accumulated != round(samples(row)):
            assumed.append(OTHER_BATCH)
    elif row.get("microbatch"):
        row["global_batch"] = str(data * integer(row, "microbatch") * accumulated)
    elif row.get("global_batch"):
        each, rest = divmod(round(samples(row)), data * accumulated)
        if rest or not each:
            raise SkippedRowError(
                "microbatch is missing, and global_batch / (dp * ga) is no number"
            )
        row["microbatch"] = str(each)
    return row, assumed


def samples(row: dict[str, str]) -> float:
    """Samples in a step as stated; a batch in tokens (4M) is brought to samples."""
    stated: float = integer(row, "global_batch")
    if re.search(r"[mM]|tok", row["global_batch"]):
        stated = stated / integer(row, "seq")
    return stated


def whole_batch(row: dict[str, str], mapping: Mapping) -> int:
    """Samples in a step.

    Where the stated batch does not come out even over the replicas (sources round, and quote
    GPUs that did not all take part), the nearest that does was run.
    """
    unit = mapping.data * mapping.micro_batch
    return max(1, round(samples(row) / unit)) * unit


def mapping_of_row(row: dict[str, str], gpus: int, node: int) -> Mapping:
    """The mapping of a row over nodes of so many GPUs; recompute is none where it is unknown."""
    tensor, pipeline = integer(row, "tp"), integer(row, "pp")
    context = integer(row, "cp", 1)
    if gpus % (tensor * pipeline * context):
        raise SkippedRowError(
            f"tp * pp * cp = {tensor * pipeline * context} does not divide {gpus} GPUs"
        )
    data = gpus // (tensor * pipeline * context)
    if not row.get("microbatch"):
        raise SkippedRowError("microbatch is missing")
    virtual = _virtual_stages(row) if pipeline > 1 else 1
    dual = "dualpipe" in row.get("notes", "").lower() and pipeline > 1 and virtual == 1
    return Mapping(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        context=context,
        expert=integer(row, "ep", 1),
        zero=zero(row.get("zero_fsdp", "")),
        replicate=_replicas(row, data, context, max(1, node // tensor)),
        micro_batch=integer(row, "microbatch"),
        recompute=recompute(row.get("recompute", "")) or "none",
        schedule="dualpipe" if dual else "interleaved" if virtual > 1 else "1f1b",
        virtual_stages=2 if dual else virtual,
        precision=precision(row.get("precision", "")),
        offload=offload(row.get("offload", "")) or offload(row.get("zero_fsdp", "")) or "none",
    )


def _virtual_stages(row: dict[str, str]) -> int:
    stages = row.get("vpp", "").lower()
    if stages.startswith(">"):
        return 2
    return 1 if stages in ("none", "no") else integer(row, "vpp", 1)


def _replicas(row: dict[str, str], data: int, context: int, node: int) -> int:
    """Groups with a full set of shards: as stated, by the ranks of a set, or a node each (HSDP)."""
    stated = integer(row, "replicate", 0)
    if stated and data % stated:
        raise SkippedRowError(f"replicate = {stated} does not divide the {data} replicas")
    if stated:
        return stated
    text = row.get("zero_fsdp", "").lower()
    hybrid = "hsdp" in text or "hybrid" in text
    shards = stated_shards(text) or (node if hybrid else 0)
    if not shards or (data * context) % shards:
        return 1
    groups = data * context // shards
    return groups if data % groups == 0 else 1
