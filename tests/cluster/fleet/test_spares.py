"""Spares that the core keeps: whole, idle, warm, and given up where a job needs them."""

from __future__ import annotations

from msgspec import structs

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import GangShape
from phalanx.cluster.node import Node, NodeState
from phalanx.cluster.policy import Policy, Qos, QueuePolicy, SparePolicy
from phalanx.cluster.protocol.commands import Check, Form, Stop
from phalanx.cluster.protocol.events import (
    Cancel,
    JobFinished,
    NodeRepaired,
    NodeSilent,
    Requeue,
    SetReservation,
)
from phalanx.cluster.protocol.messages import CheckResult, DeviceError, WorkerExited
from tests.cluster.drive import EXPECTED, SECOND, SHAPE, Drive

HOUR = 3600 * SECOND


def test_many_workers_taken_by_one_incident_are_one_failure_of_the_job():
    drive = Drive(8)
    shape = GangShape(replicas=4, tensor=8, slot_gpus=8)
    job = drive.running(gang=shape)
    for node in job.placement.nodes:
        exited = WorkerExited(
            job=job.id, generation=1, node=node, rank=0, cause="software_bug", step=job.step
        )
        drive.tell(exited)
    drive.wait(SECOND)
    assert job.state == "forming" and job.failures_there == 1


def test_a_pool_spare_is_lent_to_the_job_that_only_it_suits():
    nodes = [Node(name=f"n{i}", kind="h100") for i in range(3)]
    lab = Node(name="lab", kind="h100", partition="lab")
    drive = Drive(fleet=Fleet([*nodes, lab]), policy=Policy(spares=SparePolicy(nodes=4)))
    assert all(drive.core.view.fleet.state(node) is NodeState.SPARE for node in range(4))
    one = GangShape(replicas=1, tensor=8, slot_gpus=8)
    job = drive.submit(gang=one, partition="lab")
    assert job.state == "forming" and job.placement.nodes == (3,)
    others = [drive.core.view.fleet.state(node) for node in range(3)]
    assert others == [NodeState.SPARE] * 3, "they would not help it"


def test_the_pool_takes_no_node_that_a_waiting_job_could_not_do_without():
    nodes = [Node(name=f"n{i}", kind="h100") for i in range(2)]
    labs = [Node(name=f"lab{i}", kind="h100", partition="lab") for i in range(2)]
    drive = Drive(fleet=Fleet([*nodes, *labs]), policy=Policy(spares=SparePolicy(nodes=1)))
    one = GangShape(replicas=1, tensor=8, slot_gpus=8)
    both = GangShape(replicas=2, tensor=8, slot_gpus=8)
    first = drive.running(gang=one, partition="lab")
    waits = drive.submit(gang=both, partition="lab")
    drive.tell(JobFinished(job=first.id, generation=first.generation, step=first.step))
    drive.wait(SECOND)
    assert waits.state == "forming"


def test_a_spare_is_never_a_node_that_the_job_works_on():
    drive = Drive(3)
    half = GangShape(replicas=1, tensor=4, slot_gpus=4)
    job = drive.running(gang=half, spares=2)
    drive.tell(NodeSilent(node=job.placement.spares[0]), SECOND)
    drive.wait(60 * SECOND)
    assert not set(job.placement.spares) & set(job.placement.nodes)
    for node in job.placement.nodes:
        assert drive.core.view.fleet.state(node) is NodeState.HEALTHY


def test_a_new_spare_starts_its_workers_at_once():
    drive = Drive(4)
    job = drive.running(gang=SHAPE, spares=1)
    spare = job.placement.spares[0]
    drive.tell(NodeSilent(node=spare), SECOND)
    drive.wait(60 * SECOND)
    (fresh,) = job.placement.spares
    assert fresh != spare
    warm = [c for c in drive.sent if isinstance(c.body, Form) and c.target == (fresh,)]
    assert warm and fresh in warm[-1].body.spares and warm[-1].body.generation == job.generation


