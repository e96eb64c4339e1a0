"""Which jobs come: one giant, a generated mix of teams, or a recorded trace."""

from __future__ import annotations

import math
from collections.abc import Iterator

from msgspec import Struct

from phalanx.cluster.jobs.job import JobSpec
from phalanx.config.errors import ConfigError
from phalanx.simulate.draws import DrawStream, SeedDraws
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.shape import big_job, expected_of, gang, limit_ns, ns
from phalanx.simulate.scenario.trace import Trace, recorded

Submission = tuple[int, JobSpec]
USER_ERROR = "user-error-at:"  # payload of a job that its user wrote wrong

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
# scattered, large ones run for hours to days. All jobs together have a median of 8 minutes and a
# mean of an hour and a half. Hu et al. give 2 minutes as the median of Acme, 1.7 to 7.2 times less
# than that of other clusters (Philly's is the longest), whose means were 2.7 to 12.8 times its own.
LENGTHS = ((4, 300.0, 2.2), (32, 1200.0, 1.9), (256, 7200.0, 1.5), (1 << 40, 36000.0, 1.1))
LONGEST_SECONDS = 14 * 86400.0
NIGHT_SHARE = 0.4  # of the submissions of a busy hour, at the quietest one
WEEKEND_SHARE = 0.6
DAY_SECONDS = 86400.0
CLOSE = 0.005  # of the load that was asked for
MOST_TOO_LARGE = 1000  # jobs in a row that would be more than what is left of the load


class WorkloadJob(Struct, frozen=True):
    """A job of the mix."""

    time: float  # seconds; before the beginning: it is under way then
    gpus: int
    length: float
    ends: float  # after these seconds, by its end or its user's mistake
    luck: DrawStream

    def work(self, end: float) -> float:
        """GPU-seconds that it asks for between the beginning and the end."""
        return self.gpus * max(0.0, min(self.time + self.ends, end) - max(self.time, 0.0))


def submissions(scenario: Scenario, draws: SeedDraws) -> Trace:
    """Every submission with its time, in order, and what of a recorded trace is left out."""
    workload_kind = scenario.workload.kind
    if workload_kind == "csv":
        return recorded(scenario)
    jobs = [(0, big_job(scenario))] if workload_kind == "one-job" else generated(scenario, draws)
    return Trace(jobs, {})


def generated(scenario: Scenario, draws: SeedDraws) -> list[Submission]:
    """A mix of teams' jobs, as many as give the load, or as come in a day.

    Lengths are as published whatever the load. Jobs that would be under way at the beginning, had
    the fleet run before, are submitted then with what is left of them.
    """
    workload, end = scenario.workload, scenario.days * DAY_SECONDS
    mix = _mix(scenario, draws)
    if workload.jobs_per_day is not None:
        chosen = _by_count(mix, max(1, round(workload.jobs_per_day * scenario.days)), end)
    else:
        chosen = _by_load(mix, workload.utilisation * scenario.fleet.gpus * end, end)
    chosen.sort(key=lambda job: job.time)
    return [
        (ns(max(0.0, job.time)), _spec(scenario, job, number)) for number, job in enumerate(chosen)
    ]


def _mix(scenario: Scenario, draws: SeedDraws) -> Iterator[WorkloadJob]:
    """Jobs without end, each at a time of its own: number i is the same however many come."""
    sizes, end = sizes_of(scenario), scenario.days * DAY_SECONDS
    errors = scenario.workload.user_error_share
    each = draws.stream("jobs")
    number = 0
    while True:
        luck = each.at(number)
        number += 1
        time = luck.between(-LONGEST_SECONDS, end)
        while luck.uniform() >= _activity(time):
            time = luck.between(-LONGEST_SECONDS, end)
        gpus = _size(sizes, luck.uniform())
        length = _length(gpus, luck)
        ends = length * luck.uniform() if luck.chance(errors) else length
        yield WorkloadJob(time, gpus, length, ends, luck)


def _by_count(mix: Iterator[WorkloadJob], count: int, end: float) -> list[WorkloadJob]:
    """So many that come between the beginning and the end, and those under way before."""
    chosen: list[WorkloadJob] = []
    while count:
        job = next(mix)
        count -= job.time >= 0
        if job.work(end):
            chosen.append(job)
    return chosen


