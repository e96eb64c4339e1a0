"""What a policy made of a trace: waits, completion, slowdown, fairness, use of the fleet.

Everything is counted from when each job was submitted, held GPUs and ended, whoever scheduled it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush

from msgspec import Struct

HOUR_SECONDS = 3600.0
LEAST_RUN_SECONDS = 10.0  # a shorter run counts as so long in the slowdown, as is usual
SIZES = ((1, "1"), (2, "2-4"), (5, "5-8"), (9, "9+"))  # least GPUs of a class and its name


class PlayedJob(Struct):
    """A job of a trace, and what became of it. Times are seconds since the first submission."""

    team: str
    gpus: int
    submit: float
    run: float  # that it needs
    stays: list[tuple[float, float, int]]  # when it held GPUs: from, to, how many
    end: float = -1.0  # -1: it had not ended when the simulation did
    preempted: list[int] = []  # which of its stays others made it leave

    @property
    def completion(self) -> float:
        """From submission to end."""
        return self.end - self.submit

    @property
    def wait(self) -> float:
        """All time that it was without GPUs."""
        return self.completion - sum(last - first for first, last, _ in self.stays)


class Spread(Struct, frozen=True):
    """A quantity over many jobs."""

    mean: float
    p50: float
    p95: float
    p99: float
    longest: float


class GroupOutcome(Struct, frozen=True):
    """The jobs of one size or team."""

    jobs: int
    wait_hours: Spread
    completion_hours: Spread
    finish_ratio: float  # mean


class PolicyOutcome(Struct, frozen=True, kw_only=True):
    """One policy on one trace."""

    jobs: int
    unfinished: int  # jobs that had not ended
    wait_hours: Spread
    completion_hours: Spread
    slowdown: Spread  # completion over run, at least 1; runs below 10 s count as 10 s
    # Completion over what it would be if all jobs in the system progressed at one rate, as many
    # GPUs as there are shared among what they ask for. Above 1: others gained at its cost.
    finish_ratio: Spread
    worst_team_ratio: float  # mean of the team that fares worst
    utilisation: float  # GPU time held, of all between first and last submission
    fragmentation: float  # GPU time free although a job waited that asks for no more, of the same
    preempted_gpu_hours: float  # of stays that others ended
    by_size: dict[str, GroupOutcome]
    by_team: dict[str, GroupOutcome]


def outcome_of(jobs: Sequence[PlayedJob], gpus: int) -> PolicyOutcome:
    """The figures of jobs that shared so many GPUs."""
    ended = [job for job in jobs if job.end >= 0]
    fair = dict(zip(map(id, jobs), fluid_ends(jobs, gpus), strict=True))
    ratio = {id(job): job.completion / max(1e-9, fair[id(job)] - job.submit) for job in ended}
    sizes = _grouped(ended, lambda job: size_name(job.gpus), ratio)
    teams = _grouped(ended, lambda job: job.team, ratio)
    used, scattered = shares(jobs, gpus)
    return PolicyOutcome(
        jobs=len(jobs),
        unfinished=len(jobs) - len(ended),
        wait_hours=spread(job.wait / HOUR_SECONDS for job in ended),
        completion_hours=spread(job.completion / HOUR_SECONDS for job in ended),
        slowdown=spread(
            max(1.0, job.completion / max(job.run, LEAST_RUN_SECONDS)) for job in ended
        ),
        finish_ratio=spread(ratio.values()),
        worst_team_ratio=max((group.finish_ratio for group in teams.values()), default=0.0),
        utilisation=used,
        fragmentation=scattered,
        preempted_gpu_hours=sum(
            (job.stays[one][1] - job.stays[one][0]) * job.stays[one][2]
            for job in jobs
            for one in job.preempted
        )
        / HOUR_SECONDS,
        by_size={name: sizes[name] for _, name in SIZES if name in sizes},
        by_team=dict(sorted(teams.items(), key=lambda entry: -entry[1].jobs)),
    )


def spread(values: Iterable[float]) -> Spread:
    """Mean, percentiles (the nearest rank) and the longest."""
    ordered = sorted(values)
    if not ordered:
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)

    def rank(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    mean = math.fsum(ordered) / len(ordered)
    return Spread(mean, rank(0.5), rank(0.95), rank(0.99), ordered[-1])


def size_name(gpus: int) -> str:
    """The class of sizes that a job belongs to."""
    return next(name for least, name in reversed(SIZES) if gpus >= least)


def _grouped(
    jobs: Sequence[PlayedJob], key: Callable[[PlayedJob], str], ratio: dict[int, float]
) -> dict[str, GroupOutcome]:
    groups: dict[str, list[PlayedJob]] = {}
    for job in jobs:
        groups.setdefault(key(job), []).append(job)
    return {
        name: GroupOutcome(
            len(members),
            spread(job.wait / HOUR_SECONDS for job in members),
            spread(job.completion / HOUR_SECONDS for job in members),
            sum(ratio[id(job)] for job in members) / len(members),
        )
        for name, members in groups.items()
    }


def fluid_ends(jobs: Sequence[PlayedJob], gpus: int) -> list[float]:
    """When each job would end if all progressed at one rate: GPUs over what is asked for, or 1.

    Nobody is ahead of anybody in it, so it is what finish times are compared with. All progress
    alike, so a job ends when what has been done of every job grew by its run.
    """
    arrivals = sorted(range(len(jobs)), key=lambda index: jobs[index].submit)
    ends = [0.0] * len(jobs)
    active: list[tuple[float, int]] = []  # progress at which it ends, job
    now = done = 0.0
    asked = position = 0
    while position < len(arrivals) or active:
        rate = min(1.0, gpus / asked) if asked else 1.0
        until = jobs[arrivals[position]].submit if position < len(arrivals) else math.inf
        if active and now + (active[0][0] - done) / rate <= until:
            goal, index = heappop(active)
            now, done = now + (goal - done) / rate, goal
            asked -= jobs[index].gpus
            ends[index] = now
            continue
        done, now = done + (until - now) * rate, until
        index = arrivals[position]
        position += 1
        asked += jobs[index].gpus
        heappush(active, (done + jobs[index].run, index))
    return ends


def shares(jobs: Sequence[PlayedJob], gpus: int) -> tuple[float, float]:
    """(GPU time held, GPU time free although a waiting job asks for no more), as shares.

    Both between the first and the last submission: what is left when nobody comes any more says
    nothing about a policy.
    """
    first, last = min(job.submit for job in jobs), max(job.submit for job in jobs)
    moves: list[tuple[float, int, int, int]] = []  # when, held, waiting, of which size
    for job in jobs:
        since = job.submit
        for start, stop, count in job.stays:
            moves += [(since, 0, 1, job.gpus), (start, count, -1, job.gpus), (stop, -count, 0, 0)]
            since = stop
        if job.end < 0:
            moves.append((since, 0, 1, job.gpus))
    moves.sort(key=lambda move: move[0])
    held_gpus, used, wasted, at = 0, 0.0, 0.0, first
    waiting: dict[int, int] = {}
    for when, more, queued, size in moves:
        until = min(when, last)
        if until > at:
            used += held_gpus * (until - at)
            if any(count and asked <= gpus - held_gpus for asked, count in waiting.items()):
                wasted += (gpus - held_gpus) * (until - at)
            at = until
        held_gpus += more
        if queued:
            waiting[size] = waiting.get(size, 0) + queued
    whole = gpus * (last - first)
    return (used / whole, wasted / whole) if whole else (0.0, 0.0)