def test_a_spare_under_suspicion_stands_by_no_more():
    drive = Drive(3)
    job = drive.running(gang=SHAPE, spares=1)
    spare = job.placement.spares[0]
    drive.tell(DeviceError(node=spare, cause="thermal"), SECOND)
    assert spare not in job.placement.spares
    drive.core.ledger.check(drive.core.view)


def test_pool_spares_are_lent_to_a_job_that_cannot_start_without_them():
    drive = Drive(6, Policy(spares=SparePolicy(nodes=2)))
    shape = GangShape(replicas=4, tensor=8, slot_gpus=8, whole_nodes=True)
    job = drive.running(gang=shape)
    drive.tell(NodeSilent(node=job.placement.nodes[0]), SECOND)
    drive.wait(SECOND)
    drive.run(job)
    drive.tell(Requeue(job=job.id, request="r"), SECOND)
    drive.wait(600 * SECOND)
    assert job.placement is not None and len(job.placement.nodes) == 4


def test_the_pool_is_filled_again_when_nobody_lacks_nodes():
    drive = Drive(6, Policy(spares=SparePolicy(nodes=2)))
    shape = GangShape(replicas=4, tensor=8, slot_gpus=8, whole_nodes=True)
    job = drive.running(gang=shape)
    broken = job.placement.nodes[0]
    drive.tell(NodeSilent(node=broken), SECOND)
    drive.wait(SECOND)
    drive.run(job)
    commands = drive.tell(NodeRepaired(node=broken), SECOND)
    check = next(command for command in commands if isinstance(command.body, Check))
    passed = CheckResult(node=broken, check="full", passed=True, command=check.sequence)
    drive.tell(passed, SECOND)
    drive.wait(SECOND)
    assert int((drive.core.view.fleet.columns.state == NodeState.SPARE).sum()) == 2


def test_a_spare_beside_the_buddy_is_taken_last():
    """What takes a node must not take the copy of its snapshot too."""
    leaves = [0, 0, 1, 1, 2, 2, 3, 3]
    fleet = Fleet(
        Node(name=f"n{i}", gpus=8, kind="h100", rack=f"r{leaf}", leaf=f"l{leaf}", pod="p")
        for i, leaf in enumerate(leaves)
    )
    drive = Drive(fleet=fleet)
    job = drive.running(gang=GangShape(replicas=2, tensor=8, slot_gpus=8), spares=6)
    first, second = job.placement.nodes
    assert {leaves[first], leaves[second]} != {0, 1, 2, 3}
    drive.tell(NodeSilent(node=second), 3600 * SECOND)
    drive.wait(SECOND)
    assert job.placement.nodes[0] == first
    assert leaves[job.placement.nodes[1]] != leaves[first]


def test_a_spare_whose_workers_still_start_is_taken_last():
    drive = Drive(6)
    job = drive.running(spares=1)
    late = drive.core.view.fleet
    (spare,) = job.placement.spares
    drive.tell(NodeSilent(node=spare), 3600 * SECOND)
    drive.wait(SECOND)
    (young,) = job.placement.spares
    assert late.since_ns(young) > drive.now_ns - EXPECTED.start_ns
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(SECOND)
    # It is the only one, so it is taken; but its workers are waited for as new ones are.
    assert young in job.placement.nodes
    assert drive.last_form().reason.facts["loss"] >= 16 * EXPECTED.start_ns // SECOND


def test_a_job_does_not_wait_for_its_spares_and_gets_them_when_there_are_some():
    drive = Drive(4)
    away = (1, 3)
    for node in away:
        drive.tell(NodeSilent(node=node))
    job = drive.submit(spares=2)
    assert job.state == "forming" and job.placement.spares == ()
    drive.run(job)
    for node in away:
        commands = drive.tell(NodeRepaired(node=node), SECOND)
        check = next(command for command in commands if isinstance(command.body, Check))
        passed = CheckResult(node=node, check="full", passed=True, command=check.sequence)
        drive.tell(passed, SECOND)
    drive.wait(SECOND)
    assert set(job.placement.spares) == set(away)


