"""How good estimated starts are: days of six teams, asked at each submission why the job waits.

The simulated fleet of ``phalanx simulate multi-tenant`` with more work than it can do, and a share
of jobs that wait for other reasons too: teams under a ceiling, a class of service with a limit,
jobs behind others, arrays with a width. Compared is what was said when a job was submitted with
when it first got its nodes. Jobs that had room at once are counted and left out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from benchmarks.queue_decisions import Load
from phalanx.cluster.forecast.why import explain, explainer
from phalanx.cluster.job_relations import Array, Dependency
from phalanx.cluster.jobs.job import ClusterJob, GangShape, JobSpec
from phalanx.cluster.policy import Qos
from phalanx.cluster.protocol.commands import Command, Form
from phalanx.cluster.protocol.events import Event, SetQuota, Submit
from phalanx.cluster.units import HOUR_NS
from phalanx.simulate.draws import SeedDraws
from phalanx.simulate.scenario.load import load_scenario
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.workload import submissions
from phalanx.simulate.world.world import World
from proof.report import report

MINUTE_NS = 60 * 10**9
CEILING_TEAMS = ("team-0", "team-1")
LIMITED = "batch"


class Guess(Struct):
    """What was said of a job at its submission, and what became of it."""

    code: str
    asked_ns: int
    estimate_ns: int | None
    started_ns: int | None = None


class Asking(World):
    """A world in which somebody asks about every job when it is submitted."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        super().__init__(scenario, seed)
        self.guesses: dict[int, Guess] = {}
        self._luck = self.draws.stream("estimates")
        self._last: dict[str, int] = {}  # by user: the last job
        queue = self.view.policy.queue
        qos = {**queue.qos, LIMITED: Qos(most_gpus=scenario.fleet.gpus // 8)}
        self.view.policy = structs.replace(self.view.policy, queue=structs.replace(queue, qos=qos))
        for team in CEILING_TEAMS:
            owned = self.view.quotas[team].gpus if team in self.view.quotas else 0
            limit = SetQuota(team=team, gpus=owned, ceiling=max(owned, scenario.fleet.gpus // 5))
            self.agenda.at(0, self.tell, limit)

    def take_in(self, jobs: list[tuple[int, JobSpec]]) -> None:
        """Plays all of the time; jobs get their other reasons to wait on the way."""
        for time_ns, spec in jobs:
            self.agenda.at(time_ns, self._submit, spec)
        self.run([])

    def _submit(self, spec: JobSpec) -> None:
        chance, small = self._luck.uniform(), spec.gang.gpus(spec.gang.replicas) <= 32
        if chance < 0.15 and spec.user in self._last:
            after = Dependency("afterany", self._last[spec.user])
            if chance < 0.05:
                after = Dependency("singleton")
            spec = structs.replace(spec, after=(after,), name=f"{spec.user}-{after.kind}")
        elif chance < 0.17 and small:
            spec = structs.replace(spec, array=Array(count=8, width=2))
        elif chance < 0.3 and small:
            spec = structs.replace(spec, qos=LIMITED)
        self.tell(Submit(spec=spec))

    def _ordered(self, event: Event, commands: list[Command]) -> None:
        super()._ordered(event, commands)
        if isinstance(event.body, Submit):
            answers = explainer(self.core.queue, self.view)
            for job in reversed(self.view.jobs.values()):
                if job.id in self.guesses:
                    break
                found = answers.of(job.id)
                at_ns = found.estimated_start_ns
                self.guesses[job.id] = Guess(found.reason.code, self.view.now_ns, at_ns)
                self._last[job.spec.user] = job.id
        for command in commands:
            body = command.body
            if isinstance(body, Form) and self.guesses[body.job].started_ns is None:
                self.guesses[body.job].started_ns = self.view.now_ns


def summarised(code: str, guesses: list[Guess]) -> dict[str, Any]:
    """One row: how far off the estimates were, in minutes."""
    known = [each for each in guesses if each.estimate_ns is not None]
    started = [each for each in known if each.started_ns is not None]
    late = [(each.started_ns or 0) - (each.estimate_ns or 0) for each in started]
    waited = [(each.started_ns or 0) - each.asked_ns for each in started]
    off = sorted(abs(each) / MINUTE_NS for each in late)
    return {
        "reason": code,
        "jobs": len(guesses),
        "no_estimate": len(guesses) - len(known),
        "started": len(started),
        "wait_median": statistics.median(waited) / MINUTE_NS if waited else 0.0,
        "off_median": statistics.median(off) if off else 0.0,
        "off_p90": off[int(0.9 * (len(off) - 1))] if off else 0.0,
        "later": sum(each > MINUTE_NS for each in late) / len(late) if late else 0.0,
        "sooner": sum(each < -MINUTE_NS for each in late) / len(late) if late else 0.0,
    }


def chained(load: Load, count: int) -> int:
    """A chain of jobs that wait for one another; the number of the last."""
    jobs, now = load.view.jobs, load.view.now_ns
    last = next(iter(load.view.active))
    for _ in range(count):
        number = len(jobs) + 1
        spec = JobSpec(name="j", gang=GangShape(slot_gpus=1), time_limit_ns=HOUR_NS)
        jobs[number] = ClusterJob(
            id=number, spec=spec, submitted_ns=now, eligible=False, waiting_for={last: None}
        )
        last = number
    return last


def behind_all(load: Load) -> int:
    """One job that waits for every other one that is in the queue."""
    jobs, spec = load.view.jobs, JobSpec(name="j", gang=GangShape(slot_gpus=1))
    number = len(jobs) + 1
    jobs[number] = ClusterJob(
        id=number, spec=spec, submitted_ns=0, eligible=False, waiting_for=dict(load.view.pending)
    )
    return number


def cost() -> None:
    """What questions cost, with 50,000 jobs waiting on 12,500 nodes."""
    load = Load(12_500, 50_000, quotas=True, seed=1)
    started = -1
    while started != load.starts:
        load.fill()
        started = load.starts
        load.look()
    waiting, rng = list(load.view.pending), random.Random(2)
    explain(load.queue, load.view, waiting[0])

    def milliseconds(numbers: list[int]) -> float:
        start = time.process_time()
        answers = explainer(load.queue, load.view)
        for number in numbers:
            answers.of(number)
        return 1e3 * (time.process_time() - start)

    each = [milliseconds([rng.choice(waiting)]) for _ in range(20)]
    print(f"one question                              {statistics.median(each):8.1f} ms")
    for count in (60, 1000):
        page = rng.sample(waiting, count)
        print(f"{count:5} questions of one moment             {milliseconds(page):8.1f} ms")
    print(
        f"behind a chain of 10,000                  {milliseconds([chained(load, 10_000)]):8.1f} ms"
    )
    print(f"behind all 50,000 of the queue            {milliseconds([behind_all(load)]):8.1f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=4.0)
    parser.add_argument("--gpus", type=int, default=512)
    parser.add_argument("--load", type=float, default=1.2, help="of all GPU time, asked for")
    parser.add_argument("--limits", type=float, default=1.5, help="time limits over real lengths")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", action="store_true", help="what a question costs instead")
    parser.add_argument("--out", type=Path, default=Path("runs/estimates.json"))
    asked = parser.parse_args()
    if asked.cost:
        cost()
        return 0
    changes = [
        f"days={asked.days}",
        f"fleet.gpus={asked.gpus}",
        f"workload.utilisation={asked.load}",
        f"workload.limit_factor={asked.limits}",
    ]
    scenario = load_scenario("multi-tenant", changes)
    world = Asking(scenario, asked.seed)
    world.take_in(submissions(scenario, SeedDraws(asked.seed)).jobs)
    by_code: dict[str, list[Guess]] = {}
    for guess in world.guesses.values():
        by_code.setdefault(guess.code, []).append(guess)
    waits = [guess for guess in world.guesses.values() if guess.code != "next_look"]
    rows = [summarised(code, found) for code, found in sorted(by_code.items())]
    rows.append(summarised("all that waited", waits))
    print(f"{'minutes':16} jobs  none  started  waited   off (median, p90)  later  sooner")
    for row in rows:
        print(
            f"{row['reason']:16}{row['jobs']:5}{row['no_estimate']:6}{row['started']:9}"
            f"{row['wait_median']:8.0f}{row['off_median']:12.0f}{row['off_p90']:8.0f}"
            f"{row['later']:7.0%}{row['sooner']:8.0%}"
        )
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(rows))
    assert not any(found for found in world.checks.found)
    everybody = rows[-1]
    figures = {
        "off_median_minutes": everybody["off_median"],
        "later_share": everybody["later"],
    }
    return report("estimates", figures)


if __name__ == "__main__":
    sys.exit(main())
