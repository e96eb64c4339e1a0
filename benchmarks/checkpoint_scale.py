"""What the metadata of a checkpoint costs at 16,384 and 98,304 ranks, simulated with local files.

    python -m benchmarks.checkpoint_scale

Every rank's sidecar is a real file and the commit is the real one. What each rank does for
itself is measured for one rank of each pipeline stage. Exits with 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

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
from phalanx.checkpoint.format.layout import WHOLE, Layout
from phalanx.checkpoint.format.manifest import (
    VERSION,
    Manifest,
    Shard,
    read_manifest,
    sidecar_name,
    table_name,
)
from phalanx.checkpoint.format.shard import Sidecar, build_header
from phalanx.checkpoint.format.source import FolderSource
from phalanx.checkpoint.retention import RetentionPolicy
from phalanx.checkpoint.write.commit import SaveOrder, try_commit
from phalanx.data import Cursor
from phalanx.data.corpus.checksum import crc32c
from proof.report import report


class Case(NamedTuple):
    """A gang and the tensors of its model, optimizer state included."""

    name: str
    stages: int
    tensor: int
    data: int
    tensors: int
    dim: int
    figure: str

    @property
    def ranks(self) -> int:
        return self.stages * self.tensor * self.data


CASES = [
    Case("16,384 ranks, 2,000 tensors", 16, 8, 128, 2000, 16384, "seconds_16k"),
    Case("98,304 ranks, 1T model", 16, 8, 768, 6144, 13568, "seconds_98k"),
]


def table_of(case: Case, stage: int) -> TensorTable:
    """Matrices cut by tensor and data parallelism, as FSDP2 over TP cuts them."""
    own = case.tensors // case.stages
    entries = []
    for i in range(own):
        name, kind = f"optimizer.exp_avg.layers.{stage * own + i}.weight", i % 3
        shape = (case.dim,) if kind == 2 else (4 * case.dim, case.dim)
        entries.append(TensorEntry(name, "F32", shape, kind))
    return TensorTable(tuple(entries), layouts(case.data, case.tensor))


def layouts(data: int, tensor: int) -> tuple[Layout, ...]:
    """Rows cut twice, columns and rows, and norms that tensor parallelism leaves whole."""
    sizes, runs = (data, tensor), to_runs(range(data * tensor))
    return (
        Layout(sizes, (0, 0), (1, 0), runs),
        Layout(sizes, (0, 1), (1, 0), runs),
        Layout(sizes, (0, WHOLE), (0,), runs),
    )


def stand_of(case: Case, rank: int) -> MeshPosition:
    per_stage = case.tensor * case.data
    stage, inside = divmod(rank, per_stage)
    at = divmod(inside, case.tensor)
    base = stage * per_stage
    return MeshPosition((base,) * 3, (at,) * 3)


class Clock:
    """Times of what is done once, or by every rank at the same time."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, work: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = work()
        self.seconds[name] = time.perf_counter() - began
        return result


def simulate(case: Case, folder: Path) -> tuple[Clock, dict[str, float]]:
    clock, facts = Clock(), {}
    per_stage = case.tensor * case.data
    tables = [table_of(case, stage) for stage in range(case.stages)]
    encoded = clock.timed("a rank: table and digest", lambda: encode_table(tables[0]))
    texts = [encoded, *(encode_table(table) for table in tables[1:])]
    digests = [digest_of(text) for text in texts]
    told = [(digests[rank // per_stage], stand_of(case, rank).bases) for rank in range(case.ranks)]
    groups = clock.timed("a rank: groups out of all ranks' digests", lambda: form_groups(told))
    geometry = Geometry(tables[1], groups[1])
    pieces = clock.timed(
        "a rank: what it writes", lambda: geometry.written_by(stand_of(case, per_stage + 7))
    )
    header = clock.timed("a rank: header of its shard", lambda: build_header(pieces, {}))
    shard_bytes = len(header) + sum(piece.bytes for piece in pieces)

    path = folder / "step-00000001"
    path.mkdir(parents=True)
    session = "scale000"
    for text, digest in zip(texts, digests, strict=True):
        (path / table_name(digest, session)).write_bytes(text)
    put_sidecars(case, path, session, shard_bytes, len(header))
    draft = Manifest(
        version=VERSION,
        step=1,
        generation=0,
        tokens=0,
        cursor=Cursor(),
        mesh={"pipeline": case.stages, "tensor": case.tensor, "data": case.data},
        world_size=case.ranks,
        config_hash="",
        created="2026-01-01T00:00:00+00:00",
        session=session,
        groups=groups,
    )
    side = Sidecar(rank=0, step=1, generation=0, session=session, shard_bytes=0, header_bytes=0)
    order = SaveOrder(path=str(path), policy=RetentionPolicy(), draft=draft, sidecar=side)
    assert clock.timed("once: list sidecars, create the manifest", lambda: try_commit(order))
    manifest = clock.timed("a rank: read and prove the manifest", lambda: read_manifest(path))
    source = FolderSource(path)
    loaded = clock.timed(
        "a rank: read all tables",
        lambda: [Geometry(source.table(group), group) for group in manifest.groups],
    )
    read = clock.timed("a rank of half the gang: who has its part", lambda: plan(case, loaded))
    facts["manifest MB"] = (path / "manifest.json").stat().st_size / 1e6
    facts["tables MB"] = sum(map(len, texts)) / 1e6
    facts["shard MB"] = shard_bytes / 1e6
    facts["files that a rank reads"] = len({holding.rank for holding in read})
    wanted = sum(holding.wanted.elements * 4 for holding in read)
    written = sum(holding.written.elements * 4 for holding in read)
    facts["MB that a rank wants"] = wanted / 1e6
    facts["MB in the parts it reads from"] = written / 1e6
    return clock, facts


def put_sidecars(case: Case, path: Path, session: str, shard_bytes: int, header: int) -> None:
    """What the ranks' keepers would have put there, each for itself."""
    sums = b"\x00" * (4 * -(-shard_bytes // (1 << 20)))
    for rank in range(case.ranks):
        side = Sidecar(
            rank=rank, step=1, generation=0, session=session, shard_bytes=shard_bytes,
            header_bytes=header, sums=sums,
        )  # fmt: skip
        text = msgspec.json.encode(side)
        name = sidecar_name(rank, session, Shard(shard_bytes, crc32c(text)))
        (path / name).write_bytes(text)


def plan(case: Case, geometries: list[Geometry]) -> list[Any]:
    """The parts that one rank of a gang with half the data parallelism reads."""
    stage, wanted = geometries[1], layouts(case.data // 2, case.tensor)
    found: list[Any] = []
    for entry in stage.table.entries:
        found += stage.holding(entry.name, wanted[entry.layout].block(entry.shape, (3, 1)))
    return found


def main() -> int:
    """Simulate, print, judge."""
    parser = argparse.ArgumentParser(description="Checkpoint metadata at scale.")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/checkpoint_scale"))
    options = parser.parse_args()
    figures = {}
    for case in CASES:
        shutil.rmtree(options.folder, ignore_errors=True)
        clock, facts = simulate(case, options.folder)
        total = sum(clock.seconds.values())
        figures[case.figure] = total
        print(f"{case.name}: {total:.2f} s")
        for name, seconds in clock.seconds.items():
            print(f"  {seconds:8.3f} s  {name}")
        for name, fact in facts.items():
            print(f"  {fact:8.1f}    {name}")
    shutil.rmtree(options.folder, ignore_errors=True)
    return report("checkpoint-scale", figures)


if __name__ == "__main__":
    sys.exit(main())
