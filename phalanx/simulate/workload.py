"""Which jobs come: one giant, a generated mix of teams, or a recorded trace."""

from __future__ import annotations

import math

from phalanx.cluster.job import JobSpec
from phalanx.config.errors import ConfigError
from phalanx.simulate.draws import Draws, Stream
from phalanx.simulate.gangs import USER_ERROR
from phalanx.simulate.scenario import Scenario
from phalanx.simulate.shape import big_job, expected_of, gang, ns
from phalanx.simulate.trace import Trace, recorded

Submission = tuple[int, JobSpec]

# GPUs of a job and how many of all jobs ask for so many. Acme (Hu et al., NSDI 2024) and Philly
# (Jeon et al., ATC 2019): most jobs are one GPU, and the few large ones use most of the GPU time.
SIZES = (
    (1, 0.52),
    (2, 0.09),
    (4, 0.08),
    (8, 0.17),
    (16, 0.05),
    (32, 0.035),
    (64, 0.025),
    (128, 0.015),
    (256, 0.009),
    (512, 0.004),
    (1024, 0.0015),
    (2048, 0.0005),
)
# Median seconds and sigma of the lognormal length of jobs up to a size: small jobs are short and
# scattered (a median of minutes in Acme and Philly), large ones run for hours to days.
LENGTHS = ((4, 300.0, 2.2), (32, 1200.0, 1.9), (256, 7200.0, 1.5), (1 << 40, 36000.0, 1.1))
LONGEST_SECONDS = 14 * 86400.0
NIGHT_SHARE = 0.4  # of the submissions of a busy hour, at the quietest one
WEEKEND_SHARE = 0.6
DAY_SECONDS = 86400.0


def submissions(scenario: Scenario, draws: Draws) -> Trace:
    """Every submission with its time, in order, and what of a recorded trace is left out."""
    kind = scenario.workload.kind
    if kind == "csv":
        return recorded(scenario)
    jobs = [(0, big_job(scenario))] if kind == "one-job" else generated(scenario, draws)
    return Trace(jobs, {})


def generated(scenario: Scenario, draws: Draws) -> list[Submission]:
    """A mix of teams' jobs; lengths are scaled so that the wanted load comes out."""
    part, fleet = scenario.workload, scenario.fleet
    largest = max(part.least_gpus, int(fleet.gpus * part.largest_share))
    sizes = [(gpus, share) for gpus, share in SIZES if part.least_gpus <= gpus <= largest]
    if not sizes:
        rule = f"no job fits between {part.least_gpus} and {largest} GPUs"
        raise ConfigError("workload.least_gpus", part.least_gpus, rule, "lower it")
    times, each = draws.stream("jobs", "time"), draws.stream("jobs", "each")
    end = scenario.days * DAY_SECONDS
    peak_mean = DAY_SECONDS / (part.jobs_per_day / _mean_activity())
    raw: list[tuple[float, int, float, Stream]] = []
    time = 0.0
    while True:
        time += times.exponential(peak_mean)
        if time >= end:
            break
        if times.uniform() < _activity(time):
            luck = each.at(len(raw))
            gpus = _size(sizes, luck.uniform())
            raw.append((time, gpus, _length(gpus, luck), luck))
    # Medians are published, means are not: the mean follows from the load that is.
    asked = sum(gpus * length for _, gpus, length, _ in raw)
    scale = part.utilisation * fleet.gpus * end / asked if asked else 1.0
    return [
        (ns(time), _spec(scenario, gpus, length * scale, luck, number))
        for number, (time, gpus, length, luck) in enumerate(raw)
    ]


def _spec(scenario: Scenario, gpus: int, seconds: float, luck: Stream, number: int) -> JobSpec:
    part = scenario.workload
    steps = max(1, round(seconds / scenario.job.step_seconds))
    fails = luck.chance(part.user_error_share)
    team = luck.below(part.teams)
    return JobSpec(
        name=f"job-{number}",
        user=f"user-{team}-{luck.below(12)}",
        team=f"team-{team}",
        gang=gang(gpus, scenario.fleet.node_gpus),
        expected=expected_of(scenario, steps),
        preemptible=luck.chance(part.preemptible_share),
        payload=f"{USER_ERROR}{1 + luck.below(steps)}" if fails else "",
        time_limit_ns=_limit_ns(scenario, steps),
        requeue_at_limit=True,
    )


def _limit_ns(scenario: Scenario, steps: int) -> int:
    """The time limit of a job: its user's guess, and time to start."""
    factor, restart = scenario.workload.limit_factor, scenario.restart
    if not factor:
        return 0
    start = restart.seconds or restart.start_seconds + restart.form_seconds
    return ns(factor * steps * scenario.job.step_seconds + 2 * start)


def _size(sizes: list[tuple[int, float]], point: float) -> int:
    left = point * sum(share for _, share in sizes)
    for gpus, share in sizes:
        left -= share
        if left < 0:
            return gpus
    return sizes[-1][0]


def _length(gpus: int, luck: Stream) -> float:
    median, sigma = next((m, s) for most, m, s in LENGTHS if gpus <= most)
    return min(luck.lognormal(median, sigma), LONGEST_SECONDS)


def _activity(seconds: float) -> float:
    """How busy people are, of their busiest: by hour of the day and day of the week."""
    hour = seconds % DAY_SECONDS / 3600
    daily = NIGHT_SHARE + (1 - NIGHT_SHARE) * (0.5 - 0.5 * math.cos(2 * math.pi * (hour - 3) / 24))
    weekend = int(seconds // DAY_SECONDS) % 7 >= 5
    return daily * (WEEKEND_SHARE if weekend else 1.0)


def _mean_activity() -> float:
    hours = range(7 * 24)
    return sum(_activity(hour * 3600.0) for hour in hours) / len(hours)
