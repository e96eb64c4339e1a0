"""Guests on what other teams own: sent away when the owners come, but never for ever."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cluster.core import Core
from phalanx.cluster.forecast.why import explain
from phalanx.cluster.jobs.job import ClusterJob, JobSpec
from phalanx.cluster.policy import Qos, QueuePolicy, Quota
from phalanx.cluster.protocol.events import GangDrained, Hold, JobFinished, Requeue
from phalanx.cluster.queue.claims import stays_until_ns
from phalanx.cluster.queue.decisions import Preempt
from tests.cluster.drive import SECOND, Drive
from tests.cluster.fleets import fleet_of
from tests.cluster.site import HOUR, MINUTE, Site, policy_of

STAY = 8 * HOUR
RULES = {
    "quotas": {"owner": Quota(gpus=32), "guest": Quota(gpus=32)},
    "grace_ns": MINUTE,
    "least_run_ns": 10 * MINUTE,
    "most_stay_ns": STAY,
    "replan_ns": MINUTE,
    "starving_ns": 24 * HOUR,
}
DOUBLED = 6  # 10 minutes doubled so often are more than STAY


def sent_away(site: Site, job: int) -> list[int]:
    """When a job was told to leave."""
    told = [(at, one) for at, one in site.decisions if isinstance(one, Preempt)]
    return [at for at, one in told if one.job == job]


def busy_owner(site: Site, rng: random.Random, until: int) -> list[int]:
    """The owner asks for what it owns, again and again, for a while each time."""
    jobs: list[int] = []
    while site.view.now_ns < until:
        run = rng.randint(1, 6) * 10 * MINUTE
        jobs.append(site.submit(32, team="owner", run=run, time_limit_ns=run))
        site.play(site.view.now_ns + rng.randint(1, 12) * 10 * MINUTE)
    return jobs


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_a_borrower_is_sent_away_a_bounded_number_of_times_and_ends(seed: int) -> None:
    rng = random.Random(seed)
    site = Site(fleet_of(8, leaf=4, pod=8), policy_of(**RULES))
    length = 30 * HOUR
    borrower = site.submit(64, team="guest", run=length, time_limit_ns=2 * length)
    site.play(0)
    owners = busy_owner(site, rng, 14 * 24 * HOUR)
    site.play(site.view.now_ns + 100 * HOUR)
    assert site.view.jobs[borrower].state == "done"
    assert len(sent_away(site, borrower)) <= DOUBLED + length // STAY
    # And the owner gets what it owns: all its jobs run, each after the borrower's stay at the most
    # (they queue up behind each other meanwhile, an hour each).
    assert all(site.view.jobs[number].state == "done" for number in owners)
    first = min(owners, key=lambda number: site.view.jobs[number].submitted_ns)
    assert site.started[first] <= 10 * MINUTE + 2 * MINUTE


def test_each_time_it_is_sent_away_a_borrower_may_stay_twice_as_long() -> None:
    site = Site(fleet_of(8, leaf=4, pod=8), policy_of(**RULES))
    borrower = site.view.jobs[site.submit(64, team="guest", run=1000 * HOUR)]
    site.play(0)
    stays = []
    for _ in range(8):
        while borrower.placement is None:
            site.play(site.view.now_ns + MINUTE)
        started = borrower.started_ns
        site.submit(32, team="owner", run=10 * MINUTE, time_limit_ns=10 * MINUTE)
        while borrower.state == "running":
            site.play(site.view.now_ns + MINUTE)
        stays.append((sent_away(site, borrower.id)[-1] - started) // MINUTE)
        site.play(site.view.now_ns + 5 * MINUTE)
    assert stays == [10, 20, 40, 80, 160, 320, 480, 480]  # and never longer than STAY


def test_owners_turn_to_borrowers_that_were_not_sent_away_yet() -> None:
    site = Site(fleet_of(8, leaf=4, pod=8), policy_of(**RULES))
    old = site.submit(32, team="third", run=1000 * HOUR)
    site.view.jobs[old].preemptions = 3
    site.play(0)
    new = site.submit(32, team="fourth", run=1000 * HOUR)
    site.play(30 * MINUTE)
    site.submit(32, team="owner", run=HOUR)
    site.play(40 * MINUTE)
    assert sent_away(site, new) and not sent_away(site, old)


def test_a_job_that_starved_has_the_whole_stay_at_once() -> None:
    policy = QueuePolicy(least_run_ns=10, most_stay_ns=1000, starving_ns=500)
    spec = JobSpec(name="j")
    for waited, times, stay in ((0, 0, 10), (499, 2, 40), (500, 0, 1000), (0, 90, 1000)):
        job = ClusterJob(
            id=1, spec=spec, submitted_ns=0, started_ns=7, waited_ns=waited, preemptions=times
        )
        assert stays_until_ns(policy, job) == 7 + stay
    short = QueuePolicy(least_run_ns=10, most_stay_ns=0)
    assert stays_until_ns(short, job) == 7 + 10  # a site may do without


IDLE = {**RULES, "quotas": {"owner": Quota(gpus=64)}}  # and nobody of that team has work


def test_borrowers_take_turns() -> None:
    site = Site(fleet_of(8, leaf=4, pod=8), policy_of(**IDLE))
    site.submit(64, team="first", run=500 * HOUR)
    site.play(0)
    second = site.submit(64, team="second", run=100 * HOUR)
    short = site.submit(64, team="third", run=HOUR)
    site.play(24 * HOUR + 5 * MINUTE)
    assert site.started[second] <= 24 * HOUR + 2 * MINUTE
    told = [one.reason for _, one in site.decisions if isinstance(one, Preempt)]
    assert [one.code for one in told] == ["turn"] and "has waited 1 d" in str(told[0])
    assert "borrowers take turns" in str(told[0])
    # It has not run yet, so it comes before the first one, which has waited as long by then.
    site.play(40 * HOUR)
    assert site.started[short] <= 24 * HOUR + STAY + 5 * MINUTE
    assert site.view.jobs[short].state == "done"


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_many_borrowers_all_start_within_a_round(seed: int) -> None:
    rng = random.Random(seed)
    site = Site(fleet_of(8, leaf=4, pod=8), policy_of(**IDLE))
    borrowers = []
    for number in range(6):
        run = rng.choice((1, 5, 40, 200)) * HOUR
        borrowers.append(site.submit(64, team=f"team-{number}", run=run, time_limit_ns=2 * run))
        site.play(site.view.now_ns + rng.randint(0, 5) * HOUR)
    site.play(site.view.now_ns + 24 * HOUR + 6 * (STAY + 5 * MINUTE))
    for borrower in borrowers:
        waited = site.started[borrower] - site.view.jobs[borrower].submitted_ns
        assert waited <= 24 * HOUR + 6 * (STAY + 5 * MINUTE)


def test_without_quotas_there_are_no_borrowers_to_be_sent_away() -> None:
    site = Site(fleet_of(1), policy_of(starving_ns=HOUR))
    runs = site.submit(8, run=100 * HOUR)
    site.play(0)
    site.submit(8, run=HOUR)
    site.play(10 * HOUR)
    assert not sent_away(site, runs)


def test_an_urgent_class_waits_for_the_stay_of_those_it_sent_away() -> None:
    rules = {"normal": Qos(), "urgent": Qos(priority=10, preempts=True)}
    plain = {"least_run_ns": 10 * MINUTE, "most_stay_ns": 30 * MINUTE, "replan_ns": MINUTE}
    site = Site(fleet_of(1), policy_of(qos=rules, **plain))
    victim = site.submit(8, run=100 * HOUR, preemptible=True)
    site.play(0)
    for _ in range(5):
        site.submit(8, run=MINUTE, time_limit_ns=MINUTE, qos="urgent")
        site.play(site.view.now_ns + HOUR)
    assert len(sent_away(site, victim)) == 5
    site.submit(8, run=MINUTE, time_limit_ns=MINUTE, qos="urgent")
    site.play(site.view.now_ns)  # it has run for long: leaves at once
    site.play(site.view.now_ns + 2 * MINUTE)
    site.submit(8, run=MINUTE, time_limit_ns=MINUTE, qos="urgent")
    site.play(site.view.now_ns + 20 * MINUTE)
    assert len(sent_away(site, victim)) == 6
    site.play(site.view.now_ns + 10 * MINUTE)
    assert len(sent_away(site, victim)) == 7


def test_why_tells_an_owner_how_long_the_borrowers_may_stay() -> None:
    site = Site(fleet_of(8, leaf=4, pod=8), policy_of(**RULES))
    borrower = site.submit(64, team="guest", run=1000 * HOUR)
    site.view.jobs[borrower].preemptions = 3  # 80 minutes
    site.play(0)
    site.view.now_ns = 20 * MINUTE
    owner = site.submit(32, team="owner", run=HOUR)
    site.look()
    told = str(explain(site.queue, site.view, owner).reason)
    assert "run on what team owner lent: 1" in told and "can be asked to leave in 1 h" in told
    site.play(80 * MINUTE + MINUTE // 2)
    assert "asked to leave for it" in str(explain(site.queue, site.view, owner).reason)


def test_a_job_that_was_sent_away_has_waited_as_long_as_before() -> None:
    drive = Drive(2)
    first = drive.running()
    job = drive.submit()
    drive.wait(HOUR)
    drive.tell(JobFinished(job=first.id, generation=first.generation, step=first.step))
    drive.wait(SECOND)
    assert job.state == "forming" and job.waited_ns >= HOUR
    drive.run(job)
    drive.tell(Requeue(job=job.id, hold=True))
    drive.tell(GangDrained(job=job.id, generation=job.generation, step=job.step), SECOND)
    drive.wait(HOUR)  # a person keeps it out: that is no waiting
    drive.running()  # and somebody else has the nodes
    drive.tell(Hold(job=job.id, held=False))
    assert HOUR <= job.waited_ns < HOUR + MINUTE and job.queued_ns == drive.now_ns
    drive.wait(HOUR)
    drive.tell(Hold(job=job.id))
    drive.wait(HOUR)
    drive.tell(Hold(job=job.id, held=False))
    assert 2 * HOUR <= job.waited_ns < 2 * HOUR + MINUTE
    assert Core.restore(drive.core.snapshot()).snapshot() == drive.core.snapshot()


def test_a_job_that_ran_to_its_own_limit_waits_like_a_new_one() -> None:
    drive = Drive(2)
    first = drive.running()
    job = drive.submit(time_limit_ns=HOUR, requeue_at_limit=True)
    drive.wait(HOUR)
    drive.tell(JobFinished(job=first.id, generation=first.generation, step=first.step))
    drive.wait(SECOND)
    drive.run(job)
    drive.submit()
    drive.wait(job.started_ns + HOUR + SECOND - drive.now_ns)
    fact = GangDrained(job=job.id, generation=job.generation, step=job.step, durable=True)
    drive.tell(fact, SECOND)
    assert job.state == "pending" and job.waited_ns == 0
