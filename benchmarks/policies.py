"""Queue policies on a recorded trace, against textbook schedulers on the same packing.

``--trace FILE`` (or PHALANX_TRACE) names the trace; Philly's 30,000 jobs are what the bars are for.
Two parts: the whole trace through the core, timed; and a busy stretch of it under the default
policy and under the references (first come first served, EASY, greedy, the shortest job first), on
fleets of several sizes. Waits are in hours; limits are ``--limits`` times a job's run.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.policy_references import Reference, WaitingJob
from phalanx.simulate.policies.outcome import PlayedJob, PolicyOutcome, outcome_of
from phalanx.simulate.policies.study import TraceAsked, asked_trace, study
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.shape import make_fleet, make_policy
from phalanx.simulate.scenario.trace import Trace
from proof.report import report

REFERENCES = ("fifo", "easy", "greedy", "shortest")
NAME = "PHALANX_TRACE"


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


def compare(asked: TraceAsked, names: list[str]) -> dict[str, PolicyOutcome]:
    """Policies of the core and the references side by side."""
    scenario, trace = asked_trace(asked)
    print(f"\n{len(trace.jobs):,} jobs on {asked.gpus} GPUs, hours")
    headings = ("wait", "p50", "p95", "p99", "longest")
    print(f"  {'':14}{''.join(f'{one:>9}' for one in headings)}{'completion':>12}{'ratio':>9}")
    found = {one: reference(one, scenario, trace) for one in REFERENCES}
    played = study(scenario, trace, names).policies
    for one, outcome in found.items():
        show(f"ref {one}", outcome)
    for result in played:
        assert not result.violations, result.violations[:3]
        show(result.name, result.outcome)
    return found | {f"core {result.name}": result.outcome for result in played}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", default=os.environ.get(NAME, ""), help=f"default: ${NAME}")
    parser.add_argument("--gpus", type=int, nargs="+", default=[400, 512, 560])
    parser.add_argument("--skip", type=int, default=20_000, help="jobs before the busy stretch")
    parser.add_argument("--jobs", type=int, default=5_000, help="jobs of the busy stretch")
    parser.add_argument("--limits", type=float, default=1.0)
    parser.add_argument("--policies", nargs="+", default=["default", "easy"])
    parser.add_argument("--whole", type=int, default=512, help="GPUs for the whole trace; 0: none")
    asked = parser.parse_args()
    if not asked.trace or not Path(asked.trace).is_file():
        given = f"{asked.trace} is no file" if asked.trace else "no trace is given"
        print(f"{given}: name one with --trace FILE or {NAME}; nothing was measured")
        return 2
    figures: dict[str, float] = {}
    mean, p95, longest = [], [], []
    for gpus in asked.gpus:
        part = TraceAsked(
            file=asked.trace,
            gpus=gpus,
            skip=asked.skip,
            jobs=asked.jobs,
            limit_factor=asked.limits,
        )
        found = compare(part, asked.policies)
        ours, easy = found["core default"].wait_hours, found["easy"].wait_hours
        mean.append(ours.mean / easy.mean if easy.mean else 0.0)
        p95.append(ours.p95 / easy.p95 if easy.p95 else 0.0)
        longest.append(ours.longest)
    figures |= {"mean_wait": max(mean), "p95_wait": max(p95), "longest_hours": max(longest)}
    if asked.whole:
        whole = TraceAsked(file=asked.trace, gpus=asked.whole, limit_factor=asked.limits)
        (result,) = study(*asked_trace(whole), ["default"]).policies
        rate, seconds = result.decisions_per_second, result.cpu_seconds
        print(f"\nwhole trace: {result.outcome.jobs:,} jobs in {seconds:.1f} s, {rate:,.0f}/s")
        figures |= {"whole_seconds": seconds, "jobs": result.outcome.jobs}
    return report("policies", figures)


if __name__ == "__main__":
    sys.exit(main())
