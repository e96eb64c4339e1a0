"""A job that waits and waits gets every node that becomes free, whatever limits others gave."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.node import Node
from phalanx.cluster.policy import Policy, QueuePolicy, Quota
from phalanx.cluster.protocol.events import JobFinished, QuarantineNode
from tests.cluster.drive import Drive
from tests.cluster.fleets import fleet_of
from tests.cluster.site import HOUR, MINUTE, Site, policy_of

RULES = {"starving_ns": 6 * HOUR, "age_weight": 0, "fair_share_weight": 0}


def crowd(site: Site, rng: random.Random, until: int, limit: int, **spec: object) -> list[int]:
    """Jobs that always want more than there is, and end long before their limits."""
    made = []
    while site.view.now_ns < until:
        for _ in range(4):
            run = rng.randint(1, 12) * 10 * MINUTE
            made.append(site.submit(8, run=run, time_limit_ns=limit, priority=50, **spec))
        site.play(site.view.now_ns + 30 * MINUTE)
    return made


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_generous_limits_of_others_do_not_let_a_job_wait_for_ever(seed: int) -> None:
    rng = random.Random(seed)
    site = Site(fleet_of(4), policy_of(**RULES))
    crowd(site, rng, HOUR, limit=200 * HOUR)
    large = site.submit(32, run=HOUR, time_limit_ns=HOUR, priority=-100)
    crowd(site, rng, 40 * HOUR, limit=200 * HOUR)
    # Twice starving, and then as long as the longest of those that run.
    assert site.started[large] <= HOUR + 12 * HOUR + 2 * HOUR + 30 * MINUTE


def test_one_at_a_time_the_one_that_waited_longest_first() -> None:
    site = Site(fleet_of(4), policy_of(**RULES))
    rng = random.Random(1)
    crowd(site, rng, HOUR, limit=200 * HOUR)
    large = [
        site.submit(32, team=team, run=HOUR, time_limit_ns=HOUR, priority=-100) for team in "abc"
    ]
    crowd(site, rng, 60 * HOUR, limit=200 * HOUR)
    starts = [site.started[number] for number in large]
    assert starts == sorted(starts)
    assert starts[2] <= HOUR + 12 * HOUR + 3 * (3 * HOUR + 30 * MINUTE)


def test_nobody_waits_for_a_job_that_cannot_come() -> None:
    site = Site(fleet_of(4), policy_of(**RULES))
    site.submit(8, run=10**6 * HOUR)  # nobody knows when this one will end
    site.look()
    large = site.submit(32, run=HOUR, time_limit_ns=HOUR, priority=-100)
    crowd(site, random.Random(1), 60 * HOUR, limit=2 * HOUR)
    assert large not in site.started
    assert sum(at > 50 * HOUR for at in site.started.values()) > 10


def node_job(drive: Drive, hours: int, **fields: object) -> ClusterJob:
    return drive.running(1, gang=gang(1), time_limit_ns=hours * HOUR, **fields)


def gang(nodes: int, least: int = 0) -> GangShape:
    return GangShape(replicas=nodes, least_replicas=least, tensor=8, slot_gpus=8, slot_cpus=8)


def ends(drive: Drive, job: ClusterJob) -> None:
    drive.tell(JobFinished(job=job.id, generation=job.generation, step=job.step))
    drive.wait(MINUTE)


@pytest.mark.parametrize("wish", ["growth", "spare"])
def test_what_is_collected_for_a_job_is_not_taken_by_one_that_runs(wish: str) -> None:
    drive = Drive(5, Policy(queue=QueuePolicy(starving_ns=HOUR)))
    first, second = (node_job(drive, 200) for _ in range(2))
    for _ in range(2):
        node_job(drive, 100)  # whose nodes the late one is promised
    wants = {"gang": gang(2, least=1)} if wish == "growth" else {"gang": gang(1), "spares": 1}
    runs = drive.running(1, time_limit_ns=300 * HOUR, **wants)
    late = drive.submit(gang=gang(2), time_limit_ns=HOUR, priority=-1000)
    assert late.state == "pending" and runs.placement.replicas == 1
    drive.wait(3 * HOUR)
    ends(drive, first)
    assert runs.placement.replicas == 1 and not runs.placement.spares
    ends(drive, second)
    assert late.state == "forming"


def test_what_is_saved_under_a_limit_is_not_taken_by_one_that_grows() -> None:
    rules = QueuePolicy(starving_ns=HOUR, quotas={"t": Quota(gpus=0, ceiling=24)})
    drive = Drive(6, Policy(queue=rules))
    first, second = (node_job(drive, 200, team="t") for _ in range(2))
    runs = drive.running(1, gang=gang(2, least=1), time_limit_ns=300 * HOUR, team="t")
    late = drive.submit(gang=gang(2), time_limit_ns=HOUR, team="t")
    assert late.state == "pending" and runs.placement.replicas == 1
    drive.wait(2 * HOUR)
    ends(drive, first)
    assert runs.placement.replicas == 1
    ends(drive, second)
    assert late.state == "forming"


def test_nothing_is_saved_under_a_limit_for_a_job_whose_nodes_are_away() -> None:
    rules = QueuePolicy(starving_ns=HOUR, quotas={"t": Quota(gpus=0, ceiling=16)})
    fleet = Fleet(Node(name=f"n{i}", kind="a100" if i < 2 else "h100") for i in range(5))
    drive = Drive(policy=Policy(queue=rules), fleet=fleet)
    node_job(drive, 300, team="t", constraint="h100")
    late = drive.submit(gang=gang(2), time_limit_ns=HOUR, team="t", constraint="a100")
    assert late.state == "pending"
    for node in (0, 1):
        drive.tell(QuarantineNode(node=node, request="q"))
    drive.wait(2 * HOUR)
    other = drive.submit(gang=gang(1), time_limit_ns=HOUR, team="t", constraint="h100")
    assert other.state == "forming"
