"""Seeds: one after the other, or over several processes."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import median

from phalanx.cluster.job import HOUR_NS
from phalanx.cluster.policy import DAY_NS
from phalanx.simulate.draws import Draws
from phalanx.simulate.incidents import expected_interruptions
from phalanx.simulate.result import Report, SeedResult, rounded, summarise
from phalanx.simulate.scenario import Scenario
from phalanx.simulate.timeline import Timeline
from phalanx.simulate.workload import submissions
from phalanx.simulate.world import World

SIZES = (1, 8, 64, 512, 1024, 4096, 16384)  # lower ends of the classes of MTTF by job size


def run_seed(scenario: Scenario, seed: int) -> SeedResult:
    """One seed, played from the beginning."""
    if scenario.chaos is not None:
        from phalanx.simulate.chaos.runner import run_chaos

        return run_chaos(scenario, seed)
    return played(scenario, seed)[0]


def played(
    scenario: Scenario, seed: int, *, loud: bool = False, bins: int = 0
) -> tuple[SeedResult, World, Timeline]:
    """One seed with the world that it left behind."""
    began = time.perf_counter()
    world = World(scenario, seed, loud)
    timeline = Timeline(world, bins)
    world.run(submissions(scenario, Draws(seed)))
    timeline.close()
    result = _result(scenario, seed, world)
    result.wall_seconds = time.perf_counter() - began
    return rounded(result), world, timeline


def run_seeds(
    scenario: Scenario,
    seeds: Sequence[int],
    processes: int = 1,
    done: Callable[[SeedResult], None] = lambda _: None,
) -> Report:
    """Many seeds."""
    began = time.perf_counter()
    results = []
    for result in _each(scenario, seeds, processes):
        done(result)
        results.append(result)
    return summarise(scenario.name, results, time.perf_counter() - began)


def _each(scenario: Scenario, seeds: Sequence[int], processes: int) -> Iterator[SeedResult]:
    if processes <= 1 or len(seeds) == 1:
        for seed in seeds:
            yield run_seed(scenario, seed)
        return
    with ProcessPoolExecutor(processes) as pool:
        chunk = max(1, min(16, len(seeds) // (4 * processes)))
        yield from pool.map(run_seed, [scenario] * len(seeds), seeds, chunksize=chunk)


def _result(scenario: Scenario, seed: int, world: World) -> SeedResult:
    report = world.core.ledger.report(world.view)
    jobs = list(world.view.jobs.values())
    total = max(1, sum(report.fleet.values()))
    hits = world.interruptions
    ended = [job for job in jobs if job.started_ns or job.ran_ns]
    waits = [(job.first_start_ns - job.submitted_ns) / 1e9 for job in ended]
    causes: dict[str, int] = {}
    for _, cause, _ in hits:
        causes[cause] = causes.get(cause, 0) + 1
    lost = {
        cause: sum(buckets.values()) / HOUR_NS for cause, buckets in report.causes.items()
    }
    return SeedResult(
        seed=seed,
        interruptions=len(hits),
        expected_interruptions=expected_interruptions(scenario),
        ettr=report.ettr_ppm / 1e6,
        goodput=report.goodput_ppm / 1e6,
        violations=len(world.checks.found),
        wall_seconds=0.0,
        planned=world.people.planned,
        formations=world.gangs.formations,
        mtbf_hours=scenario.days * 24 / max(1, len(hits)),
        mean_recovery_seconds=world.gangs.mean_recovery_seconds(),
        days=scenario.days,
        gpus=scenario.fleet.gpus,
        gpu_hours=total / HOUR_NS,
        dollars=report.micro_dollars / 1e6,
        megawatt_hours=report.watt_hours / 1e6,
        steps=max((job.step for job in jobs), default=0),
        jobs=len(jobs),
        jobs_done=sum(job.state == "done" for job in jobs),
        jobs_failed=sum(job.state == "failed" for job in jobs),
        median_wait_seconds=median(waits) if waits else 0.0,
        longest_wait_seconds=max(waits, default=0.0),
        events=world.driver.events,
        peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        buckets={name: amount / total for name, amount in report.fleet.items() if amount},
        by_cause=dict(sorted(causes.items(), key=lambda item: -item[1])),
        rungs=dict(world.gangs.rungs),
        lost_gpu_hours=dict(sorted(lost.items(), key=lambda item: -item[1])),
        mttf_hours=mttf_by_size(world),
        found=[str(violation) for violation in world.checks.found[:20]],
    )


def mttf_by_size(world: World) -> dict[str, float]:
    """Mean hours between unexpected faults of a job, by the GPUs of the job."""
    failures: dict[int, int] = {}
    for _, _, gpus in world.interruptions:
        size = max((least for least in SIZES if least <= gpus), default=1)
        failures[size] = failures.get(size, 0) + 1
    hours: dict[int, float] = {}
    for number, account in world.core.ledger.accounts.items():
        gang = world.view.jobs[number].spec.gang
        gpus = max(1, gang.gpus(gang.replicas))
        size = max((least for least in SIZES if least <= gpus), default=1)
        used = world.core.ledger.used_gpu_ns(number)
        hours[size] = hours.get(size, 0.0) + used / gpus / HOUR_NS
        del account
    return {
        f"{size}+": round(hours[size] / failures[size], 3)
        for size in SIZES
        if failures.get(size) and hours.get(size)
    }


def days_of(time_ns: int) -> float:
    """Virtual time in days."""
    return time_ns / DAY_NS
