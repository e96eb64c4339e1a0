"""A promised start is kept: by recovery, by those who leave at their limit, and in what is said."""

from __future__ import annotations

import pytest

from phalanx.cluster.forecast.why import explain
from phalanx.cluster.job_relations import Array
from phalanx.cluster.jobs.job import ClusterJob, Expected, GangShape
from phalanx.cluster.policy import Policy, Qos, QueuePolicy, Quota
from phalanx.cluster.protocol.commands import Notify
from phalanx.cluster.protocol.events import JobFinished, QuarantineNode
from phalanx.cluster.protocol.messages import DeviceError, WorkerExited
from tests.cluster.drive import SECOND, Drive
from tests.cluster.fleets import fleet_of
from tests.cluster.site import HOUR, Site, policy_of

SLOW = Expected(
    step_ns=5 * SECOND, checkpoint_steps=100, checkpoint_ns=SECOND, flush_ns=600 * SECOND
)


def gang(nodes: int) -> GangShape:
    return GangShape(replicas=nodes, tensor=8, slot_gpus=8, slot_cpus=8)


def says(drive: Drive, job: ClusterJob) -> str:
    return str(explain(drive.core.queue, drive.core.view, job.id).reason)


def finish(drive: Drive, job: ClusterJob) -> None:
    drive.tell(JobFinished(job=job.id, generation=job.generation, step=job.step))
    drive.wait(SECOND)


@pytest.mark.parametrize(("priority", "takes"), [(500, False), (-500, True)])
def test_a_broken_node_is_not_replaced_by_one_that_a_job_before_it_was_promised(
    priority: int, takes: bool
) -> None:
    drive = Drive(4, Policy(queue=QueuePolicy(short_weight=0)))
    first = drive.running(1, gang=gang(2), time_limit_ns=HOUR)
    breaks = drive.running(150, gang=gang(1), time_limit_ns=20 * HOUR)
    waits = drive.submit(gang=gang(3), time_limit_ns=HOUR, priority=priority)
    (free,) = {0, 1, 2, 3} - {*first.placement.nodes, *breaks.placement.nodes}
    assert free in drive.core.queue.state.reserved[waits.id].nodes
    drive.tell(DeviceError(node=breaks.placement.nodes[0], cause="hbm_ecc"))
    drive.wait(5 * SECOND)
    assert (breaks.placement is not None and breaks.placement.nodes == (free,)) == takes
    if not takes:
        finish(drive, first)
        assert waits.state == "forming"


def test_a_short_job_takes_the_place_of_a_broken_node_if_it_ends_in_time() -> None:
    drive = Drive(4)
    first = drive.running(1, gang=gang(2), time_limit_ns=20 * HOUR)
    breaks = drive.running(150, gang=gang(1), time_limit_ns=HOUR)
    drive.submit(gang=gang(3), time_limit_ns=HOUR, priority=500)
    (free,) = {0, 1, 2, 3} - {*first.placement.nodes, *breaks.placement.nodes}
    drive.tell(DeviceError(node=breaks.placement.nodes[0], cause="hbm_ecc"))
    drive.wait(5 * SECOND)
    assert breaks.placement.nodes == (free,)


def test_the_time_to_write_a_checkpoint_at_the_limit_counts_before_a_promised_start() -> None:
    drive = Drive(4)
    drive.running(1, gang=gang(2), time_limit_ns=2 * HOUR)
    waits = drive.submit(gang=gang(4), time_limit_ns=HOUR, priority=50)
    start_ns = drive.core.queue.state.reserved[waits.id].start_ns
    left = start_ns - drive.now_ns
    late = drive.submit(gang=gang(2), time_limit_ns=left - 70 * SECOND, expected=SLOW)
    assert late.placement is None
    early = drive.submit(gang=gang(2), time_limit_ns=left - 1500 * SECOND, expected=SLOW)
    assert early.placement is not None


def at_its_limit(drive: Drive) -> tuple[ClusterJob, ClusterJob]:
    """(a job that ran to its limit with steps in memory alone, one that was promised its nodes)."""
    job = drive.running(190, gang=gang(4), time_limit_ns=HOUR)
    waits = drive.submit(gang=gang(4), time_limit_ns=HOUR)
    drive.wait(job.started_ns + HOUR - drive.now_ns)
    return job, waits


def test_who_does_not_leave_in_time_is_not_given_more_where_others_were_promised_its_nodes() -> (
    None
):
    drive = Drive(4)
    job, waits = at_its_limit(drive)
    assert job.state == "draining"
    drive.wait(2 * 60 * SECOND)
    assert job.state == "failed" and waits.state == "forming"


def test_a_gang_that_forms_at_its_limit_does_not_outstay_a_promise() -> None:
    drive = Drive(4)
    job = drive.running(190, gang=gang(4), time_limit_ns=HOUR)
    waits = drive.submit(gang=gang(4), time_limit_ns=HOUR)
    drive.wait(job.started_ns + HOUR - 2 * SECOND - drive.now_ns)
    node = job.placement.nodes[0]
    fact = WorkerExited(job=job.id, generation=1, node=node, rank=0, cause="worker_killed")
    drive.tell(fact)
    drive.wait(90 * SECOND)
    assert job.state == "failed" and waits.state == "forming"
    assert "lost_steps" in [note.reason.code for note in drive.bodies(Notify)]


