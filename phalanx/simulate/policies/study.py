"""A recorded trace through the core that runs live, under one policy after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.jobs.leave_cause import FOR_OTHERS, LeaveCause
from phalanx.cluster.ledger.report import report
from phalanx.cluster.policy import DAY_NS, QueuePolicy
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import Event
from phalanx.config import ConfigError
from phalanx.simulate.policies.named import policy_named
from phalanx.simulate.policies.outcome import PlayedJob, PolicyOutcome, outcome_of
from phalanx.simulate.scenario.load import scenario_of
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.shape import make_policy, queue_of
from phalanx.simulate.scenario.trace import Trace, played_of
from phalanx.simulate.scenario.trace_file import read_trace
from phalanx.simulate.world.world import World

# Steps of a second, so that runs are as long as recorded; jobs hold GPUs for no other reason than
# their start. It ends when the last job has.
BASE: dict[str, Any] = {
    "name": "trace",
    "about": "the jobs of a recorded trace",
    "days": 3000,
    "job": {"step_seconds": 1.0},
    "checkpoint": {"stall_seconds": 0.0},
    "restart": {"spread": 0.0},
    "workload": {"kind": "csv"},
}
UNREADABLE_TOLD = 10  # rows that a report names
Submissions = list[tuple[int, JobSpec]]


class PolicyResult(Struct, frozen=True, kw_only=True):
    """What one policy gave."""

    name: str
    outcome: PolicyOutcome
    decisions: int  # starts, and orders to leave or shrink
    decisions_per_second: float  # of CPU time, the simulated world included
    cpu_seconds: float
    days: float  # until the last job had ended
    interruptions: int
    goodput: float  # productive share of all GPU time
    refused: int  # jobs that the core did not accept
    violations: list[str]


def failures_of(scenario: Scenario) -> str:
    """What fails: nodes as in a model, or programs alone; "": nothing does."""
    faults = scenario.faults
    if faults.per_1000_node_days != 0 or faults.causes:
        return faults.model
    return "faults.by_job_gpus" if faults.by_job_gpus else ""


class TracedWorld(World):
    """A world that remembers when each job held how many GPUs."""

    def __init__(self, scenario: Scenario, queue: QueuePolicy, seed: int) -> None:
        policy = structs.replace(make_policy(scenario), queue=queue)
        super().__init__(scenario, seed, policy=policy)
        if not failures_of(scenario):
            self.gangs.report_ns = DAY_NS  # nothing is lost, so nobody needs to know earlier
        self.played: dict[int, PlayedJob] = {}
        self.decisions = 0
        self._holding: dict[int, tuple[float, int]] = {}  # by job: since when, how many GPUs

    def _ordered(self, event: Event, commands: list[Command]) -> None:
        super()._ordered(event, commands)
        for number in _jobs_of(event, commands):
            job = self.view.jobs.get(number)
            if job is not None:
                self._look(number)

    def _look(self, number: int) -> None:
        """Writes down what changed of what a job holds."""
        job, now = self.view.jobs[number], self.view.now_ns / 1e9
        gpus = self.view.fleet.job_gpus.get(number, 0)
        since, before = self._holding.get(number, (now, 0))
        if gpus == before and not job.ended:
            return
        played = self.played.get(number)
        if played is None:
            spec = job.spec
            run = spec.expected.steps * spec.expected.step_ns / 1e9
            asked = spec.gang.gpus(spec.gang.replicas)
            played = PlayedJob(spec.team, asked, job.submitted_ns / 1e9, run, [])
            self.played[number] = played
        if gpus != before:
            self.decisions += 1 if gpus else 0
            if before:
                played.stays.append((since, now, before))
                if not gpus and LeaveCause.of(job.why) in FOR_OTHERS:
                    played.preempted.append(len(played.stays) - 1)
            self._holding[number] = (now, gpus)
        if job.ended:
            played.end = job.ended_ns / 1e9


def _jobs_of(event: Event, commands: list[Command]) -> Iterator[int]:
    """Jobs that an event and its commands are about."""
    bodies = (event.body, *(command.body for command in commands))
    yield from dict.fromkeys(
        number for body in bodies if (number := getattr(body, "job", 0)) and isinstance(number, int)
    )


def play(
    name: str, scenario: Scenario, queue: QueuePolicy, jobs: Submissions, seed: int = 0
) -> PolicyResult:
    """The whole trace under one policy, until its last job has ended."""
    began = time.process_time()
    world = TracedWorld(scenario, queue, seed)
    world.run(jobs)
    spent = time.process_time() - began
    fleet = report(world.core.ledger, world.view.policy.price).fleet
    return PolicyResult(
        name=name,
        outcome=outcome_of(list(world.played.values()), scenario.fleet.gpus),
        decisions=world.decisions,
        decisions_per_second=world.decisions / max(spent, 1e-9),
        cpu_seconds=spent,
        days=world.end_ns / DAY_NS,
        interruptions=len(world.record.interruptions),
        goodput=fleet.buckets["productive"] / max(1, fleet.gpu_ns),
        refused=sum(world.record.refused.values()),
        violations=[str(one) for one in world.checks.found],
    )


class StudyReport(Struct, frozen=True, kw_only=True):
    """The document of ``--json``: a trace under several policies."""

    trace: str
    gpus: int
    jobs: int
    limit_factor: float
    left_out: dict[str, int]  # rows of the file that were not played, by reason
    unreadable: list[str]  # "file:line: why", the first of them
    faults: str  # the model of failures; "": nothing fails
    policies: list[PolicyResult]


def study(
    scenario: Scenario,
    trace: Trace,
    names: Sequence[str],
    seed: int = 0,
    done: Callable[[PolicyResult], None] = lambda _: None,
) -> StudyReport:
    """The same jobs, and the same failures, under each policy; ``scenario.queue`` is the base."""
    base = queue_of(scenario.queue, {})
    results = []
    for name in names:
        policy = policy_named(name)
        jobs = [(at, policy.change(spec)) for at, spec in trace.jobs]
        queue = policy.queue(base, [spec for _, spec in jobs], scenario.fleet.gpus)
        results.append(play(name, scenario, queue, jobs, seed))
        done(results[-1])
    return StudyReport(
        trace=scenario.workload.file,
        gpus=scenario.fleet.gpus,
        jobs=len(trace.jobs),
        limit_factor=scenario.workload.limit_factor,
        left_out=trace.left_out,
        unreadable=trace.unreadable[:UNREADABLE_TOLD],
        faults=failures_of(scenario),
        policies=results,
    )


class TraceAsked(Struct, frozen=True, kw_only=True):
    """What a command asks to be played."""

    file: str
    gpus: int
    node_gpus: int = 8
    skip: int = 0  # rows of the file before the first that is played
    jobs: int = 0  # rows that are played; 0: all
    limit_factor: float = 1.0
    faults: str = ""  # a model of failures; "": nothing fails
    overrides: tuple[str, ...] = ()


def asked_trace(asked: TraceAsked) -> tuple[Scenario, Trace]:
    """The world and the jobs of a request; what cannot be is refused."""
    faults = f"faults.model={asked.faults}" if asked.faults else "faults.per_1000_node_days=0"
    scenario = scenario_of(
        BASE,
        [
            f"fleet.gpus={asked.gpus}",
            f"fleet.node_gpus={asked.node_gpus}",
            f"workload.limit_factor={asked.limit_factor}",
            f"workload.file={asked.file}",
            faults,
            *asked.overrides,
        ],
    )
    file = read_trace(Path(asked.file), "FILE")
    if file.jobs and asked.skip >= len(file.jobs):
        rule = f"leaves none of the {len(file.jobs):,} rows of {asked.file}"
        raise ConfigError("skip", str(asked.skip), rule, "skip fewer")
    file.jobs.sort(key=lambda job: (job.submit, job.line))
    file.jobs = file.jobs[asked.skip : asked.skip + asked.jobs if asked.jobs else None]
    return scenario, played_of(scenario, file, "FILE")
