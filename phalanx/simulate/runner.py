"""Seeds: one after the other, or over several processes."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

from phalanx.cluster.forecast.why import explain
from phalanx.cluster.jobs.job import JobState
from phalanx.cluster.ledger.buckets import TRAINING
from phalanx.cluster.ledger.report import Share, report
from phalanx.cluster.policy import DAY_NS
from phalanx.cluster.units import HOUR_NS
from phalanx.simulate.draws import SeedDraws
from phalanx.simulate.result import SeedResult, SimulationReport, rounded, summarise
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.workload import submissions
from phalanx.simulate.timeline import Timeline
from phalanx.simulate.world.world import World

T = TypeVar("T", int, float)


Passed = Callable[[float], None]  # hears which share of the time is over


def _unheard(share: float) -> None:
    pass


def run_seed(scenario: Scenario, seed: int, passed: Passed = _unheard) -> SeedResult:
    """One seed, played from the beginning."""
    if scenario.chaos is not None:
        from phalanx.simulate.chaos.runner import run_chaos

        return run_chaos(scenario, seed)
    return played(scenario, seed, passed=passed)[0]


def played(
    scenario: Scenario,
    seed: int,
    *,
    loud: bool = False,
    bins: int = 0,
    passed: Passed = _unheard,
) -> tuple[SeedResult, World, Timeline]:
    """One seed with the world that it left behind."""
    began, began_cpu = time.perf_counter(), time.process_time()
    world = World(scenario, seed, loud)
    timeline = Timeline(world, bins)
    asked = submissions(scenario, SeedDraws(seed))
    world.run(asked.jobs, passed)
    timeline.close()
    result = _result(scenario, seed, world)
    result.left_out = asked.left_out
    result.wall_seconds = time.perf_counter() - began
    result.cpu_seconds = time.process_time() - began_cpu
    return rounded(result), world, timeline


def run_seeds(
    scenario: Scenario,
    seeds: Sequence[int],
    processes: int = 1,
    done: Callable[[SeedResult], None] = lambda _: None,
    passed: Passed = _unheard,
) -> SimulationReport:
    """Many seeds; of those that one process plays, ``passed`` hears the share of all time."""
    began = time.perf_counter()
    results = []
    for result in _each(scenario, seeds, processes, passed):
        done(result)
        results.append(result)
    return summarise(scenario.name, results, time.perf_counter() - began)


def _each(
    scenario: Scenario, seeds: Sequence[int], processes: int, passed: Passed
) -> Iterator[SeedResult]:
    if processes <= 1 or len(seeds) == 1:
        for number, seed in enumerate(seeds):
            yield run_seed(scenario, seed, _part_of(passed, number, len(seeds)))
        return
    with ProcessPoolExecutor(processes, initializer=_end_when_interrupted) as pool:
        chunk = max(1, min(16, len(seeds) // (4 * processes)))
        try:
            yield from pool.map(run_seed, [scenario] * len(seeds), seeds, chunksize=chunk)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_when_interrupted() -> None:
    """Ctrl-C ends a process of the pool, which would hand the interrupt over and take more work."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _part_of(passed: Passed, number: int, count: int) -> Passed:
    return lambda share: passed((number + share) / count)


def _queued(scenario: Scenario, world: World) -> tuple[int, str]:
    """How long a scenario's one job had no nodes, and what for it waits at the end."""
    job = next(iter(world.view.jobs.values()), None)
    if scenario.workload.kind != "one-job" or job is None:
        return 0, ""
    until = job.ended_ns if job.ended else world.end_ns
    queued_ns = max(0, until - job.submitted_ns - world.record.held_ns)
    if job.state != JobState.PENDING:
        return queued_ns, ""
    why = explain(world.core.queue, world.view, job.id).reason
    return queued_ns, f"job {job.spec.name} waits: {why}"


def _ettr(scenario: Scenario, fleet: Share, world: World) -> float:
    """Of one job all its GPUs count all the time: waiting, or running with fewer, buys nothing."""
    job = next(iter(world.view.jobs.values()), None)
    if scenario.workload.kind != "one-job" or job is None:
        return fleet.ettr_ppm / 1e6
    until = job.ended_ns if job.ended else world.end_ns
    whole = (until - job.submitted_ns) * scenario.fleet.gpus
    return sum(fleet.buckets[name] for name in TRAINING) / whole if whole else 0.0


def _result(scenario: Scenario, seed: int, world: World) -> SeedResult:
    fleet = report(world.core.ledger, world.view.policy.price).fleet
    record, hits = world.record, world.record.interruptions
    total = max(1, fleet.gpu_ns)
    causes: dict[str, int] = {}
    for _, cause, _ in hits:
        causes[cause] = causes.get(cause, 0) + 1
    lost = {cause: sum(parts.values()) / HOUR_NS for cause, parts in fleet.by_cause.items()}
    queued_ns, waiting = _queued(scenario, world)
    return SeedResult(
        seed=seed,
        interruptions=len(hits),
        expected_interruptions=world.exposure.expected(world.end_ns / DAY_NS),
        ettr=_ettr(scenario, fleet, world),
        goodput=fleet.goodput_ppm / 1e6,
        violations=len(world.checks.found),
        wall_seconds=0.0,
        planned=world.people.planned,
        rollbacks=world.people.rollbacks,
        failed_repairs=record.failed_repairs,
        failed_starts=record.failed_starts,
        formations=record.formations,
        mtbf_hours=world.end_ns / HOUR_NS / len(hits) if hits else None,
        recoveries=record.recoveries,
        mean_recovery_seconds=record.mean_recovery_seconds(),
        queued_seconds=queued_ns / 1e9,
        days=world.end_ns / DAY_NS,
        gpus=scenario.fleet.gpus,
        gpu_hours=total / HOUR_NS,
        dollars=fleet.micro_dollars / 1e6,
        megawatt_hours=fleet.watt_hours / 1e6,
        steps=record.steps,
        jobs=record.submitted,
        jobs_done=record.ended.get("done", 0),
        jobs_failed=record.ended.get("failed", 0),
        jobs_refused=sum(record.refused.values()),
        median_wait_seconds=record.median_wait_seconds(),
        longest_wait_seconds=record.longest_wait_seconds(),
        events=world.driver.events,
        peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        buckets={name: amount / total for name, amount in fleet.buckets.items() if amount},
        by_cause=_largest_first(causes),
        node_faults=_largest_first(
            {world.fleet.nodes[node].name: count for node, count in record.node_faults.items()}
        ),
        rungs=dict(record.rungs),
        lost_gpu_hours=_largest_first(lost),
        mttf_hours=record.mttf_hours(),
        refused=_largest_first(record.refused),
        failed=_largest_first(record.failed),
        failures=record.failures,
        waiting=waiting,
        found=[str(violation) for violation in world.checks.found[:20]],
    )


def _largest_first(table: dict[str, T]) -> dict[str, T]:
    return dict(sorted(table.items(), key=lambda item: -item[1]))
