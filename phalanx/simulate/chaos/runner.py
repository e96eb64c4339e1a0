"""Chaos seeds: faults, then quiet; everything must hold, and every job must end."""

from __future__ import annotations

import resource
import time
import traceback

from phalanx.cluster.jobs.job import JobState
from phalanx.cluster.ledger.report import fleet_share
from phalanx.simulate.chaos.faults import ChaosInjector
from phalanx.simulate.chaos.site import MINUTE
from phalanx.simulate.chaos.world import MOST_CALLS, ChaosWorld
from phalanx.simulate.result import SeedResult
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.story import clock

LOOK = 30 * 10**9  # whether all jobs have ended is asked this often


def run_chaos(scenario: Scenario, seed: int) -> SeedResult:
    """One seed."""
    began = time.perf_counter()
    world, injector = play(scenario, seed)
    share = fleet_share(world.leader.core.ledger, world.policy.price)
    jobs = world.leader.core.view.jobs.values()
    violations = world.checks.found
    return SeedResult(
        seed=seed,
        interruptions=sum(injector.counts.values()),
        ettr=share.ettr_ppm / 1e6,
        goodput=share.goodput_ppm / 1e6,
        violations=len(violations),
        wall_seconds=round(time.perf_counter() - began, 4),
        formations=world.record.formations,
        days=world.agenda.now_ns / (24 * 60 * MINUTE),
        gpus=world.leader.core.view.fleet.total_gpus,
        jobs=world.jobs,
        jobs_done=sum(job.state == JobState.DONE for job in jobs),
        jobs_failed=sum(job.state == JobState.FAILED for job in jobs),
        events=world.events,
        peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        rungs=dict(world.record.rungs),
        faults=injector.counts,
        found=[str(violation) for violation in violations[:20]],
    )


def play(scenario: Scenario, seed: int, loud: bool = False) -> tuple[ChaosWorld, ChaosInjector]:
    """The world after a seed."""
    assert scenario.chaos is not None
    world = ChaosWorld(scenario.chaos, seed, loud)
    injector = ChaosInjector(world)
    try:
        world.start()
        injector.plan()
        if world.busy:
            injector.plan_orders()
        end = injector.until_ns + int(scenario.chaos.quiet_minutes * MINUTE)
        _until(world, injector.until_ns)
        world.heal()
        injector.people.tidy_up()
        while world.agenda.now_ns < end and not world.settled():
            _until(world, world.agenda.now_ns + LOOK)
        world.judge()
    except Exception:
        if not any(found.rule == "crash" for found in world.checks.found):
            told = traceback.format_exc(limit=-4).replace("\n", " | ")
            world.complain("crash", told)
    return world, injector


def _until(world: ChaosWorld, time_ns: int) -> None:
    if not world.agenda.run(time_ns, MOST_CALLS):
        raise RuntimeError(f"more than {MOST_CALLS} things happened: it goes round in circles")


def chaos_story(scenario: Scenario, seed: int) -> tuple[list[str], list[str]]:
    """What happened in a seed, for a person, and its violations alone."""
    world, injector = play(scenario, seed, loud=True)
    violations = world.checks.found
    if violations:
        lines = list(world.story.around(violations[0].time_ns, before=80, after=4))
    else:
        lines = list(world.story.lines())
    lines += [f"{clock(violation.time_ns)}  VIOLATION {violation}" for violation in violations]
    lines.append(f"seed {seed}: {len(violations)} violations; injected {injector.counts}")
    return lines, [str(violation) for violation in violations]
