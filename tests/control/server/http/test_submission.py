"""What a job file tells the core about its gang."""

from __future__ import annotations

import pytest

from phalanx.config import job_from_table, resolve
from phalanx.control.server.http.submission import RequestedWork, submission


@pytest.mark.parametrize(
    ("axes", "shares"),
    [
        ({"data": 4, "zero": 0}, 4),
        ({"data": 4, "zero": 1}, 4),
        ({"data": 4, "zero": 2}, 0),
        ({"data": 4, "zero": 3}, 0),
        ({"data": 2, "pipeline": 2, "zero": 1}, 0),
    ],
    ids=["ddp", "zero1", "zero2", "zero3", "pipeline"],
)
def test_a_slow_replica_is_offered_less_work_only_where_that_helps(
    axes: dict[str, int], shares: int
) -> None:
    table = {
        "name": "x",
        "model": {"preset": "tiny"},
        "parallel": axes,
        "train": {"steps": 10, "global_batch": 32, "micro_batch": 2, "device": "cpu"},
    }
    job = resolve(job_from_table(table), 4)
    found = submission(RequestedWork(job=job, ranks=4), node_gpus=1)
    assert found.spec.expected.micro_batches == shares