def test_nobody_is_stopped_for_a_spare():
    urgent = QueuePolicy(qos={"normal": Qos(), "urgent": Qos(priority=100, preempts=True)})
    drive = Drive(3, Policy(queue=urgent))
    borrower = drive.running(gang=GangShape(replicas=1, tensor=8, slot_gpus=8), preemptible=True)
    drive.wait(3600 * SECOND)
    job = drive.submit(qos="urgent", spares=1)
    assert job.state == "forming" and job.placement.spares == ()
    assert borrower.state == "running"


def shut(drive: Drive, node: int, teams: tuple[str, ...] = ()) -> None:
    """A window on one node that opens in ten minutes; waits until it has opened."""
    start_ns = drive.now_ns + 600 * SECOND
    end_ns = start_ns + 5 * HOUR
    window = SetReservation(name="w", start_ns=start_ns, end_ns=end_ns, nodes=(node,), teams=teams)
    drive.tell(window)
    drive.wait(601 * SECOND)


def test_a_jobs_spare_stands_by_until_a_window_opens_there_and_is_not_used_in_it():
    drive = Drive(3)
    job = drive.running(spares=1)
    (spare,) = job.placement.spares
    start_ns = drive.now_ns + 600 * SECOND
    window = SetReservation(name="w", start_ns=start_ns, end_ns=start_ns + HOUR, nodes=(spare,))
    drive.tell(window)
    drive.wait(500 * SECOND)
    assert job.placement.spares == (spare,)
    drive.wait(101 * SECOND)
    assert not job.placement.spares and drive.core.view.fleet.state(spare) is NodeState.HEALTHY
    stops = [command for command in drive.sent if isinstance(command.body, Stop)]
    assert stops[-1].target == (spare,), "its workers there end"
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(10 * SECOND)
    assert job.state == "pending" and not drive.core.view.fleet.held[spare]


def test_a_spare_that_must_be_empty_in_a_moment_is_not_swapped_in():
    drive = Drive(3)
    job = drive.running(spares=1)
    (spare,) = job.placement.spares
    start_ns = drive.now_ns + 2 * SECOND
    window = SetReservation(name="w", start_ns=start_ns, end_ns=start_ns + HOUR, nodes=(spare,))
    drive.tell(window)
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(10 * SECOND)
    assert job.state == "pending" and not drive.core.view.fleet.held[spare]


def test_a_job_of_a_reservation_starts_on_what_was_the_spare_of_another_team():
    drive = Drive(3)
    job = drive.running(spares=1, team="x")
    (spare,) = job.placement.spares
    shut(drive, spare, teams=("y",))
    mine = drive.submit(gang=structs.replace(SHAPE, replicas=1), team="y", time_limit_ns=HOUR)
    assert mine.placement is not None and mine.placement.nodes == (spare,)


def test_a_team_keeps_its_spares_in_its_own_reservation():
    drive = Drive(3)
    job = drive.running(spares=1, team="x")
    spares = job.placement.spares
    shut(drive, spares[0], teams=("x",))
    assert job.placement.spares == spares


def test_a_pool_spare_is_none_while_a_window_is_open_and_is_one_again_after_it():
    drive = Drive(3, Policy(spares=SparePolicy(nodes=1)))
    fleet = drive.core.view.fleet
    (spare,) = (node for node in range(3) if fleet.state(node) is NodeState.SPARE)
    job = drive.running()
    shut(drive, spare)
    assert fleet.state(spare) is NodeState.HEALTHY
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(10 * SECOND)
    assert job.state == "pending" and not fleet.held[spare]
    drive.tell(Cancel(job=job.id))
    drive.wait(6 * HOUR)
    assert NodeState.SPARE in [fleet.state(node) for node in range(3)]


def test_a_job_that_used_its_spare_has_another_as_soon_as_it_runs_again():
    drive = Drive(4)
    job = drive.running(spares=1)
    (spare,) = job.placement.spares
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(5 * SECOND)
    assert spare in job.placement.nodes and not job.placement.spares
    drive.run(job)
    drive.wait(SECOND)
    assert job.placement.spares == (3,)
