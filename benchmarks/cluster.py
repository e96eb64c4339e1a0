"""How fast the core is at 12,500 nodes, and what its watch over 100,000 ranks costs.

    python -m benchmarks.cluster [--events N] [--nodes N]

The load is a busy fleet: one job on a third of it, hundreds of smaller ones; steps, failures,
swaps, shrinks, repairs. The log that it makes is then replayed from its start, and from a snapshot.
Times are of the processor, so that others on the machine do not count. Exits with 1 when a bar is
missed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np

from benchmarks.cluster_load import Load, fleet_of, healthy, policy_of
from phalanx.cluster.core import Core
from phalanx.cluster.detectors import slow_compute
from phalanx.cluster.protocol.events import Event
from phalanx.cluster.protocol.liveness import Liveness
from proof.report import report

SECOND = 10**9
R = TypeVar("R")
SEED = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--nodes", type=int, default=12_500)
    options = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    figures = throughput(options.nodes, options.events)
    figures["liveness_share"] = liveness(options.nodes)
    straggler()
    return report("core", figures)


def throughput(nodes: int, count: int) -> dict[str, float]:
    """Events a second while the log is made, then its replay and a restart from a snapshot."""
    core = Core(fleet_of(nodes), policy_of())
    load = Load(core, SEED)
    log: list[bytes] = []
    handling = 0.0
    slowest = 0.0
    kinds: dict[str, list[float]] = {}
    gc.collect()
    gc.freeze()
    for event in load.events(count):
        log.append(msgspec.msgpack.encode(event))
        started = time.thread_time()
        commands = core.handle(event)
        took = time.thread_time() - started
        handling += took
        slowest = max(slowest, took)
        kinds.setdefault(type(event.body).__name__, []).append(took)
        load.sent(commands)
    core.ledger.check(core.view)
    rate = count / handling
    days = core.view.now_ns / SECOND / 86400
    print(
        f"{count:,} events on {nodes:,} nodes ({days:.2f} days, {len(core.view.jobs)} jobs, "
        f"{healthy(core):,} nodes fit): {rate:,.0f} events/s, slowest {slowest * 1000:.1f} ms"
    )
    for name in sorted(kinds, key=lambda name: -sum(kinds[name])):
        times = kinds[name]
        print(
            f"    {name:14} {len(times):9,} x {sum(times) / len(times) * 1e6:8.1f} us "
            f"= {sum(times):6.2f} s"
        )
    return {"events_per_second": rate, **replay(core, log, nodes)}


def replay(core: Core, log: list[bytes], nodes: int) -> dict[str, float]:
    """The same log again, decoded from bytes; and a core from its snapshot."""
    decoder = msgspec.msgpack.Decoder(Event)

    def again() -> Core:
        other = Core(fleet_of(nodes), policy_of())
        for data in log:
            other.handle(decoder.decode(data))
        return other

    other, seconds = timed(again)
    kept, writing = timed(core.snapshot)
    assert other.snapshot() == kept, "the replay ended elsewhere"
    restored, reading = timed(lambda: Core.restore(kept))
    assert restored.snapshot() == kept
    size = sum(map(len, log))
    print(f"replay of {len(log):,} events ({size / 1e6:.0f} MB): {seconds:.1f} s, same state")
    print(f"snapshot {len(kept) / 1e6:.1f} MB: written {writing:.2f} s, restored {reading:.2f} s")
    return {"replay_seconds": seconds * 1e6 / len(log), "restore_seconds": reading}


def liveness(nodes: int) -> float:
    """A minute of heartbeats, one call each, and the look for who is silent."""
    watch = Liveness(21 * SECOND, nodes)
    for node in range(nodes):
        watch.watch(node, 0)
    rounds = 12

    def minute() -> int:
        found = 0
        for number in range(rounds):
            now = number * 5 * SECOND
            for node in range(nodes):
                watch.heartbeat(node, now)
            for tick in range(5):
                found += len(watch.silent(now + tick * SECOND))
        return found

    silent, seconds = timed(minute)
    assert silent == 0
    share = seconds / (rounds * 5)
    print(f"liveness of {nodes:,} nodes at 5 s: {share:.2%} of a core")
    return share


def straggler() -> None:
    """One judgement over 100,000 ranks and 12 steps."""
    times = np.random.default_rng(SEED).normal(4e8, 4e6, (12, 100_000)).astype(np.int64)
    times[:, 54_321] = times[:, 54_321] * 11 // 10
    found, seconds = timed(lambda: slow_compute(times))
    assert [slow.rank for slow in found] == [54_321]
    print(f"slow rank among 100,000 named in {seconds * 1000:.0f} ms")


def timed(work: Callable[[], R]) -> tuple[R, float]:
    """What a function returns, and how long it took."""
    started = time.thread_time()
    result = work()
    return result, time.thread_time() - started


if __name__ == "__main__":
    sys.exit(main())
