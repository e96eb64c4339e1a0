"""A partition's rules hold for everybody, whether a job names the partition or not."""

from __future__ import annotations

import pytest

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import GangShape, JobSpec
from phalanx.cluster.node import Node
from phalanx.cluster.placement.choose import defragment
from phalanx.cluster.policy import Partition, Policy, QueuePolicy
from phalanx.cluster.protocol.commands import Refuse
from phalanx.cluster.protocol.events import Submit
from phalanx.cluster.protocol.messages import DeviceError
from tests.cluster.drive import SECOND, Drive

HOUR = 3600 * SECOND


def site(secret: int, usual: int, **rules: object) -> Drive:
    """Nodes of partition ``secret`` first, then usual ones."""
    kept = Partition(**{"teams": ("red",), "most_time_ns": HOUR, **rules})
    fleet = Fleet(
        Node(name=f"n{i}", partition="secret" if i < secret else "default")
        for i in range(secret + usual)
    )
    return Drive(policy=Policy(queue=QueuePolicy(partitions={"secret": kept})), fleet=fleet)


def gang(nodes: int, **fields: int) -> GangShape:
    return GangShape(replicas=nodes, tensor=8, slot_gpus=8, **fields)


@pytest.mark.parametrize(
    ("team", "limit_ns", "allowed"),
    [("red", HOUR, True), ("blue", HOUR, False), ("red", 2 * HOUR, False), ("red", 0, False)],
)
def test_nodes_of_a_partition_are_closed_to_jobs_that_it_would_refuse(
    team: str, limit_ns: int, allowed: bool
) -> None:
    drive = site(2, 2)
    job = drive.submit(gang=gang(1), team=team, time_limit_ns=limit_ns)
    other = drive.submit(gang=gang(1), team=team, time_limit_ns=limit_ns)
    third = drive.submit(gang=gang(1), team=team, time_limit_ns=limit_ns)
    used = {node for one in (job, other, third) if one.placement for node in one.placement.nodes}
    assert bool(used & {0, 1}) is allowed
    assert third.state == ("forming" if allowed else "pending")


def test_jobs_that_ask_for_the_same_wait_apart_where_their_teams_may_use_other_nodes() -> None:
    drive = site(1, 1)
    first = drive.submit(gang=gang(1), team="blue", time_limit_ns=HOUR)
    waits = drive.submit(gang=gang(1), team="blue", time_limit_ns=HOUR)
    red = drive.submit(gang=gang(1), team="red", time_limit_ns=HOUR)
    assert (first.placement.nodes, red.placement.nodes) == ((1,), (0,))
    assert waits.state == "pending"


def test_a_job_that_only_fits_with_nodes_that_are_closed_to_it_is_refused_with_the_reason() -> None:
    drive = site(2, 2)
    for team, told in (("blue", "keeps it out of secret"), ("red", "")):
        spec = JobSpec(name="j", gang=gang(4), team=team, time_limit_ns=HOUR)
        (command,) = drive.tell(Submit(spec=spec, request="r"))
        assert isinstance(command.body, Refuse) is bool(told)
        assert told in str(command.body.reason)


def test_nothing_replaces_a_node_that_the_job_may_not_use() -> None:
    drive = site(2, 2)
    job = drive.running(150, gang=gang(2), team="blue")
    assert job.placement.nodes == (2, 3)
    drive.tell(DeviceError(node=2, cause="hbm_ecc"))
    drive.wait(SECOND)
    assert job.placement is None


def test_an_elastic_job_does_not_grow_onto_nodes_that_it_may_not_use() -> None:
    drive = site(2, 2)
    job = drive.running(150, gang=gang(4, least_replicas=1, most_replicas=4), team="blue")
    drive.train(job, 1000)
    assert sorted(job.placement.nodes) == [2, 3]


def test_no_move_is_proposed_onto_nodes_that_the_job_may_not_use() -> None:
    drive = site(1, 1)
    half = GangShape(replicas=1, tensor=4, slot_gpus=4)
    blue = drive.submit(gang=half, team="blue", time_limit_ns=HOUR)
    red = drive.submit(gang=half, team="red", time_limit_ns=HOUR, partition="secret")
    assert (blue.placement.nodes, red.placement.nodes) == ((1,), (0,))
    assert defragment(drive.core.view) == ()
