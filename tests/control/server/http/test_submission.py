"""What a client sends of a job, and what only the server writes into it."""

from __future__ import annotations

import pytest

from phalanx.cluster.jobs.job import JobSpec
from phalanx.config import job_from_table, resolve
from phalanx.control.server.http.submission import RequestedWork, submission
from phalanx.control.wire.api_types import JobRequest


def test_expectations_plan_and_payload_are_the_servers_alone() -> None:
    own = set(JobSpec.__struct_fields__) - set(JobRequest.__struct_fields__)
    assert own == {"expected", "fallbacks", "plan", "payload", "reports_steps"}


@pytest.mark.parametrize(
    ("axes", "slots"), [({"data": 4}, 4), ({"data": 2, "pipeline": 2}, 4), ({"tensor": 4}, 4)]
)
def test_a_job_file_becomes_a_gang_of_its_axes(axes: dict[str, int], slots: int) -> None:
    table = {"name": "x", "model": {"preset": "tiny"}, "parallel": axes}
    job = resolve(job_from_table({**table, "train": {"global_batch": 32, "device": "cpu"}}), 4)
    shape = submission(RequestedWork(job=job, ranks=4), node_gpus=1).spec.gang
    assert (shape.replicas, shape.slots(shape.replicas)) == (job.parallel.data, slots)
    assert (shape.tensor, shape.pipeline) == (job.parallel.tensor, job.parallel.pipeline)
