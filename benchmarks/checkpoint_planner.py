"""What planning a save costs with DCP's planner and with geometry that every rank derives.

    python -m benchmarks.checkpoint_planner --ranks 32 64 128

DCP gathers every rank's list of what it writes at one rank, which merges them and makes metadata
of every piece; each loading rank reads all of that. Phalanx exchanges a digest a rank, once a run.
Prints seconds and bytes for some numbers of ranks, and what they come to at 16,384 if both grow
as they do between the last two.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from phalanx.checkpoint.format.geometry import (
    Geometry,
    MeshPosition,
    TensorEntry,
    TensorTable,
    digest_of,
    encode_table,
    form_groups,
    to_runs,
)
from phalanx.checkpoint.format.layout import Layout
from proof.report import report

TARGET_RANKS = 16_384
COLUMNS = 64


class Cost(NamedTuple):
    """Of one save, where the work is not divided, and of one rank's load."""

    seconds: float
    gathered_bytes: int
    read_bytes: int  # of metadata, by every rank that loads


def name_of(number: int) -> str:
    return f"optimizer.exp_avg.layers.{number}.weight"


def dcp(ranks: int, tensors: int) -> Cost:
    """What rank 0 does between the gathering of the plans and their scattering."""
    sent = [pickle.dumps(_plan(rank, ranks, tensors)) for rank in range(ranks)]
    seconds, (plans, metadata) = timed(lambda: _merge(sent))
    again, stored = timed(lambda: pickle.dumps(metadata))
    answers, sizes = timed(lambda: [len(pickle.dumps(plan)) for plan in plans])
    return Cost(seconds + again + answers, sum(map(len, sent)) + sum(sizes), len(stored))


def _merge(sent: list[bytes]) -> Any:
    return create_default_global_save_plan([pickle.loads(plan) for plan in sent])


def _plan(rank: int, ranks: int, tensors: int) -> SavePlan:
    """The list that a rank with a row of every tensor sends."""
    properties = TensorProperties(dtype=torch.float32)
    size, offset = torch.Size((ranks, COLUMNS)), torch.Size((rank, 0))
    chunk = ChunkStorageMetadata(offset, torch.Size((1, COLUMNS)))
    items = [
        WriteItem(
            index=MetadataIndex(name_of(number), offset),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for number in range(tensors)
    ]
    return SavePlan(items)


def derived(ranks: int, tensors: int) -> Cost:
    """What each rank does for itself, once a run; all do it at the same time."""
    layout = Layout((ranks,), (0,), (0,), to_runs(range(ranks)))
    entries = tuple(TensorEntry(name_of(n), "F32", (ranks, COLUMNS), 0) for n in range(tensors))
    table = TensorTable(entries, (layout,))

    def plan() -> bytes:
        encoded = encode_table(table)
        told = [(digest_of(encoded), (0,))] * ranks
        groups = form_groups(told)
        Geometry(table, groups[0]).written_by(MeshPosition((0,), ((ranks // 2,),)))
        return encoded

    seconds, encoded = timed(plan)
    digest_bytes = len(pickle.dumps((digest_of(encoded), (0,), "session0")))
    manifest_bytes = 25 * ranks  # two numbers a rank, as JSON; benchmarks.checkpoint_scale has it
    return Cost(seconds, ranks * digest_bytes, len(encoded) + manifest_bytes)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = work()
    return time.perf_counter() - began, result


def main() -> int:
    """Measure both at each size, and extend the last slope."""
    parser = argparse.ArgumentParser(description="DCP's planner beside derived geometry.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--tensors", type=int, default=2000)
    options = parser.parse_args()
    figures = {}
    print(f"{options.tensors:,} tensors, each cut over all ranks")
    print(f"{'':24}{'ranks':>8}{'seconds':>10}{'gathered':>12}{'read by each':>14}")
    for side, cost in (("DCP, every save", dcp), ("Phalanx, once a run", derived)):
        found = [cost(ranks, options.tensors) for ranks in options.ranks]
        for ranks, one in zip(options.ranks, found, strict=True):
            show(side, ranks, one)
        factor = TARGET_RANKS / options.ranks[-1]
        far = Cost(
            found[-1].seconds * factor,
            round(found[-1].gathered_bytes * factor),
            round(found[-1].read_bytes * factor),
        )
        if side.startswith("Phalanx"):  # cheap enough not to be guessed
            far = derived(TARGET_RANKS, options.tensors)
        show(f"{side}{' (extended)' * side.startswith('DCP')}", TARGET_RANKS, far)
        figures["derived_seconds" if cost is derived else "dcp_seconds"] = (
            far.seconds if cost is derived else found[-1].seconds
        )
    return report("checkpoint-planner", figures)


def show(side: str, ranks: int, cost: Cost) -> None:
    gathered, read = cost.gathered_bytes / 1e6, cost.read_bytes / 1e6
    print(f"{side:24}{ranks:>8,}{cost.seconds:>10.3f}{gathered:>9,.1f} MB{read:>11,.1f} MB")


if __name__ == "__main__":
    sys.exit(main())
