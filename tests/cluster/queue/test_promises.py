"""Promises to jobs that shorter ones overtake: after which time, and before whom."""

from __future__ import annotations

from phalanx.cluster.policy import Quota
from phalanx.cluster.queue.promises import firm_after_ns
from tests.cluster.fleets import fleet_of
from tests.cluster.site import HOUR, MINUTE, Site, policy_of

DAY = 24 * HOUR


def overtaken_job(hours: int = 20, **policy: object) -> tuple[Site, int]:
    """A job of both nodes, behind a stream of shorter ones that never leaves both free at once."""
    rules = {"firm_after_ns": 2 * HOUR, "fair_share_weight": 0, "age_weight": 0, **policy}
    site = Site(fleet_of(2), policy_of(**rules))
    site.submit(8, run=HOUR, time_limit_ns=HOUR)
    long = site.submit(16, run=2 * HOUR, time_limit_ns=2 * HOUR)
    for half in range(2 * hours):
        site.play(half * HOUR // 2)
        site.view.now_ns = half * HOUR // 2
        site.submit(8, run=55 * MINUTE, time_limit_ns=HOUR)
        site.look()
    return site, long


def test_shorter_jobs_overtake_for_about_as_long_as_the_wait_in_order_of_arrival() -> None:
    site, long = overtaken_job()
    assert 2 * HOUR <= site.started[long] <= 8 * HOUR


def test_unless_a_site_sets_it_they_overtake_until_it_starves() -> None:
    unset = policy_of().queue.firm_after_ns
    site, long = overtaken_job(firm_after_ns=unset, starving_ns=15 * HOUR)
    assert site.started[long] >= 15 * HOUR


def test_where_teams_own_gpus_ownership_orders_until_it_starves() -> None:
    quotas = {"a": Quota(gpus=16)}
    site, long = overtaken_job(quotas=quotas, starving_ns=15 * HOUR)
    assert long not in site.started or site.started[long] >= 15 * HOUR


def test_it_is_so_long_as_all_that_waits_would_fill_the_fleet() -> None:
    site = Site(fleet_of(4), policy_of(firm_after_ns=2 * HOUR))
    waiting = site.queue.waiting
    site.submit(32, run=9 * HOUR, time_limit_ns=9 * HOUR)
    site.look()
    assert firm_after_ns(site.view, waiting) == 2 * HOUR
    jobs = [site.submit(16, time_limit_ns=6 * HOUR) for _ in range(3)]
    assert firm_after_ns(site.view, waiting) == 9 * HOUR
    waiting.remove(jobs[0])
    assert firm_after_ns(site.view, waiting) == 6 * HOUR
    for _ in range(20):
        site.submit(32, time_limit_ns=6 * HOUR)
    assert firm_after_ns(site.view, waiting) == 2 * DAY


def test_a_higher_priority_that_people_gave_still_goes_before() -> None:
    site = Site(fleet_of(2), policy_of(fair_share_weight=0, firm_after_ns=2 * HOUR))
    site.submit(8, run=6 * HOUR, time_limit_ns=6 * HOUR)
    site.look()
    overtaken = site.submit(16, run=HOUR, time_limit_ns=HOUR)
    site.play(3 * HOUR)
    assert site.queue.state.reserved[overtaken].firm
    urgent = site.submit(8, run=9 * HOUR, time_limit_ns=9 * HOUR, priority=5_000)
    site.look()
    assert urgent in site.view.active


def test_nobody_goes_before_a_job_that_starves() -> None:
    site = Site(fleet_of(2), policy_of(fair_share_weight=0, starving_ns=2 * HOUR))
    site.submit(8, run=6 * HOUR, time_limit_ns=6 * HOUR)
    site.look()
    starved = site.submit(16, run=HOUR, time_limit_ns=HOUR)
    site.play(3 * HOUR)
    urgent = site.submit(8, run=9 * HOUR, time_limit_ns=9 * HOUR, priority=5_000)
    site.look()
    assert site.queue.state.reserved[starved].firm and urgent not in site.view.active