def _by_load(mix: Iterator[WorkloadJob], work: float, end: float) -> list[WorkloadJob]:
    """As many as ask for so many GPU-seconds; what would be too much at the end is left out."""
    chosen: list[WorkloadJob] = []
    left, too_large = work, 0
    while left > CLOSE * work and too_large < MOST_TOO_LARGE:
        job = next(mix)
        asked = job.work(end)
        if asked > left:
            too_large += 1
        elif asked:
            chosen.append(job)
            left -= asked
            too_large = 0
    return chosen


def sizes_of(scenario: Scenario) -> list[tuple[int, float]]:
    """Sizes of the mix that the scenario has, with their shares."""
    workload = scenario.workload
    largest = max(workload.least_gpus, int(scenario.fleet.gpus * workload.largest_share))
    sizes = [(gpus, share) for gpus, share in SIZES if workload.least_gpus <= gpus <= largest]
    if not sizes:
        rule = f"no job fits between {workload.least_gpus} and {largest} GPUs"
        raise ConfigError("workload.least_gpus", workload.least_gpus, rule, "lower it")
    return sizes


def load_of(scenario: Scenario) -> float:
    """The load that ``workload.jobs_per_day`` gives: a part of all GPU time."""
    sizes, workload = sizes_of(scenario), scenario.workload
    assert workload.jobs_per_day is not None
    shares = sum(share for _, share in sizes)
    work = sum(gpus * share / shares * _mean_length(gpus) for gpus, share in sizes)
    ran = 1 - workload.user_error_share / 2  # a mistake shows half-way, on average
    return workload.jobs_per_day * work * ran / (scenario.fleet.gpus * DAY_SECONDS)


def _spec(scenario: Scenario, job: WorkloadJob, number: int) -> JobSpec:
    settings, luck, step = scenario.workload, job.luck, scenario.job.step_seconds
    past = max(0.0, -job.time)
    steps = max(1, round((job.length - past) / step))
    fails = max(1, round((job.ends - past) / step)) if job.ends < job.length else 0
    team = luck.below(settings.teams)
    return JobSpec(
        name=f"job-{number}",
        user=f"user-{team}-{luck.below(12)}",
        team=f"team-{team}",
        gang=gang(job.gpus, scenario.fleet.node_gpus),
        expected=expected_of(scenario, steps),
        preemptible=luck.chance(settings.preemptible_share),
        payload=f"{USER_ERROR}{min(fails, steps)}" if fails else "",
        time_limit_ns=limit_ns(scenario, steps),
        requeue_at_limit=True,
    )


def _size(sizes: list[tuple[int, float]], point: float) -> int:
    left = point * sum(share for _, share in sizes)
    for gpus, share in sizes:
        left -= share
        if left < 0:
            return gpus
    return sizes[-1][0]


def _lognormal(gpus: int) -> tuple[float, float]:
    return next((median, sigma) for most, median, sigma in LENGTHS if gpus <= most)


def _length(gpus: int, luck: DrawStream) -> float:
    return min(luck.lognormal(*_lognormal(gpus)), LONGEST_SECONDS)


def _mean_length(gpus: int) -> float:
    """The mean of ``_length``: of a lognormal number that is cut off."""
    median, sigma = _lognormal(gpus)
    cut = math.log(LONGEST_SECONDS / median) / sigma
    whole = median * math.exp(sigma**2 / 2)
    return whole * _normal(cut - sigma) + LONGEST_SECONDS * (1 - _normal(cut))


def _normal(value: float) -> float:
    return (1 + math.erf(value / math.sqrt(2))) / 2


def _activity(seconds: float) -> float:
    """How busy people are, of their busiest: by hour of the day and day of the week."""
    hour = seconds % DAY_SECONDS / 3600
    daily = NIGHT_SHARE + (1 - NIGHT_SHARE) * (0.5 - 0.5 * math.cos(2 * math.pi * (hour - 3) / 24))
    weekend = int(seconds // DAY_SECONDS) % 7 >= 5
    return daily * (WEEKEND_SHARE if weekend else 1.0)
