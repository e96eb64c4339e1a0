from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.cluster.ledger.buckets import BUCKETS
from phalanx.cluster.ledger.ledger import LedgerError
from phalanx.cluster.ledger.report import report
from phalanx.cluster.policy import Policy, PricePolicy
from phalanx.cluster.protocol.events import (
    Cancel,
    GangDrained,
    JobFinished,
    NodeSilent,
    Progress,
    Requeue,
    Tick,
)
from phalanx.cluster.protocol.messages import WorkerExited
from tests.cluster.drive import EXPECTED, SECOND, Drive

STEP = EXPECTED.step_ns
PRICE = PricePolicy()


def share(drive: Drive, job):
    return report(drive.core.ledger, PRICE).jobs[job.id]


def test_every_second_of_a_clean_run_has_its_bucket():
    drive = Drive()
    expected = structs.replace(EXPECTED, exposed_ns=SECOND // 2, bubble_ns=SECOND)
    job = drive.submit(expected=expected)
    drive.run(job)
    drive.train(job, 100, data_wait_ns=20 * SECOND, checkpoint_ns=SECOND, straggler_ns=3 * SECOND)
    drive.tell(JobFinished(job=job.id, generation=1, step=100))
    found = share(drive, job)
    left = 100 * STEP - 24 * SECOND
    assert found.buckets == {
        **dict.fromkeys(BUCKETS, 0),
        "restart": (drive.now_ns - 100 * STEP - job.started_ns) * 16,
        "data_wait": 20 * SECOND * 16,
        "checkpoint_stall": SECOND * 16,
        "straggler": 3 * SECOND * 16,
        "exposed_communication": 50 * SECOND * 16,
        "bubble": 100 * SECOND * 16,
        "productive": (left - 150 * SECOND) * 16,
    }
    assert sum(found.buckets.values()) == found.gpu_ns == (drive.now_ns - job.started_ns) * 16


def test_what_is_not_inside_steps_is_residual():
    drive = Drive()
    job = drive.submit()
    drive.run(job)
    drive.train(job, 10, busy_ns=8 * STEP)
    assert share(drive, job).buckets["residual"] == 2 * STEP * 16
    assert share(drive, job).buckets["productive"] == 8 * STEP * 16


def test_parts_that_exceed_the_time_do_not_make_time():
    drive = Drive()
    job = drive.submit()
    drive.run(job)
    drive.train(job, 1, data_wait_ns=10 * STEP, straggler_ns=10 * STEP)
    assert share(drive, job).buckets["data_wait"] == STEP * 16
    drive.core.ledger.check(drive.core.view)


def test_a_failure_costs_detection_restart_and_recompute_under_its_cause():
    drive = Drive()
    job = drive.running(steps=150)
    drive.wait(30 * SECOND)
    drive.tell(
        WorkerExited(
            job=job.id, generation=1, node=job.placement.nodes[0], rank=0, cause="worker_killed"
        )
    )
    failed = drive.now_ns
    drive.wait(SECOND)
    drive.run(job, 145)
    restarted = drive.now_ns
    drive.train(job, 10)
    found = share(drive, job)
    assert found.buckets["detection"] == 30 * SECOND * 16
    assert found.buckets["recompute"] == 5 * STEP * 16
    assert found.buckets["productive"] == 155 * STEP * 16
    assert found.by_cause["worker_killed"] == {
        "detection": 30 * SECOND * 16,
        "restart": (restarted - failed) * 16,
        "recompute": 5 * STEP * 16,
    }


def killed(drive: Drive, job) -> None:
    drive.tell(
        WorkerExited(
            job=job.id,
            generation=job.generation,
            node=job.placement.nodes[0],
            rank=0,
            cause="worker_killed",
        )
    )
    drive.wait(SECOND)


def test_what_a_rollback_throws_away_is_not_productive_even_if_nobody_makes_it_again():
    drive = Drive()
    expected = structs.replace(EXPECTED, exposed_ns=SECOND // 2, bubble_ns=SECOND)
    job = drive.submit(expected=expected)
    drive.run(job)
    drive.train(job, 80, data_wait_ns=20 * SECOND)
    before = share(drive, job)
    killed(drive, job)
    drive.run(job, 20)
    after = share(drive, job)
    training = ("productive", "data_wait", "exposed_communication", "bubble")
    for bucket in training:
        assert after.buckets[bucket] == before.buckets[bucket] // 4
    moved = sum(before.buckets[bucket] - after.buckets[bucket] for bucket in training)
    assert after.buckets["recompute"] == after.by_cause["worker_killed"]["recompute"] == moved
    assert sum(after.buckets.values()) == after.gpu_ns
    drive.core.ledger.check(drive.core.view)


def test_a_job_that_begins_again_for_ever_has_no_effective_time_however_much_it_computes():
    drive = Drive()
    job = drive.submit()
    drive.run(job)
    for steps in (50, 60):
        drive.train(job, steps)
        killed(drive, job)
        drive.run(job, 0)
    found = share(drive, job)
    assert found.ettr_ppm == 0 and found.buckets["productive"] == 0
    assert found.buckets["recompute"] == 110 * STEP * 16


def test_slow_nodes_make_no_time_effective():
    drive = Drive()
    job = drive.running(steps=0)
    drive.train(job, 10, straggler_ns=5 * STEP)
    found = share(drive, job)
    held = found.gpu_ns - found.buckets["idle_spare"]
    assert found.buckets["straggler"] == 5 * STEP * 16
    assert found.ettr_ppm == 5 * STEP * 16 * 10**6 // held


def test_idle_spares_quarantined_and_unallocated_nodes_are_counted_apart():
    drive = Drive(6)
    job = drive.running(spares=1)
    used = (*job.placement.nodes, *job.placement.spares)
    drive.tell(NodeSilent(node=next(node for node in range(6) if node not in used)))
    since = drive.now_ns
    drive.wait(100 * SECOND)
    drive.tell(Cancel(job=job.id))
    whole = report(drive.core.ledger, PRICE)
    assert whole.fleet.buckets["quarantined"] == (drive.now_ns - since) * 8
    assert whole.jobs[job.id].buckets["idle_spare"] == (drive.now_ns - job.started_ns) * 8
    assert whole.fleet.gpu_ns == drive.now_ns * 48
    assert sum(whole.fleet.buckets.values()) == whole.fleet.gpu_ns


def test_a_drain_is_a_checkpoint_stall():
    drive = Drive()
    job = drive.running()
    drive.tell(Requeue(job=job.id))
    drive.tell(GangDrained(job=job.id, generation=1, step=150), 7 * SECOND)
    assert share(drive, job).buckets["checkpoint_stall"] == 7 * SECOND * 16


def test_effective_time_and_goodput_follow_from_the_buckets():
    drive = Drive()
    job = drive.submit(spares=1)
    drive.run(job)
    drive.train(job, 100, data_wait_ns=50 * SECOND)
    drive.tell(JobFinished(job=job.id, generation=1, step=100))
    found = share(drive, job)
    held = found.gpu_ns - found.buckets["idle_spare"]
    steps = found.buckets["productive"] + found.buckets["data_wait"]
    assert found.ettr_ppm == steps * 10**6 // held
    assert found.goodput_ppm == found.buckets["productive"] * 10**6 // found.gpu_ns


def test_hours_dollars_and_energy_are_of_the_same_time():
    price = PricePolicy(
        micro_dollars_per_gpu_hour=2_000_000, watts_per_gpu=1000, idle_watts_per_gpu=100
    )
    drive = Drive(2, Policy(price=price))
    job = drive.submit()
    drive.run(job)
    drive.train(job, 720)
    drive.tell(JobFinished(job=job.id, generation=1, step=720))
    found = report(drive.core.ledger, price).jobs[job.id]
    assert found.gpu_hours == found.gpu_ns // (3600 * SECOND) == 16
    assert found.micro_dollars == found.gpu_ns * 2_000_000 // (3600 * SECOND)
    resting = found.buckets["restart"]
    drawn = (found.gpu_ns - resting) * 1000 + resting * 100
    assert found.watt_hours == drawn // (3600 * SECOND)


def test_teams_are_the_sum_of_their_jobs():
    drive = Drive()
    jobs = [drive.running(team=team, steps=10) for team in ("red", "red", "blue")]
    for job in jobs:
        drive.tell(JobFinished(job=job.id, generation=1, step=10))
    whole = report(drive.core.ledger, PRICE)
    assert list(whole.teams) == ["blue", "red"]
    assert whole.teams["red"].gpu_ns == sum(whole.jobs[job.id].gpu_ns for job in jobs[:2])


def test_a_report_twice_or_late_counts_once():
    drive = Drive()
    job = drive.running(steps=10)
    before = dict(drive.core.ledger.accounts[job.id].buckets)
    late = Progress(
        job=job.id, generation=1, step=9, committed=9, durable=0, at_ns=drive.now_ns - STEP
    )
    drive.tell(late)
    drive.tell(late)
    assert drive.core.ledger.accounts[job.id].buckets == before
    assert job.step == 10


@pytest.mark.parametrize("where", ["job", "idle", "gpus"])
def test_a_ledger_that_does_not_conserve_is_caught(where):
    drive = Drive()
    job = drive.running()
    ledger = drive.core.ledger
    ledger.check(drive.core.view)
    if where == "job":
        ledger.accounts[job.id].buckets["productive"] += 1
    elif where == "idle":
        ledger.idle["unallocated"] -= 1
    else:
        drive.core.view.fleet.release(job.id, job.placement.nodes[0])
    with pytest.raises(LedgerError):
        ledger.check(drive.core.view)


def test_the_time_of_a_hundred_thousand_gpus_for_a_year_fits_into_a_snapshot():
    drive = Drive(2)
    drive.core.ledger.fleet_gpu_ns = 10**5 * 365 * 86400 * SECOND
    assert type(drive.core).restore(drive.core.snapshot()).ledger.fleet_gpu_ns > 2**64


def test_checkpoint_stalls_are_nobodys_fault():
    drive = Drive()
    job = drive.running(steps=100)
    lost = WorkerExited(
        job=job.id, generation=1, node=job.placement.nodes[0], rank=0, cause="hbm_ecc"
    )
    drive.tell(lost)
    drive.wait(SECOND)
    drive.run(job)
    drive.train(job, 100, checkpoint_ns=7 * SECOND, straggler_ns=3 * SECOND)
    causes = share(drive, job).by_cause
    assert set(causes["hbm_ecc"]) <= {"detection", "restart", "recompute"}
    assert causes["checkpoint"] == {"checkpoint_stall": 7 * SECOND * 16}
    assert causes["straggler"] == {"straggler": 3 * SECOND * 16}


def test_a_program_that_reports_nothing_is_neither_stalled_nor_lost():
    drive = Drive()
    job = drive.submit(reports_steps=False)
    drive.run(job)
    ready = drive.now_ns
    drive.tell(Tick(), 100 * SECOND)
    assert share(drive, job).buckets["unreported"] == 100 * SECOND * 16
    node = job.placement.nodes[0]
    drive.tell(WorkerExited(job=job.id, generation=1, node=node, rank=0, cause="worker_killed"))
    failed = drive.now_ns
    drive.wait(SECOND)
    drive.run(job)
    again = drive.now_ns
    drive.tell(JobFinished(job=job.id, generation=2, step=0), 50 * SECOND)
    found = share(drive, job)
    spent = (failed - ready + 50 * SECOND) * 16
    assert found.buckets["unreported"] == spent
    assert not found.steps_known  # so that a goodput of 0 would be an invention
    assert found.by_cause["worker_killed"] == {"restart": (again - failed) * 16}
    assert spent + sum(sum(lost.values()) for lost in found.by_cause.values()) == found.gpu_ns
    drive.core.ledger.check(drive.core.view)


def test_a_job_that_holds_nothing_yet_has_no_goodput():
    drive = Drive()
    job = drive.submit()
    assert share(drive, job).gpu_ns == 0 and not share(drive, job).steps_known


def test_a_program_that_reports_its_first_step_has_trained_until_then():
    drive = Drive()
    job = drive.submit(reports_steps=False)
    drive.run(job)
    drive.wait(80 * SECOND)
    drive.train(job, 10)
    drive.tell(Tick(), 3 * SECOND)
    assert share(drive, job).steps_known
    found = share(drive, job).buckets
    assert found["unreported"] == 0
    assert found["productive"] == (80 * SECOND + 10 * STEP) * 16
    assert found["residual"] == 3 * SECOND * 16
    drive.core.ledger.check(drive.core.view)
