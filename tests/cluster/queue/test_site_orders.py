"""Orders about the site that make no sense are refused with the reason, and change nothing."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.forecast.why import explain
from phalanx.cluster.jobs.job import ClusterJob
from phalanx.cluster.node import NodeState
from phalanx.cluster.policy import Policy, QueuePolicy, Quota, SparePolicy
from phalanx.cluster.protocol.commands import Accept, Notify, Refuse
from phalanx.cluster.protocol.events import (
    DrainNode,
    EventBody,
    GangDrained,
    Hold,
    JobFinished,
    NodeJoined,
    NodeRepaired,
    NodeSilent,
    QuarantineNode,
    RaiseBudget,
    Requeue,
    SetQuota,
    SetReservation,
)
from phalanx.cluster.protocol.messages import CheckResult, Inventory, WorkerExited
from phalanx.cluster.queue import windows
from phalanx.cluster.reasons import reason
from phalanx.cluster.state import Reservation
from phalanx.config import ConfigError
from tests.cluster.drive import SECOND, SHAPE, Drive, fleet_of

HOUR = 3600 * SECOND


def window(**fields: object) -> SetReservation:
    usual = {"name": "w", "start_ns": HOUR, "end_ns": 2 * HOUR, "gpus": 8, "request": "ask"}
    return SetReservation(**{**usual, **fields})


@pytest.mark.parametrize(
    ("order", "told"),
    [
        (SetQuota(team="", gpus=8), 'team = ""'),
        (SetQuota(team="a", gpus=-1), "gpus = -1: must not be negative"),
        (SetQuota(team="a", gpus=8, ceiling=4), "below the 8 GPUs that the team owns"),
        (SetQuota(team="a", gpus=8, ceiling=-4), "ceiling = -4"),
        (SetQuota(team="a", gpus=8, weight=0), "weight = 0"),
        (window(name=""), 'name = ""'),
        (window(gpus=-8), "gpus = -8"),
        (window(gpus=10**6), "the fleet has 64"),
        (window(gpus=0), "one of both"),
        (window(nodes=(1,)), "one of both"),
        (window(gpus=0, nodes=(99,)), "no node 99"),
        (window(gpus=0, nodes=(-1,)), "no node -1"),
        (window(teams=("",)), "a team must have a name"),
        (window(start_ns=-2, end_ns=-1), "must not be in the past"),
        (window(end_ns=1 << 70), "end_ns"),
        (window(name="nosuch", end_ns=0), "no reservation"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(order: EventBody, told: str) -> None:
    drive = Drive(8)
    before = drive.core.view.quotas.copy(), drive.core.view.reservations.copy()
    (command,) = drive.tell(order)
    assert isinstance(command.body, Refuse) and told in str(command.body.reason)
    assert (drive.core.view.quotas, drive.core.view.reservations) == before


def test_a_negative_budget_is_refused_and_the_old_one_stays() -> None:
    drive = Drive()
    job = drive.running(budget_gpu_seconds=10**6)
    (command,) = drive.tell(RaiseBudget(job=job.id, budget_gpu_seconds=-5))
    assert isinstance(command.body, Refuse) and "budget_gpu_seconds = -5" in str(
        command.body.reason
    )
    assert job.budget_gpu_seconds == 10**6


def test_a_reservation_is_set_changed_removed_and_forgotten_when_it_is_over() -> None:
    drive = Drive(8)
    drive.tell(window())
    assert drive.core.view.reservations["w"].gpus == 8
    drive.wait(SECOND)
    first = drive.core.queue.windows.members(drive.core.view, "w")
    drive.tell(window(gpus=24))
    drive.wait(SECOND)
    assert len(drive.core.queue.windows.members(drive.core.view, "w")) == 3 > len(first)
    drive.tell(window(name="v"))
    (command,) = drive.tell(window(name="v", end_ns=0))
    assert isinstance(command.body, Accept) and list(drive.core.view.reservations) == ["w"]
    drive.wait(3 * HOUR)
    drive.tell(window(name="u", start_ns=5 * HOUR, end_ns=6 * HOUR))
    assert list(drive.core.view.reservations) == ["u"]


def members(drive: Drive, name: str) -> tuple[int, ...]:
    return drive.core.queue.windows.members(drive.core.view, name)


def test_reservations_of_gpus_for_the_same_time_have_nodes_of_their_own() -> None:
    drive = Drive(4)
    drive.tell(window(name="a", gpus=16, teams=("A",)))
    drive.tell(window(name="b", gpus=16, teams=("B",), start_ns=HOUR + SECOND))
    assert not set(members(drive, "a")) & set(members(drive, "b"))
    (command,) = drive.tell(window(name="c", teams=("C",)))
    assert isinstance(command.body, Refuse) and "(a, b)" in str(command.body.reason)
    drive.tell(window(name="later", gpus=32, start_ns=3 * HOUR, end_ns=4 * HOUR))
    assert len(members(drive, "later")) == 4
    for team in ("A", "B"):  # both can use what they were given
        job = drive.submit(team=team, time_limit_ns=2 * HOUR - 60 * SECOND)
        assert job.state == "forming"


def test_a_reservation_of_gpus_leaves_named_nodes_of_others_alone() -> None:
    drive = Drive(4)
    drive.tell(window(name="upkeep", gpus=0, nodes=(0, 2)))
    drive.tell(window(name="a", gpus=16, teams=("A",)))
    assert members(drive, "a") == (1, 3)
    (command,) = drive.tell(window(name="a", gpus=24, teams=("A",)))  # what it has itself is free
    assert isinstance(command.body, Refuse) and members(drive, "a") == (1, 3)


def test_nodes_that_another_reservation_keeps_cannot_be_named_unless_for_the_same_teams() -> None:
    drive = Drive(4)
    drive.tell(window(name="a", gpus=0, nodes=(0, 1), teams=("A", "B")))
    (command,) = drive.tell(window(name="b", gpus=0, nodes=(1, 2), teams=("B",)))
    assert isinstance(command.body, Refuse)
    assert '"a" keeps n1' in str(command.body.reason) and "b" not in drive.core.view.reservations
    after = {"start_ns": 2 * HOUR, "end_ns": 3 * HOUR}
    for fields in ({"teams": ("B", "A")}, {"teams": (), **after}):
        (command,) = drive.tell(window(name="c", gpus=0, nodes=(1, 2), **fields))
        assert isinstance(command.body, Accept)


def test_nodes_of_a_reservation_are_chosen_when_it_is_made() -> None:
    drive = Drive(4)
    drive.tell(window(gpus=16))
    before = drive.core.snapshot()
    assert len(members(drive, "w")) == 2 and drive.core.snapshot() == before


def short_of_nodes(drive: Drive) -> list[str]:
    notes = [note.reason for note in drive.bodies(Notify)]
    return [str(told) for told in notes if told.code == "window_short"]


@pytest.mark.parametrize("loss", [NodeSilent, QuarantineNode, DrainNode])
def test_a_reservation_of_gpus_finds_another_node_for_one_that_it_lost(loss) -> None:
    drive = Drive(4)
    drive.tell(window(gpus=16, teams=("A",)))
    lost, kept = members(drive, "w")
    busy = drive.running(gang=structs.replace(SHAPE, replicas=1))
    (idle,) = {0, 1, 2, 3} - {lost, kept, *busy.placement.nodes}
    drive.tell(loss(node=lost))
    drive.wait(SECOND)
    assert members(drive, "w") == tuple(sorted((kept, idle))), "one that nothing runs on"
    assert not short_of_nodes(drive)
    drive.wait(HOUR - drive.now_ns)
    job = drive.submit(team="A")
    assert job.state == "forming" and set(job.placement.nodes) == {kept, idle}


def test_a_lost_node_of_a_reservation_is_not_replaced_by_one_that_another_keeps() -> None:
    drive = Drive(4)
    drive.tell(window(name="a", gpus=16, teams=("A",)))
    drive.tell(window(name="b", gpus=16, teams=("B",)))
    before = members(drive, "b")
    drive.tell(NodeSilent(node=members(drive, "a")[0]))
    drive.wait(SECOND)
    assert members(drive, "b") == before and not set(members(drive, "a")) & set(before)
    assert len(short_of_nodes(drive)) == 1


def test_it_is_told_once_that_a_reservation_lacks_nodes_and_again_when_it_does_anew() -> None:
    drive = Drive(2)
    drive.tell(window(gpus=16, start_ns=HOUR, end_ns=9 * HOUR, teams=("A",)))
    for _ in range(2):
        drive.tell(NodeSilent(node=1))
        for _ in range(3):
            drive.submit(name="waits", gang=structs.replace(SHAPE, replicas=1))
    assert len(short_of_nodes(drive)) == 1
    assert "8 of its 16 GPUs cannot be had" in short_of_nodes(drive)[0]
    drive.tell(NodeRepaired(node=1))
    drive.tell(CheckResult(node=1, check="full", passed=True))
    drive.wait(SECOND)
    drive.tell(NodeSilent(node=1))
    drive.wait(SECOND)
    assert len(short_of_nodes(drive)) == 2


def test_a_reservation_of_gpus_finds_more_nodes_when_one_comes_back_smaller() -> None:
    drive = Drive(4)
    drive.tell(window(gpus=16, teams=("A",)))
    smaller, kept = members(drive, "w")
    new = structs.replace(drive.core.view.fleet.nodes[smaller], gpus=4)
    drive.tell(NodeJoined(node=new, inventory=Inventory(1)))
    drive.wait(SECOND)
    found = members(drive, "w")
    gpus = [drive.core.view.fleet.nodes[node].gpus for node in found]
    assert sum(gpus) >= 16 and {smaller, kept} <= set(found) and not short_of_nodes(drive)


def test_a_pool_spare_that_is_reserved_for_a_team_is_lent_to_it() -> None:
    drive = Drive(3, Policy(spares=SparePolicy(nodes=1)))
    (spare,) = (n for n in range(3) if drive.core.view.fleet.state(n) is NodeState.SPARE)
    drive.tell(window(gpus=0, nodes=(spare,), start_ns=HOUR, end_ns=9 * HOUR, teams=("A",)))
    drive.wait(HOUR)
    one = structs.replace(SHAPE, replicas=1)
    others = [drive.running(gang=one, team="B") for _ in range(2)]
    job = drive.submit(gang=one, team="A")
    assert len(others) == 2 and job.state == "forming" and job.placement.nodes == (spare,)


def test_asking_why_chooses_no_nodes_for_a_reservation() -> None:
    drive = Drive(3)
    drive.tell(window(gpus=16, start_ns=SECOND, end_ns=HOUR, teams=("A",)))
    job = drive.submit(team="B", gang=structs.replace(SHAPE, replicas=2))
    assert job.state == "pending"
    lost = members(drive, "w")[0]
    drive.core.view.fleet.set_state(lost, NodeState.DEAD, drive.now_ns, reason("x"))
    before = drive.core.snapshot()
    explain(drive.core.queue, drive.core.view, job.id)
    assert drive.core.snapshot() == before


def test_a_restored_core_replaces_nodes_of_reservations_in_the_same_way() -> None:
    drive = Drive(4)
    drive.tell(window(gpus=16, teams=("A",)))
    again = Core.restore(drive.core.snapshot())
    seen = len(drive.log)
    drive.tell(NodeSilent(node=members(drive, "w")[0]))
    drive.wait(SECOND)
    for event in drive.log[seen:]:
        again.handle(event)
    assert again.snapshot() == drive.core.snapshot()


def test_a_core_is_not_made_with_rules_that_make_no_sense() -> None:
    rules = QueuePolicy(quotas={"a": Quota(gpus=-1), "": Quota(gpus=1)})
    with pytest.raises(ConfigError, match=r"queue\.quotas\.a\.gpus = -1"):
        Core(fleet_of(2), Policy(queue=rules))


def stopped_for_its_budget(*, forming: bool = False) -> tuple[Drive, ClusterJob]:
    """A job that used its budget, and stops with its state safe; or forms for that only."""
    drive = Drive(4)
    job = drive.running(190, budget_gpu_seconds=16 * 1000)
    if forming:
        drive.wait((16 * 1000 // 16 - 10) * SECOND - drive.now_ns)
        drive.tell(
            WorkerExited(
                job=job.id,
                generation=job.generation,
                node=job.placement.nodes[0],
                rank=0,
                cause="worker_killed",
            )
        )
    while job.gang is not None and job.gang.ending is None:
        drive.wait(SECOND)
    assert job.gang is not None and job.gang.ending == "failed"
    return drive, job


def test_a_budget_raised_while_the_job_stops_brings_it_back() -> None:
    drive, job = stopped_for_its_budget()
    assert job.state == "draining"
    (command,) = drive.tell(RaiseBudget(job=job.id, budget_gpu_seconds=16 * 900))
    assert isinstance(command.body, Refuse) and "set a budget above" in str(command.body.reason)
    (command,) = drive.tell(RaiseBudget(job=job.id, budget_gpu_seconds=16 * 5000))
    assert isinstance(command.body, Accept)
    drive.tell(GangDrained(job=job.id, generation=job.generation, step=job.step, durable=True))
    drive.wait(SECOND)
    assert job.state == "forming"
    drive.run(job)


def test_a_budget_raised_while_the_gang_forms_to_save_lets_it_go_on() -> None:
    drive, job = stopped_for_its_budget(forming=True)
    assert job.state == "forming"
    drive.tell(RaiseBudget(job=job.id, budget_gpu_seconds=0))
    drive.run(job)


def test_a_job_that_ends_for_good_is_not_sent_back_or_held() -> None:
    drive, job = stopped_for_its_budget(forming=True)
    for order in (Requeue(job=job.id), Requeue(job=job.id, hold=True)):
        (command,) = drive.tell(order)
        assert isinstance(command.body, Refuse) and "about to end" in str(command.body.reason)
    drive, job = stopped_for_its_budget()
    (command,) = drive.tell(Hold(job=job.id))
    assert isinstance(command.body, Refuse) and not job.held


def test_nodes_that_a_reservation_has_too_many_of_are_for_others_that_lack_some() -> None:
    drive = Drive(4)
    drive.tell(window(name="q", gpus=16, start_ns=9 * HOUR, end_ns=12 * HOUR))
    drive.tell(window(name="r", gpus=16, start_ns=9 * HOUR, end_ns=12 * HOUR, teams=("A",)))
    away, broken = members(drive, "r"), members(drive, "q")[0]
    for node in away:
        drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)
    new = structs.replace(drive.core.view.fleet.nodes[0], name="new")
    drive.tell(NodeJoined(node=new, inventory=Inventory(1)))
    drive.wait(SECOND)
    drive.tell(QuarantineNode(node=broken))
    for node in away:
        drive.tell(NodeRepaired(node=node))
        drive.tell(CheckResult(node=node, check="full", passed=True), SECOND)
        drive.wait(SECOND)
    found = [*members(drive, "q"), *members(drive, "r")]
    assert sorted(found) == sorted({*range(5)} - {broken})
    assert not drive.core.queue.state.short


@pytest.mark.parametrize(("owner", "kept"), [("A", 1), ("B", 0)])
def test_a_reservation_with_too_many_nodes_keeps_those_its_teams_use_then_idle_ones(
    owner: str, kept: int
) -> None:
    drive = Drive(3)
    one = structs.replace(SHAPE, replicas=1)
    first = drive.running(gang=one, team="B")
    job = drive.running(gang=one, team=owner)
    assert job.placement.nodes == (1,)
    drive.tell(JobFinished(job=first.id, generation=1, step=first.step))
    reserved = Reservation(name="w", start_ns=HOUR, end_ns=2 * HOUR, gpus=8, teams=("A",))
    assert windows.trimmed(drive.core.view, reserved, (0, 1)) == (kept,)
