"""The queue, case by case: order, promises, quotas, windows, preemption, and what `why` says."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.forecast.why import explain
from phalanx.cluster.jobs.feasibility import admit, policy_problems
from phalanx.cluster.jobs.job import Expected, GangShape, JobSpec
from phalanx.cluster.node import Node, NodeState
from phalanx.cluster.policy import (
    FabricPolicy,
    HealthPolicy,
    Partition,
    Policy,
    PricePolicy,
    Qos,
    QueuePolicy,
    Quota,
    RecoveryPolicy,
    SparePolicy,
    StoragePolicy,
    TimeoutPolicy,
)
from phalanx.cluster.queue.decisions import Preempt, Resize, Start
from phalanx.cluster.reasons import reason
from phalanx.cluster.state import View
from phalanx.config import ConfigError
from tests.cluster.fleets import fleet_of
from tests.cluster.site import HOUR, MINUTE, Site, policy_of

FIFO = {"size_weight": 0, "short_weight": 0, "fair_share_weight": 0}


def starts(site: Site) -> list[int]:
    return [decision.job for _, decision in site.decisions if isinstance(decision, Start)]


def test_higher_priority_first_and_equals_by_arrival() -> None:
    site = Site(fleet_of(1), policy_of(**FIFO))
    low, high, later = site.submit(), site.submit(priority=5), site.submit(priority=5)
    site.play(10 * HOUR)
    assert starts(site) == [high, later, low]


def test_shorter_limits_come_first_until_the_others_starve() -> None:
    site = Site(fleet_of(1), policy_of(fair_share_weight=0, starving_ns=3 * HOUR, grace_ns=0))
    site.submit(time_limit_ns=HOUR)
    site.look()
    long, endless = site.submit(time_limit_ns=8 * HOUR), site.submit()
    shorts = [site.submit(time_limit_ns=HOUR) for _ in range(6)]
    site.play(20 * HOUR)
    order = starts(site)[1:]
    assert order[:2] == shorts[:2]
    # Whoever has no limit is last, and nobody waits much longer than the policy says.
    assert order.index(long) < len(order) - 1
    assert max(site.started[endless], site.started[long]) <= 14 * HOUR


def test_priority_is_the_sum_of_its_parts() -> None:
    rules = {"normal": Qos(), "urgent": Qos(priority=70)}
    policy = policy_of(qos=rules, quotas={"a": Quota(gpus=8)}, size_weight=100)
    site = Site(fleet_of(1), policy)
    site.submit()
    site.look()
    waiting = site.submit(priority=3, qos="urgent", team="a", time_limit_ns=4 * MINUTE)
    site.view.now_ns += 24 * HOUR
    found = explain(site.queue, site.view, waiting).priority
    assert found["job"] == 3 and found["qos"] == 70 and found["quota"] == 10_000
    assert found["age"] == 1000 // 7 and 0 < found["fair_share"] <= 1000
    assert found["size"] == 100 * 4 // 17 and found["short"] == 3000 * 15 // 17
    site.look()


def test_age_lets_a_job_overtake_until_it_is_full() -> None:
    site = Site(fleet_of(1), policy_of(**FIFO, age_weight=100, age_full_ns=10 * HOUR))
    site.submit(run=12 * HOUR)
    old = site.submit()
    site.play(9 * HOUR)
    young = site.submit(priority=60)  # and 30 by age when the first one ends
    site.play(30 * HOUR)
    assert starts(site)[1:] == [old, young]


@pytest.mark.parametrize(
    ("limit", "first"), [(HOUR, True), (2 * HOUR, True), (3 * HOUR, False), (0, False)]
)
def test_only_what_ends_in_time_starts_on_promised_nodes(limit: int, first: bool) -> None:
    site = Site(fleet_of(4), policy_of(**FIFO))
    site.submit(16, run=2 * HOUR, time_limit_ns=2 * HOUR)
    head = site.submit(32, time_limit_ns=HOUR)
    behind = site.submit(8, run=HOUR, time_limit_ns=limit)
    site.look()
    assert (behind in site.started) is first
    site.play(10 * HOUR)
    assert site.started[head] == 2 * HOUR


@pytest.mark.parametrize(
    ("least", "first"), [(0, False), (HOUR, True), (2 * HOUR, True), (3 * HOUR, False)]
)
def test_who_accepts_a_shorter_limit_starts_before_a_promise_with_what_fits(
    least: int, first: bool
) -> None:
    site = Site(fleet_of(4), policy_of(**FIFO))
    site.submit(16, run=2 * HOUR, time_limit_ns=2 * HOUR)
    head = site.submit(32, time_limit_ns=HOUR)
    behind = site.submit(8, run=2 * HOUR, time_limit_ns=9 * HOUR, time_min_ns=least)
    site.look()
    assert (behind in site.started) is first
    assert site.view.jobs[behind].time_limit_ns == (2 * HOUR if first else 9 * HOUR)
    if first:
        why = next(each.reason for _, each in site.decisions if each.job == behind)
        assert why.code == "backfilled_shorter" and "2 h" in str(why)
    site.play(2 * HOUR)
    assert site.started[head] == 2 * HOUR


def test_a_shorter_limit_lets_a_job_run_up_to_a_maintenance() -> None:
    site = Site(fleet_of(1), policy_of(grace_ns=MINUTE))
    site.reserve("repair", 5 * HOUR, 6 * HOUR, (0,))
    job = site.submit(run=20 * HOUR, time_limit_ns=20 * HOUR, time_min_ns=HOUR)
    site.look()
    assert site.view.jobs[job].time_limit_ns == 5 * HOUR - MINUTE


def test_what_needs_no_promised_node_starts_however_long_it_runs() -> None:
    site = Site(fleet_of(4), policy_of(**FIFO))
    site.submit(16, run=2 * HOUR, time_limit_ns=2 * HOUR)
    site.submit(24, time_limit_ns=HOUR)
    behind = site.submit(8, run=9 * HOUR)
    site.look()
    assert behind in site.started
    site.play(3 * HOUR)
    assert site.started[2] == 2 * HOUR


def test_without_backfill_nobody_passes() -> None:
    site = Site(fleet_of(4), policy_of(**FIFO, backfill_depth=0))
    site.submit(24, run=2 * HOUR, time_limit_ns=2 * HOUR)
    site.submit(32, time_limit_ns=HOUR)
    behind = site.submit(8, run=MINUTE, time_limit_ns=MINUTE)
    site.look()
    assert behind not in site.started


def test_a_promise_moves_when_its_node_fails() -> None:
    site = Site(fleet_of(4), policy_of(**FIFO))
    site.submit(8, run=HOUR, time_limit_ns=HOUR)
    site.submit(8, run=4 * HOUR, time_limit_ns=4 * HOUR)
    head = site.submit(24)
    site.look()
    promise = site.queue.state.reserved[head]
    assert promise.start_ns == HOUR
    gone = next(node for node in promise.nodes if not site.view.fleet.held[node])
    site.view.fleet.set_state(gone, NodeState.DEAD, 0, reason("test"))
    site.look()
    assert site.queue.state.reserved[head].start_ns == 4 * HOUR
    assert gone not in site.queue.state.reserved[head].nodes


def test_a_team_borrows_but_never_above_its_ceiling() -> None:
    quotas = {"a": Quota(gpus=8, ceiling=24), "b": Quota(gpus=24)}
    site = Site(fleet_of(4), policy_of(quotas=quotas))
    jobs = [site.submit(team="a") for _ in range(4)]
    site.look()
    assert site.held("a") == 24
    found = explain(site.queue, site.view, jobs[-1])
    assert found.reason.code == "at_ceiling" and "may hold 24" in str(found.reason)


def test_all_that_a_fresh_team_starts_in_a_pass_counts_against_its_quota() -> None:
    site = Site(fleet_of(3), policy_of(quotas={"a": Quota(gpus=16)}))
    *owned, borrowed = (site.submit(team="a") for _ in range(3))
    other = site.submit(team="b", priority=5_000)
    site.look()
    assert list(site.started) == [*owned, other]
    assert borrowed not in site.started


def test_the_lender_gets_its_gpus_back_after_the_grace() -> None:
    quotas = {"a": Quota(gpus=8), "b": Quota(gpus=24)}
    site = Site(fleet_of(4), policy_of(quotas=quotas, grace_ns=MINUTE))
    first = site.submit(team="a", run=9 * HOUR)
    site.look()
    site.view.now_ns += HOUR
    borrowed = [site.submit(team="a", run=9 * HOUR) for _ in range(3)]
    site.look()
    assert site.held("a") == 32
    owner = site.submit(16, team="b", run=HOUR)
    found = site.look()
    assert all(isinstance(one, Preempt) and one.for_job == owner for one in found)
    assert len(found) == 2 and all(one.job in borrowed for one in found)
    assert "owns 8" in str(found[0].reason)
    site.play(site.view.now_ns + MINUTE)
    assert owner in site.started and first in site.view.active
    assert site.held("b") == 16


def test_what_a_team_owns_is_not_taken_from_it() -> None:
    quotas = {"a": Quota(gpus=16), "b": Quota(gpus=16)}
    site = Site(fleet_of(4), policy_of(quotas=quotas))
    for team in ("a", "a", "b", "b"):
        site.submit(team=team, run=9 * HOUR)
    site.look()
    site.submit(8, team="b")
    assert site.look() == []


def test_elastic_loans_shrink_before_anybody_is_stopped() -> None:
    quotas = {"b": Quota(gpus=16)}
    site = Site(fleet_of(4), policy_of(quotas=quotas))
    gang = GangShape(replicas=4, least_replicas=1, tensor=8, slot_gpus=8)
    elastic = site.submit(team="a", gang=gang, run=9 * HOUR)
    site.look()
    owner = site.submit(16, team="b")
    (found,) = site.look()
    assert isinstance(found, Resize) and found.job == elastic and found.replicas == 2
    site.look()
    assert owner in site.started and elastic in site.view.active


def test_an_elastic_job_starts_with_the_replicas_there_is_room_for() -> None:
    site = Site(fleet_of(4))
    site.submit(8)
    site.look()
    gang = GangShape(replicas=6, least_replicas=2, tensor=8, slot_gpus=8)
    elastic = site.submit(gang=gang)
    site.look()
    placement = site.view.jobs[elastic].placement
    assert placement is not None and placement.replicas == 3
    assert "3 of 6 replicas" in str(site.decisions[-1][1].reason)


URGENT = {"normal": Qos(), "urgent": Qos(priority=10, preempts=True)}


def test_preemption_takes_the_job_that_loses_least() -> None:
    site = Site(fleet_of(3), policy_of(qos=URGENT, grace_ns=MINUTE))
    safe = Expected(checkpoint_steps=10, checkpoint_ns=10**9)
    kept = site.submit(run=9 * HOUR)  # not preemptible
    costly = site.submit(run=9 * HOUR, preemptible=True)  # makes no checkpoints
    cheap = site.submit(run=9 * HOUR, preemptible=True, expected=safe)
    site.look()
    site.view.now_ns += HOUR
    urgent = site.submit(qos="urgent", run=HOUR)
    (found,) = site.look()
    assert isinstance(found, Preempt) and found.job == cheap and found.grace_ns == MINUTE
    assert site.look() == []  # it waits for them, and asks nobody else
    assert explain(site.queue, site.view, urgent).reason.code == "others_leave"
    site.play(site.view.now_ns + MINUTE)
    assert urgent in site.started and {kept, costly} <= set(site.view.active)


def test_nobody_is_preempted_by_an_equal_or_right_after_the_start() -> None:
    site = Site(fleet_of(1), policy_of(qos=URGENT, least_run_ns=HOUR))
    site.submit(preemptible=True, run=9 * HOUR, priority=10)
    site.look()
    site.view.now_ns += 2 * HOUR
    site.submit(qos="urgent")
    assert site.look() == []
    site.submit(qos="urgent", priority=1)
    assert len(site.look()) == 1
    fresh = Site(fleet_of(1), policy_of(qos=URGENT, least_run_ns=HOUR))
    fresh.submit(preemptible=True, run=9 * HOUR)
    fresh.look()
    fresh.submit(qos="urgent")
    assert fresh.look() == []


def test_a_class_of_service_may_not_hold_more_than_its_limit() -> None:
    rules = {"normal": Qos(), "debug": Qos(most_gpus=8)}
    site = Site(fleet_of(4), policy_of(qos=rules))
    site.submit(qos="debug")
    second = site.submit(qos="debug")
    site.look()
    found = explain(site.queue, site.view, second)
    assert found.reason.code == "at_qos_limit" and second not in site.started
    site.play(2 * HOUR)
    assert site.started[second] == HOUR


def test_maintenance_finds_its_nodes_empty() -> None:
    site = Site(fleet_of(2, leaf=2), policy_of(grace_ns=MINUTE))
    site.reserve("repair", 5 * HOUR, 6 * HOUR, (0,))
    endless = [site.submit(run=20 * HOUR) for _ in range(2)]
    short = site.submit(run=HOUR, time_limit_ns=HOUR)
    site.look()
    # What nobody bounds stays off node 0; what ends in time may use it.
    assert site.started.keys() == {endless[0], short}
    assert site.view.jobs[endless[0]].placement.nodes == (1,)
    site.play(4 * HOUR)
    waiting = explain(site.queue, site.view, endless[1])
    assert waiting.reason.code == "waits_for_window" and "repair" in str(waiting.reason)
    site.play(5 * HOUR + MINUTE)
    assert not site.view.fleet.held[0]
    site.play(7 * HOUR)
    assert site.started[endless[1]] == 6 * HOUR


def test_who_runs_into_a_new_window_is_told_to_leave_before_it() -> None:
    site = Site(fleet_of(1), policy_of(grace_ns=10 * MINUTE))
    job = site.submit(run=20 * HOUR)
    site.look()
    site.reserve("repair", HOUR, 2 * HOUR, (0,))
    site.play(HOUR)
    when, found = site.decisions[-1]
    assert isinstance(found, Preempt) and found.job == job and when == HOUR - 10 * MINUTE
    assert not site.view.fleet.held[0]
    site.play(3 * HOUR)
    assert site.view.jobs[job].started_ns == 2 * HOUR


def test_a_reservation_is_for_its_team() -> None:
    site = Site(fleet_of(2), policy_of(size_weight=100))
    site.reserve("launch", 0, 9 * HOUR, (0, 1), "a")
    other, mine = site.submit(team="b"), site.submit(16, team="a")
    site.look()
    assert mine in site.started and other not in site.started


def test_a_reservation_of_gpus_gets_idle_nodes_and_keeps_them() -> None:
    site = Site(fleet_of(4), policy_of())
    site.submit(8, run=9 * HOUR)
    site.look()
    site.reserve("launch", HOUR, 9 * HOUR, (), "a")
    site.view.reservations["launch"] = structs.replace(site.view.reservations["launch"], gpus=16)
    site.submit(16, team="b", run=9 * HOUR)
    site.submit(8, team="b", run=9 * HOUR)
    site.look()
    assert site.queue.state.windows["launch"] == (1, 2)
    assert site.view.fleet.held[3] and not site.view.fleet.held[1]


def test_a_job_that_waited_long_overrides_priority() -> None:
    site = Site(fleet_of(2), policy_of(**FIFO, age_weight=0, starving_ns=10 * HOUR))
    starved = site.submit(16, run=HOUR, time_limit_ns=HOUR)
    # A stream of small jobs of higher priority, which never leaves both nodes free at once.
    for hour in range(40):
        site.view.now_ns = hour * HOUR
        for offset in (0, 30 * MINUTE):
            site.play(hour * HOUR + offset)
            site.submit(8, priority=5, run=HOUR, time_limit_ns=HOUR)
            site.look()
    site.play(60 * HOUR)
    assert site.started[starved] <= 12 * HOUR


def test_a_job_returns_to_the_queue_and_keeps_what_is_left_of_its_limit() -> None:
    site = Site(fleet_of(1), policy_of(qos=URGENT, replan_ns=MINUTE))
    first = site.submit(preemptible=True, run=4 * HOUR, time_limit_ns=5 * HOUR)
    site.look()
    site.view.now_ns += 2 * HOUR
    urgent = site.submit(qos="urgent", run=HOUR, time_limit_ns=9 * HOUR)
    site.play(2 * HOUR)
    assert urgent in site.view.active and first in site.view.pending
    found = explain(site.queue, site.view, first)
    assert found.estimated_start_ns is not None
    site.play(9 * HOUR)
    assert site.view.jobs[first].state == "done"


def test_every_pending_job_has_a_sentence() -> None:
    site = Site(fleet_of(4), policy_of(**FIFO, quotas={"c": Quota(gpus=0, ceiling=8)}))
    site.submit(16, run=5 * HOUR, time_limit_ns=5 * HOUR)
    site.submit(32, time_limit_ns=HOUR)
    site.submit(8)
    site.submit(8, team="c", time_limit_ns=2 * HOUR)
    site.submit(8, team="c", time_limit_ns=2 * HOUR)
    site.look()
    codes = []
    for number in site.view.pending:
        found = explain(site.queue, site.view, number)
        codes.append(found.reason.code)
        assert "{" not in str(found.reason) and not str(found.reason).startswith(found.reason.code)
    assert codes == ["promised_about", "kept_for_others", "at_ceiling"]
    head = explain(site.queue, site.view, 2)
    assert head.estimated_start_ns == 5 * HOUR and "in 4 to 8 h" in str(head.reason)


VIEW_POLICY = Policy(
    queue=QueuePolicy(
        qos={
            "normal": Qos(),
            "short": Qos(most_time_ns=HOUR),
            "small": Qos(most_gpus_per_job=4),
        },
        quotas={"capped": Quota(gpus=0, ceiling=8)},
        partitions={"default": Partition(teams=("a", "default", "capped"))},
    )
)

REFUSED = {
    "unknown_qos": JobSpec(name="j", qos="norml"),
    "unknown_partition": JobSpec(name="j", partition="defualt"),
    "partition_closed": JobSpec(name="j", partition="default", team="b"),
    "time_limit_missing": JobSpec(name="j", qos="short"),
    "time_limit_too_long": JobSpec(name="j", qos="short", time_limit_ns=2 * HOUR),
    "too_many_gpus": JobSpec(name="j", team="capped", gang=GangShape(replicas=16, slot_gpus=8)),
    "fleet_too_small": JobSpec(name="j", gang=GangShape(replicas=80, slot_gpus=8)),
    "no_such_feature": JobSpec(name="j", constraint="h200"),
    "domains_too_small": JobSpec(name="j", gang=GangShape(tensor=16, slot_gpus=8)),
    "tensor_across_slots": JobSpec(name="j", gang=GangShape(tensor=6, slot_gpus=4, replicas=2)),
    "no_such_nodes": JobSpec(name="j", gang=GangShape(slot_cpus=1000)),
}


@pytest.mark.parametrize("code", REFUSED)
def test_what_can_never_run_is_refused_with_the_reason(code: str) -> None:
    view = View(fleet_of(4), VIEW_POLICY)
    why = admit(view, REFUSED[code])
    assert why is not None and why.code == code and "{" not in str(why)


def test_what_can_run_one_day_is_admitted() -> None:
    view = View(fleet_of(4), VIEW_POLICY)
    for node in range(4):
        view.fleet.set_state(node, NodeState.DEAD, 0, reason("test"))
    elastic = GangShape(replicas=80, least_replicas=8, slot_gpus=8)
    assert admit(view, JobSpec(name="j", gang=GangShape(replicas=32, slot_gpus=8))) is None
    assert admit(view, JobSpec(name="j", gang=elastic)) is None


def test_rules_of_the_queue_that_make_no_sense_are_named() -> None:
    rules = QueuePolicy(
        quotas={"a": Quota(gpus=-1), "b": Quota(gpus=8, ceiling=4), "c": Quota(gpus=1, weight=0)},
        qos={"fast": Qos(most_gpus=-5)},
        half_life_ns=0,
        grace_ns=-1,
    )
    keys = [one.key for one in policy_problems(Policy(queue=rules))]
    assert keys == [
        "queue.quotas.a.gpus",
        "queue.quotas.b.ceiling",
        "queue.quotas.c.weight",
        "queue.qos.fast.most_gpus",
        "queue.half_life_ns",
        "queue.grace_ns",
        "queue.qos",
    ]
    assert policy_problems(Policy()) == []


@pytest.mark.parametrize("key", [k for k in QueuePolicy.__struct_fields__ if k.endswith("_ns")])
def test_times_of_the_queue_above_ten_years_are_refused(key: str) -> None:
    (found,) = policy_problems(Policy(queue=QueuePolicy(**{key: 3 * 10**18})))
    assert found.key == f"queue.{key}" and "ten years" in found.rule


def test_absurd_weights_priorities_and_numbers_of_the_queue_are_refused() -> None:
    absurd = 10**30
    names = ("age_weight", "fair_share_weight", "size_weight", "short_weight", "quota_weight")
    names = (*names, "backfill_depth")
    rules = QueuePolicy(
        quotas={"a": Quota(gpus=absurd, ceiling=absurd, weight=absurd)},
        qos={"normal": Qos(priority=-absurd, most_gpus=absurd, most_time_ns=absurd)},
        partitions={"p": Partition(priority=absurd, most_time_ns=absurd)},
        reservations=absurd,
        starving_reservations=absurd,
        **dict.fromkeys(names, absurd),
    )
    keys = {one.key for one in policy_problems(Policy(queue=rules))}
    assert {f"queue.{name}" for name in (*names, "reservations", "starving_reservations")} <= keys
    assert {f"queue.quotas.a.{name}" for name in ("gpus", "ceiling", "weight")} <= keys
    assert {
        f"queue.qos.normal.{name}" for name in ("priority", "most_gpus", "most_time_ns")
    } <= keys
    assert {f"queue.partitions.p.{name}" for name in ("priority", "most_time_ns")} <= keys


@pytest.mark.parametrize(
    "part",
    [
        {"fabric": FabricPolicy(nic_bytes_per_second=0)},
        {"recovery": RecoveryPolicy(same_step_failures=-1)},
        {"health": HealthPolicy(strikes=0)},
        {"health": HealthPolicy(breaker_nodes_ppm=-1)},
        {"price": PricePolicy(micro_dollars_per_gpu_hour=-5)},
        {"spares": SparePolicy(nodes=-99)},
        {"spares": SparePolicy(quantile_ppm=5_000_000)},
        {"timeouts": TimeoutPolicy(heartbeat_ns=-1)},
        {"storage": StoragePolicy(bytes_per_second=1 << 63)},
        {"ended_jobs": -1},
    ],
    ids=str,
)
def test_no_core_is_made_with_rules_that_make_no_sense(part: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(part))):
        Core(fleet_of(1), Policy(**part))


def test_two_windows_ask_a_job_to_leave_once() -> None:
    site = Site(fleet_of(1), policy_of(grace_ns=MINUTE))
    site.submit(run=9 * HOUR)
    site.look()
    for name in ("fan", "firmware"):
        site.reserve(name, 0, HOUR, (0,))
    assert len(site.look()) == 1


def test_a_job_is_not_both_shrunk_and_stopped() -> None:
    site = Site(fleet_of(4), policy_of(quotas={"b": Quota(gpus=32)}))
    gang = GangShape(replicas=4, least_replicas=2, tensor=8, slot_gpus=8)
    site.submit(team="a", gang=gang, run=9 * HOUR)
    site.look()
    site.submit(32, team="b")
    (found,) = site.look()
    assert isinstance(found, Preempt)


def test_jobs_without_limits_do_not_wait_for_each_others_promises() -> None:
    site = Site(fleet_of(4), policy_of(starving_ns=HOUR, reservations=3))
    site.submit(32, run=3 * HOUR)
    site.look()
    later = [site.submit(gpus, run=HOUR) for gpus in (32, 16, 32, 24)]
    site.play(2 * HOUR)  # all of them starve, and have firm promises far ahead
    assert len(site.queue.state.reserved) > 1
    site.play(8 * HOUR)
    assert sorted(site.started[number] // HOUR for number in later) == [3, 4, 5, 6]


def test_of_those_that_starve_one_has_a_firm_promise_on_the_same_nodes() -> None:
    nodes = [Node(name=f"n{i}", partition="ab"[i // 2]) for i in range(4)]
    site = Site(Fleet(nodes), policy_of(starving_ns=HOUR))
    for name in ("a", "b"):
        site.submit(16, run=10 * HOUR, time_limit_ns=10 * HOUR, partition=name)
    site.look()
    oldest, later = (site.submit(time_limit_ns=t * HOUR, partition="a") for t in (8, 4))
    elsewhere = site.submit(time_limit_ns=2 * HOUR, partition="b")
    site.play(3 * HOUR)
    firm = [number for number, one in site.queue.state.reserved.items() if one.firm]
    assert sorted(firm) == [oldest, elsewhere] and later not in firm
