from __future__ import annotations

import pytest

from phalanx.cluster.core import FORMAT_VERSION, Core, SequenceError, SnapshotError, VersionError
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol.commands import Accept, Form, Restore
from phalanx.cluster.protocol.events import Event, JobFinished, NodeSilent, Tick
from phalanx.cluster.protocol.messages import (
    CheckResult,
    DeviceError,
    Inventory,
    NodeSeen,
    WorkerExited,
)
from tests.cluster.drive import SECOND, Drive, fleet_of


def test_a_job_is_placed_formed_restored_and_done():
    drive = Drive()
    job = drive.submit()
    assert drive.bodies(Accept)[0].job == job.id
    form = drive.last_form()
    assert form.nodes == job.placement.nodes and form.generation == 1
    drive.run(job)
    assert drive.last_restore().source == "none"
    drive.train(job, 10)
    assert (job.step, job.committed, job.state) == (10, 10, "running")
    drive.tell(JobFinished(job=job.id, generation=1, step=10))
    assert job.state == "done"
    assert drive.core.view.fleet.idle_gpus[0] == drive.core.view.fleet.total_gpus


def test_an_event_left_out_is_noticed():
    core = Core(fleet_of(1), Policy())
    core.handle(Event(1, 0, Tick()))
    with pytest.raises(SequenceError, match="event 3 after event 1"):
        core.handle(Event(3, 0, Tick()))


def test_time_that_runs_backwards_is_held():
    drive = Drive()
    drive.tell(Tick(), 10 * SECOND)
    drive.core.handle(Event(2, 3 * SECOND, Tick()))
    assert drive.core.view.now_ns == 10 * SECOND


def test_the_log_replayed_gives_the_same_commands_and_state():
    drive = Drive(12)
    job = drive.running(spares=1)
    drive.tell(NodeSilent(node=job.placement.nodes[1]), SECOND)
    drive.wait(SECOND)
    drive.run(job)
    again = Core(fleet_of(12), Policy())
    commands = [command for event in drive.log for command in again.handle(event)]
    assert commands == drive.sent
    assert again.snapshot() == drive.core.snapshot()


def test_a_restored_core_goes_on_as_the_one_that_was_lost():
    drive = Drive(12)
    job = drive.running(spares=1)
    half = len(drive.log)
    kept = drive.core.snapshot()
    drive.tell(NodeSilent(node=job.placement.nodes[1]), SECOND)
    drive.wait(SECOND)
    drive.run(job)
    other = Core.restore(kept)
    for event in drive.log[half:]:
        other.handle(event)
    assert other.snapshot() == drive.core.snapshot()
    assert drive.bodies(Form)[-1].generation == 2
    assert drive.bodies(Restore)[-1].source == "peer"


def test_what_fell_due_while_no_controller_ran_is_ordered_by_the_one_that_took_over():
    drive = Drive(12)
    job = drive.running(spares=1)
    drive.tell(NodeSilent(node=job.placement.nodes[1]), SECOND)
    assert job.gang.phase == "settling"
    commands = drive.take_over(10 * SECOND)
    assert [each.body.generation for each in commands if isinstance(each.body, Form)] == [2, 2]
    assert {each.controller_epoch for each in commands} == {2}  # agents drop what an older one says


@pytest.mark.parametrize("node", [-1, 12, 10**9])
def test_facts_about_nodes_that_are_not_in_the_fleet_change_nothing(node):
    drive = Drive(12)
    job = drive.running()
    bodies = [
        NodeSilent(node=node),
        NodeSeen(node=node, inventory=Inventory()),
        DeviceError(node=node, cause="xid"),
        CheckResult(node=node, check="full", passed=False),
        WorkerExited(job=job.id, generation=1, node=node, rank=0, cause="xid"),
    ]
    before = drive.core.view.fleet.dump()
    for body in bodies:
        assert drive.tell(body) == []
    assert drive.core.view.fleet.dump() == before and job.state == "running"


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_damaged_snapshot_is_refused(keep):
    data = Drive(2).core.snapshot()
    with pytest.raises(SnapshotError, match="damaged"):
        Core.restore(data[:keep])


def test_a_snapshot_of_another_version_is_refused_with_both_versions():
    data = Drive(2).core.snapshot().replace(b'"version":%d' % FORMAT_VERSION, b'"version":99', 1)
    told = f"format 99, and this version reads formats 1 to {FORMAT_VERSION}"
    with pytest.raises(VersionError, match=told):
        Core.restore(data)


def test_nobody_is_woken_for_a_phase_that_is_over():
    drive = Drive(2)
    job = drive.submit()
    assert drive.core.next_deadline_ns() is not None  # the gang must have joined by then
    drive.run(job)
    assert drive.core.next_deadline_ns() == drive.core._ctx.health.failures_look_ns  # tomorrow
