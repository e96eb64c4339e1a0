"""How often the nodes of a gang fail: by their kind, their age and what they did before."""

from __future__ import annotations

import pytest

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.gang import node_rates, risk_groups
from phalanx.cluster.gang.seen_failures import NODE_DAY_GPU_SECONDS, SeenFailures
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.node import Node
from phalanx.cluster.policy import DAY_NS, HealthPolicy
from phalanx.cluster.protocol.commands import FailureRate, Notify
from phalanx.cluster.protocol.messages import WorkerExited
from phalanx.cluster.recovery import prices
from phalanx.plan.cost.failures import best_interval, mtbf_seconds
from tests.cluster.drive import SECOND, Drive

PRIOR = HealthPolicy().failures_per_million_node_days
FOUR = GangShape(replicas=4, tensor=8, slot_gpus=8, slot_cpus=8)
SIX = GangShape(replicas=6, tensor=8, slot_gpus=8, slot_cpus=8)


def two_kinds(each: int = 4) -> Fleet:
    return Fleet(
        Node(name=f"{kind}{number}", gpus=8, kind=kind, features=(kind,), rails=8, leaf=kind)
        for kind in ("good", "bad")
        for number in range(each)
    )


def breaks(drive: Drive, job: ClusterJob, slot: int = 0) -> None:
    """A node interrupts a gang, which goes on where it was."""
    node = job.placement.nodes[slot]
    drive.tell(
        WorkerExited(
            node=node,
            job=job.id,
            generation=job.generation,
            rank=0,
            cause="nccl_timeout",
            step=job.step,
        )
    )
    drive.settle(job)
    drive.run(job)
    drive.train(job, 1)


def interval_seconds(drive: Drive, job: ClusterJob) -> float:
    """Between the checkpoints of a job, as its workers reckon with what they were told."""
    told = [each for each in drive.bodies(FailureRate) if each.job == job.id]
    rate = told[-1].per_million_node_days if told else PRIOR
    return best_interval(mtbf_seconds(32, rate / 1000), 5.0)


def test_a_job_on_the_model_that_fails_more_saves_more_often_and_the_log_says_why() -> None:
    drive = Drive(fleet=two_kinds())
    good, bad = (
        drive.running(1, gang=FOUR, constraint=each, retries=99) for each in ("good", "bad")
    )
    for turn in range(12):  # of one model two in 48 days, of the other ten
        breaks(drive, bad if turn % 6 else good, turn % 4)
        drive.wait(4 * DAY_NS)
    rates = [node_rates.rated(drive.core._ctx, job.placement.nodes).rate for job in (good, bad)]
    assert rates[1] > 2.5 * rates[0]
    assert interval_seconds(drive, bad) < 0.7 * interval_seconds(drive, good)
    told = [each.reason for each in drive.bodies(Notify) if each.job == bad.id]
    (why, *_) = [str(each) for each in reversed(told) if each.code == "failure_rate"]
    assert "like its own (4 bad (older, failed more often); seen: " in why
    assert "the interval between checkpoints follows" in why


def test_the_ladder_reckons_with_the_nodes_that_a_way_would_use() -> None:
    drive = Drive(fleet=two_kinds())
    job = drive.running(1, gang=FOUR, constraint="bad", retries=99)
    for _ in range(5):
        breaks(drive, job)
    ctx = drive.core._ctx
    good, bad = (node_rates.rated(ctx, tuple(range(first, first + 4))) for first in (0, 4))
    assert prices.failures_ppm(bad, 32, DAY_NS) > 4 * prices.failures_ppm(good, 32, DAY_NS)
    # Nodes that are never seen to fail would save what the next failures cost.
    assert prices.to_come_gpu_ns(ctx, job, good, 32, DAY_NS) < 0
    assert prices.to_come_gpu_ns(ctx, job, bad, 32, DAY_NS) == 0
    begin, again = 600 * SECOND, 0
    assert prices.through_ns(ctx, job, good, 32, begin, again) < prices.through_ns(
        ctx, job, bad, 32, begin, again
    )


