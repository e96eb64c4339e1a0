"""Metrics under load: a fleet's records on one core, a week of data, the page's questions.

    python -m benchmarks.observe            # ingest, a week in the store, questions of the page
    python -m benchmarks.observe --stores   # ways to store the same numbers, beside each other

Ingest plays the server's side of one second of a 1,000-rank job that reports ten metrics a rank,
and of the node-aggregated step times of 100,000 ranks (12,500 nodes, a message each 5 s), decoding
included. The week is written through the store's own code with the clock running ahead.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from phalanx.cluster.jobs.job import GangShape, Placement
from phalanx.cluster.policy import PricePolicy
from phalanx.cluster.protocol.step_watch import StepWatch
from phalanx.cluster.protocol.timeouts import fixed_limits
from phalanx.control.server.agent_link.step_records import Metrics
from phalanx.control.wire import agent_messages as wire
from phalanx.observe.node.node_messages import NodeRecords
from phalanx.observe.node.node_records import PARTS, TimedRecord, merge
from phalanx.observe.store import query
from phalanx.observe.store.metric_store import MetricStore
from phalanx.observe.store.recorder import JOB_TABLES, SCALARS, RecordedGang, Recorder, owner_of
from phalanx.observe.store.tables import DAY_NS, SECOND_NS, Column
from phalanx.train.report.records import StepParts, StepRecord
from proof.report import report

RANKS, NODE_RANKS, METRICS = 1_000, 8, 10
FLEET_NODES = 12_500
SMALL_JOB, FLEET_JOB = 1, 2
NOW = 1_800_000_000 * SECOND_NS // DAY_NS * DAY_NS


def record(step: int, rank: int, slow: float) -> StepRecord:
    """A step of one second."""
    parts = StepParts(
        data=0.01, forward=0.3, backward=0.6, optimizer=0.05, peer_wait=0.1, own=0.8 * slow
    )
    return StepRecord(
        job="load",
        generation=1,
        rank=rank,
        step=step,
        first_sample=step,
        samples=1,
        tokens=1 << 20,
        tokens_seen=step << 20,
        loss=2.0 + 1 / step,
        grad_norm=1.0,
        learning_rate=1e-4,
        step_seconds=1.0 * slow,
        parts=parts,
        tokens_per_second=1e6,
        mfu=0.5,
        hfu=0.5,
        mfu_basis="load",
        peak_memory_bytes=1 << 36,
        eta_seconds=1.0,
        skipped=False,
        non_finite=False,
    )


def messages(job: int, nodes: int, step: int, *, summary: bool) -> list[bytes]:
    """What the agents of a gang send for one step."""
    generator = np.random.default_rng(step)
    noise = 1 + 0.02 * generator.standard_normal((nodes, NODE_RANKS))
    found = []
    for node in range(nodes):
        ranks = range(node * NODE_RANKS, (node + 1) * NODE_RANKS)
        said = {
            rank: [
                TimedRecord(NOW + step * SECOND_NS, record(step, rank, float(noise[node, index])))
            ]
            for index, rank in enumerate(ranks)
        }
        made = merge(node, job, 1, said, summary=summary)
        assert made is not None
        found.append(wire.encode(made))
    return found


def served(store: MetricStore) -> Metrics:
    """The server's side with both gangs running."""
    watch = StepWatch()
    metrics = Metrics(watch, lambda found: None, Recorder(store, PricePolicy()))
    for job, nodes in ((SMALL_JOB, RANKS // NODE_RANKS), (FLEET_JOB, FLEET_NODES)):
        placement = Placement(tuple(range(nodes)), (), replicas=nodes * NODE_RANKS)
        shape = GangShape(replicas=nodes * NODE_RANKS, slot_gpus=NODE_RANKS)
        watch.begin(job, 1, shape, placement, fixed_limits(10**18), NOW)
        metrics.steps.begin(job, 1, placement.nodes, NODE_RANKS)
        assert metrics.recorder is not None
        metrics.recorder.begin(
            RecordedGang(
                job=job,
                generation=1,
                world=nodes * NODE_RANKS,
                gpus=nodes * NODE_RANKS,
                node_names=[f"n{n}" for n in range(nodes)],
                slot_ranks=NODE_RANKS,
            )
        )
    return metrics


def ingest(folder: Path) -> dict[str, float]:
    """CPU seconds of the server for one second of both loads."""
    store = MetricStore(folder / "ingest.sqlite")
    metrics = served(store)
    small = [messages(SMALL_JOB, RANKS // NODE_RANKS, s, summary=False) for s in range(1, 11)]
    fleet = [messages(FLEET_JOB, FLEET_NODES, s, summary=True) for s in range(1, 4)]
    bytes_small = sum(map(len, small[0]))
    bytes_fleet = sum(map(len, fleet[0]))

    def take(batches: Sequence[Sequence[bytes]]) -> float:
        began = time.process_time()
        for batch in batches:
            for data in batch:
                message = wire.decode_up(data)
                assert isinstance(message, NodeRecords)
                metrics.receive(message, NOW + 1000 * SECOND_NS)
            store.flush()
        return (time.process_time() - began) / len(batches)

    return {
        "cpu_of_a_step_of_1000_ranks": take(small),
        "cpu_of_a_step_of_100000_ranks": take(fleet),
        "bytes_of_a_step_of_1000_ranks": bytes_small,
        "bytes_of_a_step_of_100000_ranks": bytes_fleet,
    }


def cost(folder: Path, rounds: int = 2_000) -> dict[str, float]:
    """Seconds that measuring takes from a rank's step: record, ring, waits for peers."""
    from phalanx.observe.node.worker_ring import RingSink
    from phalanx.train.measure.wait_hooks import watched
    from phalanx.train.measure.waits import PeerWaits

    sink, waits = RingSink(folder / "ring"), PeerWaits()
    made = record(1, 0, 1.0)
    began = time.perf_counter()
    for _ in range(rounds):
        sink.write(made)
        sink.flush()
    ring = (time.perf_counter() - began) / rounds
    began = time.perf_counter()
    for _ in range(rounds):
        waits.take()
    took = (time.perf_counter() - began) / rounds
    began = time.perf_counter()
    for _ in range(rounds):
        watched(lambda: None)
    collective = (time.perf_counter() - began) / rounds
    return {"ring": ring, "waits": took, "collective": collective}


def week(
    folder: Path, days: float, ranks_count: int = RANKS
) -> tuple[MetricStore, dict[str, float]]:
    """A week of ranks with ten metrics a second each, through the store's own code."""
    store = MetricStore(folder / "week.sqlite")
    scalars = store.table(owner_of(SMALL_JOB), "scalars", 0, [Column(name) for name in SCALARS])
    wide = ["step_seconds", "own_seconds", *(f"{name}_seconds" for name in PARTS)]
    wide += ["memory", "power"][: METRICS - len(wide)]
    facts = {"rows": "rank", "ranks": list(range(ranks_count)), "nodes": ["n"] * ranks_count}
    ranks = store.table(
        owner_of(SMALL_JOB), "ranks", 1, [Column(n, ranks_count) for n in wide], facts
    )
    generator = np.random.default_rng(1)
    seconds = int(days * 86_400)
    began, kept = time.process_time(), 0
    base = {name: generator.uniform(0.05, 1.0) for name in wide}
    for second in range(seconds):
        # Old seconds only matter to the coarse tiers: one stands for its bucket.
        age = seconds - second
        if (age > 7 * 3600 and second % 10) or (age > 50 * 3600 and second % 60):
            continue
        at = NOW - (seconds - second) * SECOND_NS
        noise = generator.standard_normal((len(wide), ranks_count), np.float32)
        scalars.append(at, second + 1, {name: 2 + float(noise[0, 0]) for name in SCALARS})
        rows = {
            name: base[name] * (1 + 0.02 * line) for name, line in zip(wide, noise, strict=True)
        }
        ranks.append(at, second + 1, rows)
        if second - kept >= 3600:
            kept = second
            store.flush()
            store.keep(at)
        elif second % 60 == 0:
            store.flush()
    store.flush(everything=True)
    store.keep(NOW)
    return store, {
        "days": days,
        "gigabytes": store.size_bytes() / 1e9,
        "cpu": time.process_time() - began,
    }


def questions(store: MetricStore, rounds: int = 40) -> dict[str, dict[str, float]]:
    """Seconds of what the page asks, over the week and its parts."""
    owner = owner_of(SMALL_JOB)
    spans = {"week": 7 * DAY_NS, "day": DAY_NS, "hour": 3600 * SECOND_NS}
    names = ["loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "step_seconds"]
    found = {}
    for label, length in spans.items():
        span = (NOW - length, NOW)
        asks: dict[str, Callable[[], Any]] = {
            "curves": partial(query.series, store, owner, JOB_TABLES, names, span, 800),
            "heat map": partial(query.ranks, store, owner, span, 300),
        }
        for what, ask in asks.items():
            times = []
            for _ in range(rounds):
                began = time.perf_counter()
                msgspec.json.encode(ask())
                times.append(time.perf_counter() - began)
            times.sort()
            found[f"{what}, {label}"] = {"median": times[len(times) // 2], "p99": times[-1]}
    return found


def stores(folder: Path) -> list[tuple[str, float, float, float]]:
    """(way, bytes a number, microseconds a number to write, milliseconds to read one series)."""
    generator = np.random.default_rng(2)
    rows, columns = 300, 1_000
    values = (0.5 * (1 + 0.02 * generator.standard_normal((rows, columns)))).astype(np.float32)
    count = values.size
    found = [_as_rows(folder, values), _as_blocks(folder, values)]
    for way in (_as_parquet, _as_duckdb):
        try:
            found.append(way(folder, values))
        except ImportError as error:
            print(f"skipped: {error.name} is not installed")
    return [
        (name, size / count, seconds / count * 1e6, read * 1e3)
        for name, size, seconds, read in found
    ]


Way = tuple[str, float, float, float]


def _as_rows(folder: Path, values: Any) -> Way:
    path = folder / "rows.sqlite"
    database = sqlite3.connect(path)
    database.execute(
        "CREATE TABLE m (series INTEGER, time INTEGER, value REAL, PRIMARY KEY (series, time)) "
        "WITHOUT ROWID"
    )
    began = time.process_time()
    for row, line in enumerate(values):
        database.executemany(
            "INSERT INTO m VALUES (?, ?, ?)", [(c, row, float(v)) for c, v in enumerate(line)]
        )
        database.commit()
    wrote = time.process_time() - began
    began = time.perf_counter()
    database.execute("SELECT time, value FROM m WHERE series = 7").fetchall()
    read = time.perf_counter() - began
    database.close()
    return "SQLite, a row a number", path.stat().st_size, wrote, read


def _as_blocks(folder: Path, values: Any) -> Way:
    store = MetricStore(folder / "blocks.sqlite")
    table = store.table("x", "ranks", 1, [Column("v", values.shape[1])])
    began = time.process_time()
    for row, line in enumerate(values):
        table.append(NOW + row * SECOND_NS, row, {"v": line})
        if row % 10 == 9:
            store.flush()
    store.flush()
    wrote = time.process_time() - began
    store.keep(NOW + 600 * SECOND_NS)
    (info,) = store.find("x", "ranks")
    began = time.perf_counter()
    store.read(info, "v", 0, 0, 1 << 62)
    read = time.perf_counter() - began
    size = sum(
        row[0]
        for row in store._database.execute(
            "SELECT length(data) FROM parts JOIN blocks ON id = block_id WHERE tier = 0"
        )
    )
    return "SQLite, packed blocks (this store; all series read)", size, wrote, read


def _as_parquet(folder: Path, values: Any) -> Way:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    path = folder / "x.parquet"
    names = [f"s{c}" for c in range(values.shape[1])]
    began = time.process_time()
    with parquet.ParquetWriter(path, arrow.schema([(n, arrow.float32()) for n in names])) as writer:
        for first in range(0, len(values), 60):  # a row group a minute
            part = values[first : first + 60]
            writer.write_table(
                arrow.table([arrow.array(part[:, c]) for c in range(part.shape[1])], names)
            )
    wrote = time.process_time() - began
    began = time.perf_counter()
    parquet.read_table(path, columns=["s7"])
    return "Parquet, a row group a minute", path.stat().st_size, wrote, time.perf_counter() - began


def _as_duckdb(folder: Path, values: Any) -> Way:
    import duckdb

    path = folder / "x.duckdb"
    database = duckdb.connect(str(path), config={"threads": 1})
    database.execute("CREATE TABLE m (time BIGINT, series INTEGER, value FLOAT)")
    began = time.process_time()
    series = np.arange(values.shape[1], dtype=np.int32)
    for first in range(0, len(values), 10):
        part = values[first : first + 10]
        times = np.repeat(np.arange(first, first + len(part)), values.shape[1])
        columns = {"time": times, "series": np.tile(series, len(part)), "value": part.reshape(-1)}
        database.register("given", columns)
        database.execute("INSERT INTO m SELECT time, series, value FROM given")
    database.execute("CHECKPOINT")
    wrote = time.process_time() - began
    began = time.perf_counter()
    database.execute("SELECT time, value FROM m WHERE series = 7").fetchall()
    read = time.perf_counter() - began
    database.close()
    return "DuckDB, one table, a commit every 10 s", path.stat().st_size, wrote, read


def main() -> int:
    """Print a table of what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--stores", action="store_true", help="compare ways to store numbers")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--ranks", type=int, default=RANKS, help="of the job that is kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="phalanx-observe-") as name:
        folder = Path(name)
        if options.stores:
            print(f"{'way':55} {'bytes':>7} {'write us':>9} {'read ms':>8}")
            for way, size, wrote, read in stores(folder):
                print(f"{way:55} {size:7.2f} {wrote:9.3f} {read:8.2f}")
            return 0
        found = ingest(folder)
        a_second = found["cpu_of_a_step_of_1000_ranks"]
        fleet = found["cpu_of_a_step_of_100000_ranks"] / 5
        print(f"1,000 ranks, ten metrics a second: {a_second:.3f} s of CPU a second")
        print(f"100,000 ranks, node-aggregated every 5 s: {fleet:.3f} s of CPU a second")
        spent = cost(folder)
        a_step = spent["ring"] + spent["waits"] + 200 * spent["collective"]
        words = ", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in spent.items())
        print(f"a rank's step: {words}; with 200 collectives {a_step * 1e6:.0f} us a step")
        store, stored = week(folder, options.days, options.ranks)
        size, cpu = stored["gigabytes"], stored["cpu"]
        words = f"{stored['days']:.0f} days of {options.ranks:,} ranks"
        print(f"{words}: {size:.2f} GB, {cpu:.0f} s of CPU to write", flush=True)
        for what, times in questions(store).items():
            print(f"{what}: median {times['median'] * 1e3:.0f} ms, p99 {times['p99'] * 1e3:.0f} ms")
    figures = {"ingest_share": a_second, "fleet_share": fleet, "rank_us": a_step * 1e6}
    return report("metrics", figures)


if __name__ == "__main__":
    sys.exit(main())
