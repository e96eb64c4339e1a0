"""How often the fleet fails, and what running gangs are told of it."""

from __future__ import annotations

import pytest

from phalanx.cluster.core import Core
from phalanx.cluster.gang.seen_failures import SeenFailures, seen
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.policy import DAY_NS, HealthPolicy, Policy
from phalanx.cluster.protocol.commands import FailureRate, Notify
from phalanx.cluster.protocol.events import Cancel
from phalanx.cluster.protocol.messages import WorkerExited
from tests.cluster.drive import SECOND, Drive

PRIOR = HealthPolicy().failures_per_million_node_days


def known(drive: Drive) -> SeenFailures:
    ctx = drive.core._ctx
    (one,) = seen(ctx.health, ctx.policy.health, drive.now_ns)
    return one


def break_and_recover(drive: Drive, job: ClusterJob, cause: str = "nccl_timeout") -> None:
    node = job.placement.nodes[0]
    fact = WorkerExited(
        node=node, job=job.id, generation=job.generation, rank=0, cause=cause, step=job.step
    )
    drive.tell(fact)
    drive.settle(job)
    drive.run(job)


def test_before_anything_ran_the_rate_is_the_policys() -> None:
    assert SeenFailures(kind="", gpu_seconds=0, causes={}, prior=PRIOR).per_million_node_days in (
        PRIOR,
        PRIOR + 1,  # of the division
    )


def test_time_that_gangs_run_is_counted_while_they_do_and_after() -> None:
    drive = Drive(nodes=4)
    job = drive.running()
    since = drive.now_ns
    before = known(drive).gpu_seconds
    drive.wait(DAY_NS)
    gpus = 2 * 8
    assert known(drive).gpu_seconds - before == gpus * (drive.now_ns - since) // SECOND
    whole = known(drive).gpu_seconds
    break_and_recover(drive, job)
    assert whole <= known(drive).gpu_seconds < whole + gpus * 10
    assert known(drive).node_days == 2


def test_what_interrupts_a_gang_counts_once_and_by_its_cause() -> None:
    drive = Drive(nodes=4)
    job = drive.running()
    break_and_recover(drive, job)
    break_and_recover(drive, job, "hbm_ecc")
    assert known(drive).causes == {"hbm_ecc": 1, "nccl_timeout": 1}


@pytest.mark.parametrize("cause", ["user_error", "worker_killed", "host_maintenance"])
def test_what_people_do_is_no_failure_of_the_fleet(cause: str) -> None:
    drive = Drive(nodes=6)
    job = drive.running(retries=5)
    break_and_recover(drive, job, cause)
    assert known(drive).failures == 0


def test_a_running_gang_is_told_when_the_rate_has_changed_much() -> None:
    drive = Drive(nodes=4)
    job = drive.running()
    break_and_recover(drive, job)
    (order,) = drive.bodies(FailureRate)[:1]
    assert order.job == job.id and order.failures == 1
    assert 1.9 * PRIOR < order.per_million_node_days < 2.1 * PRIOR
    # The new generation, whose workers may not have heard it, is told as soon as it runs.
    assert drive.bodies(FailureRate)[-1].generation == job.generation
    told = [note.reason for note in drive.bodies(Notify) if note.reason.code == "failure_rate"]
    assert len(told) <= 1 and "seen: 1 in 0 days" in str(order.reason)


def test_without_failures_the_rate_falls_and_gangs_hear_of_it() -> None:
    drive = Drive(nodes=4)
    job = drive.running()
    drive.wait(10 * DAY_NS)
    assert not drive.bodies(FailureRate)  # 20 node-days prove little at four in a thousand
    drive.wait(40 * DAY_NS)
    assert known(drive).per_million_node_days < PRIOR
    assert drive.bodies(FailureRate)[-1].per_million_node_days < PRIOR
    assert job.state == "running"


def test_a_large_fleet_hears_of_its_good_health_after_days() -> None:
    drive = Drive(nodes=64)
    drive.running(gang=GangShape(replicas=64, tensor=8, slot_gpus=8))
    drive.wait(10 * DAY_NS)
    orders = drive.bodies(FailureRate)
    assert orders and orders[-1].per_million_node_days < PRIOR // 2


def test_failures_older_than_the_window_are_forgotten() -> None:
    policy = Policy(health=HealthPolicy(failure_window_ns=5 * DAY_NS))
    drive = Drive(nodes=4, policy=policy)
    job = drive.running()
    break_and_recover(drive, job)
    assert known(drive).failures == 1
    drive.wait(7 * DAY_NS)
    assert known(drive).failures == 0


def test_a_snapshot_keeps_what_was_seen() -> None:
    drive = Drive(nodes=4)
    job = drive.running()
    break_and_recover(drive, job)
    drive.wait(DAY_NS)
    again = Core.restore(drive.core.snapshot())
    ctx = again._ctx
    assert seen(ctx.health, ctx.policy.health, drive.now_ns) == [known(drive)]


def test_jobs_that_end_or_drain_leave_no_gpus_running() -> None:
    drive = Drive(nodes=4)
    job = drive.running()
    assert drive.core._ctx.health.failures["h100"].running_gpus == 16
    drive.tell(Cancel(job=job.id, request="x"))
    drive.wait(600 * SECOND)
    record = drive.core._ctx.health.failures["h100"]
    assert job.ended and record.running_gpus == 0 and record.running_gpu_ns == 0
