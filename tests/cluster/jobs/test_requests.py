"""Orders about whole arrays: cancelled, held and released as one."""

from __future__ import annotations

from phalanx.cluster.job_relations import Array
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.protocol.commands import Accept, Form, Refuse
from phalanx.cluster.protocol.events import Cancel, EventBody, Hold
from tests.cluster.drive import SECOND, Drive

ONE = GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)


def array(drive: Drive, count: int, width: int = 0, **fields: object) -> list[ClusterJob]:
    first = drive.submit(gang=ONE, array=Array(count, width), **fields)
    return [drive.core.view.jobs[first.id + index] for index in range(count)]


def told(drive: Drive, order: EventBody) -> str:
    (answer,) = (
        command.body for command in drive.tell(order) if isinstance(command.body, Accept | Refuse)
    )
    drive.wait(SECOND)
    return str(answer.reason)


def test_all_jobs_of_an_array_are_cancelled_and_none_takes_anothers_turn():
    drive = Drive()
    jobs = array(drive, 6, width=2)
    assert [job.state for job in jobs] == ["forming"] * 2 + ["pending"] * 4
    started = len(drive.bodies(Form))
    assert told(drive, Cancel(job=jobs[3].id, array=True)) == "cancelled 6 jobs of the array"
    assert {job.state for job in jobs} == {"cancelled"} and len(drive.bodies(Form)) == started
    assert "all jobs of the array" in told(drive, Cancel(job=jobs[0].id, array=True))
    alone = drive.submit(gang=ONE)
    assert "is no member of an array" in told(drive, Cancel(job=alone.id, array=True))
    assert alone.state == "forming"


def test_an_array_is_submitted_held_and_released_as_one():
    drive = Drive()
    jobs = array(drive, 4, width=2, held=True)
    assert {job.state for job in jobs} == {"pending"} and all(job.held for job in jobs)
    user = Hold(job=jobs[0].id, held=False, operator=False, array=True)
    assert told(drive, user) == "4 jobs of the array are released"
    assert [job.state for job in jobs] == ["forming"] * 2 + ["pending"] * 2
    assert told(drive, Hold(job=jobs[1].id, array=True)).startswith("2 jobs of the array wait")
    assert told(drive, user) == "0 jobs of the array are released"  # an operator holds them
    assert told(drive, Hold(job=jobs[1].id, held=False, array=True)).startswith("2 jobs")


def test_each_member_of_an_array_is_told_its_index():
    drive = Drive()
    first = drive.submit(gang=ONE, array=Array(3, first=10, step=5))
    found = {form.job: form.array for form in drive.bodies(Form)}
    assert [found[first.id + n].index for n in range(3)] == [10, 15, 20]
    variables = found[first.id + 2].environment
    assert variables["PHALANX_ARRAY_INDEX"] == "20" and variables["PHALANX_ARRAY_COUNT"] == "3"
    assert variables["PHALANX_ARRAY_JOB"] == str(first.id)
    alone = drive.submit(gang=ONE)
    assert next(form for form in drive.bodies(Form) if form.job == alone.id).array is None