@pytest.mark.parametrize("limit", ["team", "qos"])
def test_a_large_job_under_a_limit_is_not_passed_for_ever_by_small_ones(limit: str) -> None:
    quotas = {"a": Quota(gpus=16, ceiling=16)} if limit == "team" else {}
    rules = {"normal": Qos(most_gpus=0 if limit == "team" else 16)}
    policy = policy_of(quotas=quotas, qos=rules, starving_ns=24 * HOUR)
    site = Site(fleet_of(4), policy)
    site.submit(8, team="a", run=HOUR // 2, time_limit_ns=HOUR)
    site.play(HOUR // 4)
    large = site.submit(16, team="a", run=HOUR, time_limit_ns=HOUR, priority=5000)
    while site.view.now_ns < 48 * HOUR and large not in site.started:
        for _ in range(2):  # two overlap, and two more wait
            site.submit(8, team="a", run=HOUR, time_limit_ns=HOUR)
        site.play(site.view.now_ns + HOUR // 2)
    assert site.started[large] <= 24 * HOUR + 3 * HOUR


def test_why_tells_for_whom_a_limit_is_kept_and_an_endless_job_keeps_nobody() -> None:
    quotas = {"a": Quota(gpus=16, ceiling=16)}
    site = Site(fleet_of(4), policy_of(quotas=quotas, starving_ns=HOUR))
    site.submit(8, team="a", run=10 * HOUR, time_limit_ns=10 * HOUR)
    site.play(0)
    large = site.submit(16, team="a", run=HOUR, time_limit_ns=HOUR)
    site.play(2 * HOUR)
    small = site.submit(8, team="a", run=HOUR, time_limit_ns=HOUR)
    site.play(3 * HOUR)
    told = str(explain(site.queue, site.view, small).reason)
    assert told == f"what team a may hold is saved for job {large}, which has waited 3 h"
    other = Site(fleet_of(4), policy_of(quotas=quotas, starving_ns=HOUR))
    other.submit(8, team="a", run=10**6 * HOUR)  # nobody knows when it ends
    other.play(0)
    other.submit(16, team="a", run=HOUR, time_limit_ns=HOUR)
    other.play(2 * HOUR)
    small = other.submit(8, team="a", run=HOUR, time_limit_ns=HOUR)
    other.play(3 * HOUR)
    assert small in other.started


def test_why_does_not_repeat_a_promise_whose_node_is_gone() -> None:
    drive = Drive(4)
    drive.running(1, gang=gang(3), time_limit_ns=2 * HOUR)
    waits = drive.submit(gang=gang(4), time_limit_ns=HOUR)
    assert "are kept for it" in says(drive, waits)
    (free,) = set(range(4)) - set(drive.core.view.jobs[1].placement.nodes)
    drive.tell(QuarantineNode(node=free))
    assert "are kept for it" not in says(drive, waits)
    drive.wait(SECOND)  # and the queue was looked at without being asked to
    assert waits.id not in drive.core.queue.state.reserved
    assert "are kept for it" not in says(drive, waits)


def test_a_start_that_others_may_still_overtake_is_not_told_as_the_latest() -> None:
    drive = Drive(2, Policy(queue=QueuePolicy(starving_ns=HOUR // 2)))
    members = Array(count=3, width=1)
    first = drive.submit(gang=gang(2), priority=1000, time_limit_ns=HOUR, array=members)
    waits = drive.submit(gang=gang(2), time_limit_ns=HOUR)
    drive.run(first)
    assert says(drive, waits).endswith("it starts in 45 min to 2 h (others may still go before it)")
    finish(drive, first)
    second = drive.core.view.jobs[first.id + 1]
    assert second.state == "forming" and waits.state == "pending"
    drive.run(second)
    drive.wait(HOUR // 2)
    # It starves: from now on nobody overrides what it is promised.
    assert says(drive, waits).endswith("at the latest")
    finish(drive, second)
    assert waits.state == "forming" and drive.core.view.jobs[first.id + 2].state == "pending"


def test_a_job_that_nothing_could_make_room_for_takes_no_promise_from_the_next() -> None:
    drive = Drive(4)
    drive.tell(QuarantineNode(node=3, request="q"))
    runs = drive.running(1, gang=gang(2), time_limit_ns=HOUR)
    hopeless = [drive.submit(gang=gang(4), time_limit_ns=HOUR, priority=500) for _ in range(3)]
    waits = drive.submit(gang=gang(3), time_limit_ns=HOUR)
    reserved = drive.core.queue.state.reserved
    assert waits.id in reserved and not any(job.id in reserved for job in hopeless)
    later = drive.submit(gang=gang(1), time_limit_ns=2 * HOUR)
    assert later.state == "pending"  # it would be in the way
    finish(drive, runs)
    assert waits.state == "forming"
