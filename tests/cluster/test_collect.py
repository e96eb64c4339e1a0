"""A job that waits and waits gets every node that becomes free, whatever limits others gave."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster.fleets import fleet_of
from tests.cluster.site import HOUR, MINUTE, Site, policy_of

RULES = {"starving_ns": 6 * HOUR, "age_weight": 0, "fair_share_weight": 0}


def crowd(site: Site, rng: random.Random, until: int, limit: int, **spec: object) -> list[int]:
    """Jobs that always want more than there is, and end long before their limits."""
    made = []
    while site.view.now_ns < until:
        for _ in range(4):
            run = rng.randint(1, 12) * 10 * MINUTE
            made.append(site.submit(8, run=run, time_limit_ns=limit, priority=50, **spec))
        site.play(site.view.now_ns + 30 * MINUTE)
    return made


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_generous_limits_of_others_do_not_let_a_job_wait_for_ever(seed: int) -> None:
    rng = random.Random(seed)
    site = Site(fleet_of(4), policy_of(**RULES))
    crowd(site, rng, HOUR, limit=200 * HOUR)
    large = site.submit(32, run=HOUR, time_limit_ns=HOUR, priority=-100)
    crowd(site, rng, 40 * HOUR, limit=200 * HOUR)
    # Twice starving, and then as long as the longest of those that run.
    assert site.started[large] <= HOUR + 12 * HOUR + 2 * HOUR + 30 * MINUTE


def test_one_at_a_time_the_one_that_waited_longest_first() -> None:
    site = Site(fleet_of(4), policy_of(**RULES))
    rng = random.Random(1)
    crowd(site, rng, HOUR, limit=200 * HOUR)
    large = [
        site.submit(32, team=team, run=HOUR, time_limit_ns=HOUR, priority=-100) for team in "abc"
    ]
    crowd(site, rng, 60 * HOUR, limit=200 * HOUR)
    starts = [site.started[number] for number in large]
    assert starts == sorted(starts)
    assert starts[2] <= HOUR + 12 * HOUR + 3 * (3 * HOUR + 30 * MINUTE)


def test_nobody_waits_for_a_job_that_cannot_come() -> None:
    site = Site(fleet_of(4), policy_of(**RULES))
    site.submit(8, run=10**6 * HOUR)  # nobody knows when this one will end
    site.look()
    large = site.submit(32, run=HOUR, time_limit_ns=HOUR, priority=-100)
    crowd(site, random.Random(1), 60 * HOUR, limit=2 * HOUR)
    assert large not in site.started
    assert sum(at > 50 * HOUR for at in site.started.values()) > 10
