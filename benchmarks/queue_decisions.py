"""The queue under load: decisions a second on 12,500 nodes with 50,000 jobs waiting.

The fleet is full all the time. Jobs end by chance, the queue is looked at, and what it starts
takes their place; the number of waiting jobs is kept up. Timed is all that the queue does: hooks
and passes, placements included, in CPU seconds of one core. A decision is a started job.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

from benchmarks.placement import SITES, fleet_of
from phalanx.cluster.jobs.job import ClusterJob, GangShape, JobSpec, JobState
from phalanx.cluster.policy import Policy, QueuePolicy, Quota
from phalanx.cluster.queue.decisions import Preempt, QueueState, Resize, Start
from phalanx.cluster.queue.queue import Queue
from phalanx.cluster.state import View
from phalanx.cluster.units import HOUR_NS
from proof.report import report

TEAMS = 40
# GPUs of a job, and how many of a hundred jobs ask for them: mostly small, as on shared clusters.
SIZES = {1: 40, 2: 10, 4: 10, 8: 25, 16: 8, 32: 5, 64: 2}


class Load:
    """A full fleet and a long queue."""

    def __init__(self, nodes: int, pending: int, quotas: bool, seed: int) -> None:
        self.rng = random.Random(seed)
        owned = {f"team-{i}": Quota(gpus=nodes * 8 // TEAMS) for i in range(TEAMS // 2)}
        policy = Policy(queue=QueuePolicy(quotas=owned if quotas else {}))
        self.view = View(fleet_of(SITES[3], nodes), policy)
        self.queue = Queue(QueueState())
        self.wanted = pending
        self.seconds = 0.0
        self.starts = self.asked = 0
        self.passes: list[float] = []

    def submit(self) -> None:
        number = len(self.view.jobs) + 1
        gpus = self.rng.choices(list(SIZES), list(SIZES.values()))[0]
        shape = GangShape(replicas=gpus, slot_gpus=min(8, gpus))
        if gpus > 8:
            shape = GangShape(replicas=gpus // 8, tensor=8, slot_gpus=8)
        spec = JobSpec(
            name="j",
            gang=shape,
            team=f"team-{self.rng.randrange(TEAMS)}",
            priority=self.rng.choice([0, 0, 0, 10]),
            time_limit_ns=self.rng.choice([0, 1, 4, 24]) * HOUR_NS,
        )
        job = ClusterJob(
            id=number, spec=spec, submitted_ns=self.view.now_ns, queued_ns=self.view.now_ns
        )
        self.view.jobs[number] = job
        self.view.pending[number] = None
        start = time.process_time()
        self.queue.on_pending(self.view, job)
        self.seconds += time.process_time() - start

    def look(self) -> None:
        start = time.process_time()
        found = self.queue.schedule(self.view)
        self.queue.next_wake_ns(self.view)
        self.passes.append(time.process_time() - start)
        self.seconds += self.passes[-1]
        for decision in found:
            job = self.view.jobs[decision.job]
            if isinstance(decision, Start):
                del self.view.pending[job.id]
                self.view.active[job.id] = None
                job.placement, job.started_ns = decision.placement, self.view.now_ns
                job.state = JobState.RUNNING
                self.starts += 1
            elif isinstance(decision, Preempt | Resize):
                self.asked += 1
                if isinstance(decision, Preempt):
                    self.end(job.id)

    def end(self, number: int) -> None:
        job = self.view.jobs[number]
        assert job.placement is not None
        start = time.process_time()
        for node in job.placement.nodes:
            self.view.fleet.release(number, node)
        job.placement, job.state = None, JobState.DONE
        del self.view.active[number]
        self.queue.on_stopped(self.view, job)
        self.seconds += time.process_time() - start

    def fill(self) -> None:
        while len(self.view.pending) < self.wanted:
            self.submit()

    def run(self, seconds: float, ends: int) -> tuple[float, float]:
        """(decisions a second, median milliseconds of a pass) while ``ends`` jobs end at a time."""
        while True:  # until the fleet is full
            self.fill()
            before = self.starts
            self.look()
            if self.starts == before:
                break
        self.seconds, self.starts, self.passes = 0.0, 0, []
        while self.seconds < seconds:
            self.view.now_ns += 100_000_000
            for number in self.rng.sample(list(self.view.active), ends):
                if number in self.view.active:
                    self.end(number)
            self.look()
            self.fill()
        return self.starts / self.seconds, 1e3 * statistics.median(self.passes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=12_500)
    parser.add_argument("--pending", type=int, default=50_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="of the queue, for each row")
    parser.add_argument("--out", type=Path, default=Path("runs/queue.json"))
    asked = parser.parse_args()
    rows = []
    print(f"{'':28}{'decisions/s':>12}{'ms a pass':>11}")
    for name, quotas in (("no quotas", False), ("half of the teams own", True)):
        for ends in (200, 20, 1):
            load = Load(asked.nodes, asked.pending, quotas, seed=1)
            rate, pass_ms = load.run(asked.seconds, ends)
            print(f"{name}, {ends} end at a time".ljust(40)[:40], f"{rate:8.0f} {pass_ms:9.2f}")
            rows.append({"quotas": quotas, "ends": ends, "rate": rate, "pass_ms": pass_ms})
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(rows))
    plain, owned = (row["rate"] for row in rows if row["ends"] == 200)
    figures = {"decisions_per_second": plain, "decisions_per_second_quotas": owned}
    return report("queue", figures)


if __name__ == "__main__":
    sys.exit(main())
