"""Queue policies on a recorded trace, against textbook schedulers on the same packing.

``--trace FILE`` (or PHALANX_TRACE) names the trace; Philly's 30,000 jobs are what the bars are for.
On fleets of several sizes: a busy stretch of it under some policies and the references (first come
first served, EASY, greedy, the shortest job first), and the whole trace under the default policy,
timed, and EASY. Waits are in hours; limits are ``--limits`` times a job's run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from benchmarks.policy_references import Reference, WaitingJob
from phalanx.cluster.policy import QueuePolicy
from phalanx.cluster.units import HOUR_NS
from phalanx.simulate.policies.outcome import PlayedJob, PolicyOutcome, Spread, outcome_of
from phalanx.simulate.policies.study import TraceAsked, asked_trace, study
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.shape import make_fleet, make_policy
from phalanx.simulate.scenario.trace import Trace
from proof.report import report

REFERENCES = ("fifo", "easy", "greedy", "shortest")
NAME = "PHALANX_TRACE"
TIMED_GPUS = 512  # of the fleet whose CPU time is a figure


def reference(kind: str, scenario: Scenario, trace: Trace) -> PolicyOutcome:
    """A textbook scheduler on the same jobs, limits and packing."""
    grace = make_policy(scenario).queue.grace_ns / 1e9
    start = scenario.restart.start_seconds + scenario.restart.form_seconds
    jobs = []
    for number, (at_ns, spec) in enumerate(trace.jobs, start=1):
        run = spec.expected.steps * spec.expected.step_ns / 1e9
        played = PlayedJob(spec.team, spec.gang.gpus(spec.gang.replicas), at_ns / 1e9, run, [])
        limit = spec.time_limit_ns / 1e9
        bound = limit + grace if limit else float("inf")
        jobs.append(WaitingJob(number, played, spec, run + start, bound))
    backfill = {"fifo": "none", "easy": "easy"}.get(kind, "greedy")
    order = _length if kind == "shortest" else _arrival
    Reference(make_fleet(scenario), order, backfill).run(jobs)
    return outcome_of([job.played for job in jobs], scenario.fleet.gpus)


def _length(job: WaitingJob) -> float:
    return job.hold


def _arrival(job: WaitingJob) -> float:
    return job.played.submit


def show(name: str, found: PolicyOutcome) -> None:
    waits = found.wait_hours
    print(
        f"  {name:14}{waits.mean:9.3f}{waits.p50:9.3f}{waits.p95:9.3f}{waits.p99:9.3f}"
        f"{waits.longest:9.2f}{found.completion_hours.mean:12.3f}{found.finish_ratio.mean:9.2f}"
    )


def compare(
    asked: TraceAsked, names: list[str], references: Sequence[str]
) -> tuple[dict[str, PolicyOutcome], float]:
    """Policies of the core and the references side by side; CPU seconds of the default one."""
    scenario, trace = asked_trace(asked)
    print(f"\n{len(trace.jobs):,} jobs on {asked.gpus} GPUs, hours", flush=True)
    headings = ("wait", "p50", "p95", "p99", "longest")
    print(f"  {'':14}{''.join(f'{one:>9}' for one in headings)}{'completion':>12}{'ratio':>9}")
    found = {one: reference(one, scenario, trace) for one in references}
    for one, outcome in found.items():
        show(f"ref {one}", outcome)
    seconds = 0.0
    for result in study(scenario, trace, names).policies:
        assert not result.violations, result.violations[:3]
        show(result.name, result.outcome)
        found[f"core {result.name}"] = result.outcome
        if result.name == "default":
            seconds = result.cpu_seconds
            rate = result.decisions_per_second
            print(f"  default: {seconds:.1f} s of CPU time, {rate:,.0f} starts/s", flush=True)
    return found, seconds


def against_easy(ours: Spread, easy: Spread) -> dict[str, float]:
    """Waits (hours) under the default policy as parts of those under EASY backfill.

    The policy lets short jobs overtake a job for so long, and then gives it a firm promise: of the
    longest wait, what comes after that counts.
    """
    overtaken = QueuePolicy().starving_ns / HOUR_NS
    pairs = {"mean_wait": (ours.mean, easy.mean), "p95_wait": (ours.p95, easy.p95)}
    pairs["longest_wait"] = (max(0.0, ours.longest - overtaken), easy.longest)
    pairs["longest_of_easy"] = (ours.longest, easy.longest)
    return {name: mine / theirs if theirs else 0.0 for name, (mine, theirs) in pairs.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default=os.environ.get(NAME, ""), help=f"default: ${NAME}")
    parser.add_argument("--gpus", type=int, nargs="+", default=[400, 512, 560])
    parser.add_argument("--skip", type=int, default=20_000, help="jobs before the busy stretch")
    parser.add_argument("--jobs", type=int, default=5_000, help="of the busy stretch; 0: no such")
    parser.add_argument("--limits", type=float, default=1.0)
    parser.add_argument("--policies", nargs="+", default=["default", "easy"])
    parser.add_argument("--stretch-only", action="store_true", help="not the whole trace")
    asked = parser.parse_args()
    if not asked.trace or not Path(asked.trace).is_file():
        given = f"{asked.trace} is no file" if asked.trace else "no trace is given"
        print(f"{given}: name one with --trace FILE or {NAME}; nothing was measured")
        return 2
    figures: dict[str, float] = {}

    def worst(more: dict[str, float]) -> None:
        figures.update({name: max(value, figures.get(name, 0.0)) for name, value in more.items()})

    for gpus in asked.gpus:
        whole = TraceAsked(file=asked.trace, gpus=gpus, limit_factor=asked.limits)
        if asked.jobs:
            part = structs.replace(whole, skip=asked.skip, jobs=asked.jobs)
            found, _ = compare(part, asked.policies, REFERENCES)
            worst(against_easy(found["core default"].wait_hours, found["easy"].wait_hours))
        if not asked.stretch_only:
            found, seconds = compare(whole, ["default"], ["easy"])
            worst(against_easy(found["core default"].wait_hours, found["easy"].wait_hours))
            figures["jobs"] = found["core default"].jobs
            if gpus == TIMED_GPUS:
                figures["whole_seconds"] = seconds
    return report("policies", figures)


if __name__ == "__main__":
    sys.exit(main())
