"""What holds for any queue: promises kept, quotas conserved, nobody starved, caches harmless."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from heapq import heappop
from itertools import combinations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phalanx.cluster.forecast.why import explain
from phalanx.cluster.jobs.job import ClusterJob, Expected, GangShape, JobSpec, Placement
from phalanx.cluster.node import lowest_bits
from phalanx.cluster.placement.request import PlacementRequest, request_of
from phalanx.cluster.policy import Qos, Quota
from phalanx.cluster.queue.decisions import Preempt, Resize, Start
from phalanx.cluster.queue.fairshare import ONE, STEPS, half_to
from phalanx.cluster.queue.index import take
from phalanx.cluster.queue.preemption import choose, lost_gpu_ns
from tests.cluster.fleets import fleet_of
from tests.cluster.site import HOUR, MINUTE, Site, policy_of, shape_of
from tests.examples import examples

FIFO = {"size_weight": 0, "short_weight": 0, "fair_share_weight": 0, "age_weight": 0}
SIZES = [1, 2, 4, 8, 8, 16, 24, 32]


def crowd(site: Site, rng: random.Random, jobs: int, *, exact: bool, **spec: object) -> None:
    """Jobs of any size with limits; ``exact``: they run as long as the limit says."""
    for _ in range(jobs):
        limit = rng.randint(1, 12) * 30 * MINUTE
        run = limit if exact else rng.randint(1, limit)
        site.submit(rng.choice(SIZES), run=run, time_limit_ns=limit, **spec)


@examples(120)
@given(st.integers(0, 2**32))
def test_backfill_never_delays_the_head_of_the_queue(seed: int) -> None:
    starts = []
    for depth in (0, 1000):
        rng = random.Random(seed)
        site = Site(fleet_of(6, leaf=3, pod=6), policy_of(**FIFO, backfill_depth=depth))
        crowd(site, rng, 8, exact=True)
        site.look()
        if depth == 0:
            head = min(site.view.pending, default=None)  # all before it, and nobody else, started
        crowd(site, rng, 25, exact=True)
        site.play(10**6 * HOUR)
        assert len(site.started) == len(site.view.jobs)
        starts.append(site.started)
    if head is not None:
        assert starts[1][head] <= starts[0][head]


@examples(120)
@given(st.integers(0, 2**32), st.booleans())
def test_no_promised_start_is_ever_missed(seed: int, early: bool) -> None:
    rng = random.Random(seed)
    site = Site(fleet_of(6, leaf=3, pod=6), policy_of(**FIFO, reservations=rng.randint(1, 3)))
    crowd(site, rng, 30, exact=not early)
    promised: dict[int, int] = {}
    for _ in range(400):
        site.look()
        for number, promise in site.queue.state.reserved.items():
            promised[number] = min(promise.start_ns, promised.get(number, promise.start_ns))
        if not site.ends:
            break
        site.play(site.ends[0][0])
    assert not site.view.pending
    for number, at in promised.items():
        assert site.started[number] <= at


@examples(60)
@example(0)
@given(st.integers(0, 2**32))
def test_nobody_is_overtaken_by_a_job_that_asks_for_the_same_and_was_promised_nothing(
    seed: int,
) -> None:
    rng = random.Random(seed)
    site = Site(fleet_of(6, leaf=3, pod=6), policy_of(**FIFO, reservations=3))
    limits = {size: rng.randint(1, 12) * 30 * MINUTE for size in SIZES}
    for _ in range(120):
        if len(site.view.jobs) < 60:
            size = rng.choice([8, 16, 24, 32])
            site.submit(size, run=rng.randint(1, limits[size]), time_limit_ns=limits[size])
        promised = dict(site.queue.state.reserved)
        for decision in site.look():
            gang = site.view.jobs[decision.job].spec.gang
            for other in site.view.pending:
                if decision.job not in promised and other < decision.job:
                    assert site.view.jobs[other].spec.gang != gang
        if site.ends and rng.random() < 0.7:
            now = site.view.now_ns = site.ends[0][0]
            while site.ends and site.ends[0][0] <= now:
                site.end(heappop(site.ends)[1])


def mixed(seed: int) -> Site:
    rng = random.Random(seed)
    quotas = {"a": Quota(gpus=24), "b": Quota(gpus=16, ceiling=32), "c": Quota(gpus=8)}
    rules = {"normal": Qos(), "urgent": Qos(priority=20, preempts=True)}
    policy = policy_of(
        quotas=quotas, qos=rules, grace_ns=2 * MINUTE, least_run_ns=10 * MINUTE, replan_ns=MINUTE
    )
    site = Site(fleet_of(8, leaf=4, pod=8), policy)
    if seed % 3 == 0:
        site.reserve("repair", 5 * HOUR, 6 * HOUR, (0, 1))
    for _ in range(30):
        limit = rng.randint(1, 12) * 30 * MINUTE
        gang = shape_of(rng.choice(SIZES))
        if rng.random() < 0.2:
            gang = GangShape(replicas=4, least_replicas=1, tensor=8, slot_gpus=8)
        site.submit(
            gang=gang,
            run=rng.randint(1, limit),
            time_limit_ns=limit if rng.random() < 0.8 else 0,
            team=rng.choice("abcd"),
            qos=rng.choice(["normal", "normal", "urgent"]),
            preemptible=rng.random() < 0.5,
        )
        if rng.random() < 0.3:
            site.play(site.view.now_ns + rng.randint(0, 2 * HOUR))
            check(site)
    return site


def check(site: Site) -> None:
    """Conservation: what is counted is what is held, within ceilings and the fleet."""
    site.queue.sync(site.view)
    held = {team: gpus for team, gpus in site.queue.state.held.items() if gpus}
    assert held == {team: site.held(team) for team in "abcd" if site.held(team)}
    assert site.held("b") <= 32
    used = sum(8 - site.view.fleet.free_mask(node).bit_count() for node in range(8))
    assert used == sum(held.values())
    if site.view.reservations and 5 * HOUR <= site.view.now_ns < 6 * HOUR:
        running = [
            site.view.jobs[job].state for node in (0, 1) for job in site.view.fleet.held[node]
        ]
        assert all(state == "draining" for state in running)


@examples(60)
@example(40455)  # two had promises on the only free nodes, and neither looked at its own
@given(st.integers(0, 2**32))
def test_quotas_and_gpus_are_conserved_and_every_job_ends(seed: int) -> None:
    site = mixed(seed)
    for _ in range(2000):
        if not site.ends and not site.view.pending:
            break
        wake = site.queue.next_wake_ns(site.view)
        times = [site.ends[0][0]] if site.ends else []
        site.play(min([*times, *([wake] if wake else [])], default=site.view.now_ns + HOUR))
        check(site)
    assert not site.view.pending and not site.view.active


@examples(40)
@given(st.integers(0, 2**32))
@example(3256347)  # the first of several jobs that may run for any time was named by chance
def test_a_queue_from_a_snapshot_decides_as_the_one_that_went_on(seed: int) -> None:
    site = mixed(seed)
    for _ in range(12):
        if not site.ends:
            break
        other = site.copy()
        until = site.ends[0][0]
        site.play(until)
        other.play(until)
        assert other.decisions == site.decisions
        assert other.queue.state == site.queue.state
        for number in list(site.view.pending)[:3]:
            mine = explain(site.queue, site.view, number)
            assert mine == explain(other.queue, other.view, number)


@examples(25)
@given(st.integers(0, 2**32))
def test_nobody_starves(seed: int) -> None:
    """However important the others are, a job starts within a bound."""
    rng = random.Random(seed)
    site = Site(fleet_of(4), policy_of(starving_ns=6 * HOUR, age_weight=0))
    poor = site.submit(rng.choice([8, 16, 32]), run=HOUR, time_limit_ns=HOUR, priority=-100)
    for half in range(60):
        site.play(half * 30 * MINUTE)
        for _ in range(rng.randint(2, 6)):
            limit = rng.randint(1, 4) * HOUR
            site.submit(rng.choice(SIZES), run=limit, time_limit_ns=limit, priority=50)
    site.play(40 * HOUR)
    # Promised when it had waited six hours; all that ran then was gone four hours later.
    assert site.started[poor] <= 11 * HOUR


@examples(30)
@given(st.integers(0, 2**32))
def test_reclaim_restores_the_lender(seed: int) -> None:
    rng = random.Random(seed)
    quotas = {"a": Quota(gpus=32), "b": Quota(gpus=32)}
    site = Site(fleet_of(8, leaf=4, pod=8), policy_of(quotas=quotas, grace_ns=5 * MINUTE))
    while True:  # b takes everything, in any pieces
        site.submit(rng.choice([4, 8, 16]), team="b", run=90 * HOUR)
        if not site.look():
            break
    site.view.now_ns += HOUR
    asked = 0
    while asked < 32:
        gpus = rng.choice([size for size in (8, 16, 32) if asked + size <= 32])
        site.submit(gpus, team="a", run=90 * HOUR)
        asked += gpus
    # One after the other: each waits for those whom it asked to leave.
    site.play(site.view.now_ns + 5 * 5 * MINUTE)
    assert site.held("a") == 32
    assert site.held("b") >= 32 - 16  # jobs are not cut: at most one more than the loan


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (2, 5)])
def test_fair_share_converges_to_the_weights(weights: tuple[int, int]) -> None:
    rng = random.Random(1)
    quotas = {
        team: Quota(gpus=0, weight=weight) for team, weight in zip("ab", weights, strict=True)
    }
    rules = {"quotas": quotas, "age_weight": 0, "short_weight": 0, "half_life_ns": 24 * HOUR}
    site = Site(fleet_of(4), policy_of(**rules))
    used = {"a": 0, "b": 0}
    for hour in range(24 * 8):
        site.play(hour * HOUR)
        for team in "ab":  # both always want more than there is
            waiting = sum(site.view.jobs[number].spec.team == team for number in site.view.pending)
            for _ in range(6 - waiting):
                limit = rng.randint(1, 6) * 20 * MINUTE
                site.submit(rng.choice([2, 4, 8]), team=team, run=limit, time_limit_ns=limit)
        site.look()
        if hour >= 24 * 3:
            for team in "ab":
                used[team] += site.held(team)
    share = used["a"] / (used["a"] + used["b"])
    assert share == pytest.approx(weights[0] / sum(weights), abs=0.05)


def running(site: Site, node: int, gpus: int, lost: int) -> ClusterJob:
    """A preemptible job on one node that would lose this much."""
    number = len(site.view.jobs) + 1
    expected = Expected(start_ns=lost, form_ns=0, restore_remote_ns=0, checkpoint_steps=1)
    spec = JobSpec(name="v", gang=shape_of(gpus), expected=expected, preemptible=True)
    job = ClusterJob(id=number, spec=spec, submitted_ns=0, state="running")
    mask = lowest_bits(site.view.fleet.free_mask(node), gpus)
    job.placement = Placement((node,), (mask,))
    take(site.view, job, job.placement)
    site.view.jobs[number] = job
    site.view.active[number] = None
    return job


@examples(150)
@given(st.data())
def test_one_slot_is_freed_at_the_least_possible_loss(data: st.DataObject) -> None:
    site = Site(fleet_of(3))
    jobs = []
    for node in range(3):
        free = 8
        while free and data.draw(st.booleans()):
            gpus = data.draw(st.integers(1, min(free, 7)))
            jobs.append(running(site, node, gpus, data.draw(st.integers(1, 50))))
            free -= gpus
    want = data.draw(st.integers(1, 8))
    asked = request_of(
        ClusterJob(id=99, spec=JobSpec(name="w", gang=shape_of(want)), submitted_ns=0)
    )
    fleet = site.view.fleet
    if any(fleet.free_mask(node).bit_count() >= want for node in range(3)):
        return
    found = choose(site.view, asked, [], jobs)

    def fits(gone: tuple[ClusterJob, ...]) -> bool:
        free = [fleet.free_mask(node).bit_count() for node in range(3)]
        for job in gone:
            assert job.placement is not None
            free[job.placement.nodes[0]] += job.spec.gang.slot_gpus
        return max(free) >= want

    ways = [
        sum(lost_gpu_ns(site.view, job) for job in gone)
        for count in range(1, len(jobs) + 1)
        for gone in combinations(jobs, count)
        if fits(gone)
    ]
    if found is None:
        assert not ways
    else:
        assert sum(offer.lost_gpu_ns for offer in found.offers) == min(ways)


@examples(60)
@given(st.data())
def test_no_victim_of_a_gang_is_needless(data: st.DataObject) -> None:
    site = Site(fleet_of(8, leaf=4, pod=8))
    jobs = []
    for node in range(8):
        losses = data.draw(st.lists(st.integers(1, 50), max_size=2))
        jobs += [running(site, node, 4, lost) for lost in losses]
    want = data.draw(st.integers(2, 8))
    shape = GangShape(replicas=want, tensor=8, slot_gpus=8)
    asked = PlacementRequest(job=99, shape=shape, replicas=want)
    fleet = site.view.fleet
    found = choose(site.view, asked, [], jobs)
    assert found is not None and len(found.nodes) >= want

    def whole(gone: list[int]) -> int:
        return sum(all(job in gone for job in fleet.held[node]) for node in range(8))

    taken = [offer.job for offer in found.offers]
    assert whole(taken) >= want
    if sum(not held for held in fleet.held) < want:
        for job in taken:
            assert whole([other for other in taken if other != job]) < want


def test_decay_is_exact_enough() -> None:
    assert half_to(0) == ONE and half_to(STEPS) == ONE // 2 and half_to(64 * STEPS * 2) == 0
    for steps in range(0, 4 * STEPS, 7):
        assert abs(half_to(steps) / ONE - 0.5 ** (steps / STEPS)) < 1e-9


SCRIPT = """
from tests.cluster.test_queue_properties import mixed
for seed in range(6):
    site = mixed(seed)
    site.play(site.view.now_ns + 10**14)
    print(site.decisions, site.queue.state)
"""


def test_decisions_do_not_depend_on_hashing() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("0", "1")
    ]
    assert found[0] == found[1] and "Preempt" in found[0]


def test_the_mix_makes_every_kind_of_decision() -> None:
    kinds = [type(decision) for seed in range(8) for _, decision in mixed(seed).decisions]
    assert {Start, Preempt, Resize} <= set(kinds)
