"""What a job waits for that is to start where others fail."""

from __future__ import annotations

import pytest

from phalanx.cluster.job_relations import Array, Dependency
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.protocol.events import Cancel, JobFinished
from tests.cluster.drive import SECOND, Drive

ONE = GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)


def end(drive: Drive, job: ClusterJob, *, well: bool) -> None:
    if well:
        drive.run(job)
        drive.tell(JobFinished(job=job.id, generation=job.generation, step=job.step))
    else:
        drive.tell(Cancel(job=job.id))
    drive.wait(SECOND)


@pytest.mark.parametrize(
    ("kind", "well", "state", "said"),
    [
        ("afternotok", False, "forming", ""),
        ("afternotok", True, "pending", "can never start: job 1, which must fail first, succeeded"),
        ("afterok", True, "forming", ""),
        ("afterok", False, "pending", "can never start: job 1, which must succeed first"),
        ("afterany", False, "forming", ""),
        ("afterany", True, "forming", ""),
    ],
)
def test_what_becomes_of_a_job_decides_about_those_that_wait_for_it(kind, well, state, said):
    drive = Drive()
    first = drive.submit(gang=ONE)
    waiting = drive.submit(gang=ONE, after=(Dependency(kind, first.id),))
    assert waiting.state == "pending"
    end(drive, first, well=well)
    assert waiting.state == state and said in str(waiting.why)
    assert waiting.never == (state == "pending")
    late = drive.submit(gang=ONE, after=(Dependency(kind, first.id),))
    assert late.state == state and late.never == waiting.never


@pytest.mark.parametrize(("failures", "starts"), [(0, False), (1, True), (3, True)])
def test_one_failure_in_an_array_is_enough(failures, starts):
    drive = Drive()
    first = drive.submit(gang=ONE, array=Array(3))
    waiting = drive.submit(gang=ONE, after=(Dependency("afternotok", first.id),))
    members = [drive.core.view.jobs[first.id + index] for index in range(3)]
    for index, job in enumerate(members):
        assert waiting.state == "pending" and not waiting.never
        end(drive, job, well=index >= failures)
    assert (waiting.state == "forming", waiting.never) == (starts, not starts)