def test_the_time_and_the_failures_of_a_gang_on_two_models_count_for_each() -> None:
    drive = Drive(fleet=two_kinds(3))
    job = drive.running(1, gang=SIX, retries=99)
    drive.wait(10 * DAY_NS)
    slot = next(n for n, node in enumerate(job.placement.nodes) if node >= 3)
    breaks(drive, job, slot)
    bad, good = drive.core.failures(drive.now_ns)
    assert (good.kind, good.failures, bad.failures) == ("good", 0, 1)
    assert good.node_days == bad.node_days == 30
    running = drive.core._ctx.health.failures
    assert running["good"].running_gpus == running["bad"].running_gpus == 24


def test_one_failure_that_was_seen_doubles_the_rate_and_no_more() -> None:
    drive = Drive(4)
    job = drive.running(1, gang=FOUR, retries=99)
    breaks(drive, job)
    ctx = drive.core._ctx
    assert node_rates.rated(ctx, job.placement.nodes).rate == pytest.approx(2 * PRIOR, rel=0.01)


def test_nodes_that_failed_before_are_told_apart_as_far_as_such_were_seen_to_fail() -> None:
    """Of 1000 days of nodes 50 were of such that had failed, with half of all failures."""
    day = NODE_DAY_GPU_SECONDS
    seen = SeenFailures(
        kind="h100",
        gpu_seconds=1000 * day,
        causes={"hbm_ecc": 20},
        prior=20_000,
        grouped={"older": (950 * day, 10), "older, failed once": (50 * day, 10)},
    )
    rates = {group: each.per_million_node_days for group, each in seen.groups.items()}
    assert rates["older"] == pytest.approx(10_500, rel=0.15)
    assert rates["older, failed once"] > 6 * rates["older"]
    # Nothing was seen of these: they are like all others.
    assert rates["first day"] == pytest.approx(seen.per_million_node_days, rel=0.05)
    assert rates["older, failed more often"] == pytest.approx(20_000, rel=0.1)


def test_if_all_fail_alike_every_group_comes_to_the_same_rate() -> None:
    day = NODE_DAY_GPU_SECONDS
    grouped = {"first week": (500 * day, 6), "older": (1000 * day, 12)}
    grouped["older, failed once"] = (250 * day, 3)
    seen = SeenFailures(
        kind="", gpu_seconds=1750 * day, causes={"xid": 21}, prior=4000, grouped=grouped
    )
    for each in seen.groups.values():
        assert each.per_million_node_days == pytest.approx(12_000, rel=0.13)


def test_a_mean_over_nodes_is_that_over_their_groups() -> None:
    drive = Drive(fleet=two_kinds())
    job = drive.running(1, gang=FOUR, constraint="bad", retries=99)
    breaks(drive, job)
    breaks(drive, job)
    breaks(drive, job, 2)
    ctx = drive.core._ctx
    for node, since_ns in ((0, -3 * DAY_NS), (5, -DAY_NS), (6, 0), (7, -40 * DAY_NS)):
        ctx.health.in_service[node] = drive.now_ns + since_ns
    ctx.node_rates = None
    for nodes in ((0, 1, 2, 3), (4, 5, 6, 7), (0, 5), (7,)):
        groups = risk_groups.groups_of(ctx, nodes)
        assert node_rates.rated(ctx, nodes).rate == node_rates.mean_of_groups(ctx, groups)
    swapped = node_rates.rated(ctx, (4, 5, 6), without=(5, 4), incoming=(0,))
    assert swapped == node_rates.rated(ctx, (6, 0)) and swapped.count == 2
    assert risk_groups.group_of(ctx, 4) == "older, failed more often"
    assert risk_groups.group_of(ctx, 5) == "first week"


def test_failures_of_a_node_are_forgotten_with_the_window_and_kept_in_snapshots() -> None:
    drive = Drive(4)
    job = drive.running(1, gang=FOUR, retries=99)
    node = job.placement.nodes[0]
    breaks(drive, job)
    twin, since = Core.restore(drive.core.snapshot()), len(drive.log)
    assert risk_groups.group_of(drive.core._ctx, node) == "older, failed once"
    drive.wait(92 * DAY_NS)
    assert risk_groups.group_of(drive.core._ctx, node) == "older"
    for event in drive.log[since:]:
        twin.handle(event)
    assert twin.snapshot() == drive.core.snapshot()
