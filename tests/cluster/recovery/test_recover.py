from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import ClusterJob, GangShape
from phalanx.cluster.node import Node, NodeState
from phalanx.cluster.policy import Policy, RecoveryPolicy, SparePolicy
from phalanx.cluster.protocol.commands import Abort, Form, Go, Notify, Rebalance, Stop
from phalanx.cluster.protocol.events import (
    Cancel,
    GangJoined,
    GangReady,
    GangStuck,
    NodeRepaired,
    NodeSilent,
    NoProgress,
    Progress,
    Scale,
    SlowRank,
)
from phalanx.cluster.protocol.messages import (
    CheckResult,
    DeviceError,
    Inventory,
    NodeSeen,
    WorkerExited,
)
from tests.cluster.drive import EXPECTED, SECOND, SHAPE, Drive

ELASTIC = GangShape(replicas=4, least_replicas=2, tensor=8, pipeline=2, slot_gpus=8, slot_cpus=8)
DAY = 86400 * SECOND


def exited(job, cause="worker_killed", node=None) -> WorkerExited:
    where = job.placement.nodes[0] if node is None else node
    return WorkerExited(job=job.id, generation=job.generation, node=where, rank=0, cause=cause)


def test_a_killed_worker_is_restarted_in_place_from_memory():
    drive = Drive()
    job = drive.running(spares=1)
    before = job.placement
    drive.tell(exited(job))
    drive.wait(SECOND)
    assert job.placement.nodes == before.nodes and job.placement.spares == before.spares
    assert drive.last_form().reason.facts["rung"] == "in_place"
    drive.run(job)
    assert (drive.last_restore().step, drive.last_restore().source) == (150, "peer")


def test_a_job_that_runs_again_keeps_no_estimate_of_what_that_would_cost():
    drive = Drive()
    job = drive.running(spares=1)
    name = drive.core.view.fleet.nodes[job.placement.nodes[0]].name
    drive.tell(exited(job))
    drive.wait(SECOND)
    assert "estimated loss" in str(job.why)
    drive.run(job)
    assert str(job.why) == f"goes on from step 150: in_place after worker_killed on {name}"


def test_survivors_leave_the_collective_at_once():
    drive = Drive()
    job = drive.running()
    commands = drive.tell(exited(job))
    (abort,) = [c for c in commands if isinstance(c.body, Abort)]
    assert abort.target == job.placement.nodes[1:]
    assert abort.body.generation == 1


def test_a_dead_node_is_replaced_by_the_spare_and_its_state_comes_from_the_buddy():
    drive = Drive()
    job = drive.running(spares=1)
    first, second = job.placement.nodes
    (spare,) = job.placement.spares
    drive.tell(NodeSilent(node=second))
    drive.wait(SECOND)
    assert job.placement.nodes == (first, spare)
    form = drive.last_form()
    assert form.reason.facts["rung"] == "swap"
    assert (form.kept_nodes, form.kept_shift) == ((first, second), 1)
    assert drive.core.view.fleet.state(second) is NodeState.DEAD
    assert not drive.core.view.fleet.held[second]
    drive.run(job)
    assert drive.last_restore().source == "peer"


def test_a_swap_takes_a_free_node_when_there_is_no_spare():
    drive = Drive()
    job = drive.running(gang=structs.replace(ELASTIC, replicas=2))
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(SECOND)
    assert job.placement.nodes[0] == 4 and job.placement.replicas == 2


def test_the_pool_of_the_fleet_is_used_and_filled_again():
    drive = Drive(8, Policy(spares=SparePolicy(nodes=2)))
    fleet = drive.core.view.fleet
    pool = [node for node in range(8) if fleet.state(node) is NodeState.SPARE]
    assert len(pool) == 2
    job = drive.running()
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(SECOND)
    assert job.placement.nodes[0] in pool
    assert sum(fleet.state(node) is NodeState.SPARE for node in range(8)) == 2


def test_without_a_spare_the_data_axis_shrinks_by_a_replica_and_its_nodes_stand_by():
    drive = Drive(8)
    job = drive.running(gang=ELASTIC)
    before = job.placement.nodes
    drive.tell(NodeSilent(node=before[1]))
    drive.wait(SECOND)
    # Ranks are laid out pipeline, data: slots 1 and 5 are the two stages of replica 1.
    assert job.placement.replicas == 3
    assert job.placement.nodes == tuple(before[slot] for slot in (0, 2, 3, 4, 6, 7))
    assert job.placement.spares == (before[5],)
    assert drive.core.view.fleet.spare_for(before[5]) == job.id
    drive.run(job)
    drive.core.ledger.check(drive.core.view)
    assert drive.core.ledger.accounts[job.id].gpus == 48


def test_a_second_failure_in_the_same_replica_costs_no_second_replica():
    drive = Drive(8)
    job = drive.running(gang=ELASTIC)
    before = job.placement.nodes
    drive.tell(NodeSilent(node=before[1]))
    drive.tell(NodeSilent(node=before[5]))
    drive.wait(SECOND)
    assert job.placement.replicas == 3 and job.placement.spares == ()


def test_a_shrunk_job_grows_back_when_the_node_returns():
    drive = Drive(8)
    job = drive.running(gang=ELASTIC)
    before = job.placement.nodes
    drive.tell(NodeSilent(node=before[1]))
    drive.wait(SECOND)
    drive.run(job)
    drive.train(job, 200)
    drive.tell(NodeRepaired(node=before[1]))
    drive.tell(CheckResult(node=before[1], check="full", passed=True), 60 * SECOND)
    drive.wait(SECOND)
    assert job.placement.replicas == 4 and job.state == "forming"
    assert sorted(job.placement.nodes) == sorted(before)
    assert job.placement.spares == ()
    drive.run(job)
    assert drive.last_restore().source == "peer"
    drive.core.ledger.check(drive.core.view)


def test_growing_waits_a_while_after_a_reshape():
    drive = Drive(8)
    job = drive.running(gang=ELASTIC)
    node = job.placement.nodes[1]
    drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)
    drive.run(job)
    drive.tell(NodeRepaired(node=node))
    drive.tell(CheckResult(node=node, check="full", passed=True))
    drive.wait(60 * SECOND)
    assert job.placement.replicas == 3
    drive.wait(600 * SECOND)
    assert job.placement.replicas == 4


def test_what_waits_with_a_higher_priority_starts_before_a_small_job_grows():
    drive = Drive(8)
    job = drive.running(gang=ELASTIC)
    node = job.placement.nodes[1]
    drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)
    spare = job.placement.spares[0]  # of the replica that was cut: it waits for the dead one
    drive.run(job)
    drive.wait(DAY)
    urgent = drive.submit(gang=structs.replace(SHAPE, replicas=1), priority=100_000)
    assert urgent.state == "pending"
    drive.tell(NodeRepaired(node=node))
    drive.tell(CheckResult(node=node, check="full", passed=True))
    drive.wait(SECOND)
    assert urgent.state == "forming" and urgent.placement.nodes == (node,)
    assert job.placement.replicas == 3 and job.placement.spares == (spare,)


def test_a_small_job_grows_before_what_came_after_it_became_small():
    drive = Drive(8)
    job = drive.running(gang=ELASTIC)
    node = job.placement.nodes[1]
    drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)
    drive.run(job)
    drive.wait(DAY)
    later = drive.submit(gang=structs.replace(SHAPE, replicas=1), priority=-1000)
    drive.tell(NodeRepaired(node=node))
    drive.tell(CheckResult(node=node, check="full", passed=True))
    drive.wait(SECOND)
    assert job.placement.replicas == 4 and later.state == "pending"


def test_a_gang_with_tensor_groups_across_nodes_grows_onto_its_own_spares():
    fleet = Fleet(Node(name=f"n{i}", domain=f"d{i // 2}") for i in range(8))
    drive = Drive(policy=Policy(recovery=RecoveryPolicy(grow_after_ns=0)), fleet=fleet)
    wide = GangShape(replicas=4, least_replicas=2, tensor=16, slot_gpus=8, slot_cpus=8)
    job = drive.running(gang=wide)
    first, second = job.placement.nodes[:2]
    drive.tell(NodeSilent(node=first))
    drive.wait(SECOND)
    assert job.placement.replicas == 3 and job.placement.spares == (second,)
    drive.run(job)
    drive.train(job, 10)
    drive.tell(NodeRepaired(node=first))
    drive.tell(CheckResult(node=first, check="full", passed=True))
    drive.wait(SECOND)
    assert job.placement.replicas == 4 and job.placement.spares == ()
    assert {first, second} == set(job.placement.nodes[-2:])


def test_a_job_that_cannot_shrink_goes_back_to_the_queue():
    drive = Drive(2)
    job = drive.running()
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(SECOND)
    assert job.state == "pending" and job.placement is None
    assert job.why.facts["rung"] == "requeue"
    assert job.id in drive.core.view.pending
    said = [str(notice.reason) for notice in drive.bodies(Notify)]
    assert any("its nodes keep its newest steps in memory" in text for text in said)


def test_a_spare_that_dies_is_no_failure_of_the_job():
    drive = Drive()
    job = drive.running(spares=1)
    (spare,) = job.placement.spares
    drive.tell(NodeSilent(node=spare))
    drive.wait(SECOND)
    assert job.state == "running" and job.generation == 1
    assert job.placement.spares not in ((), (spare,))  # a free node took its place


def test_a_spare_that_dies_during_the_swap_is_replaced_too():
    drive = Drive(4)
    job = drive.running(spares=1)
    second = job.placement.nodes[1]
    (spare,) = job.placement.spares
    drive.tell(NodeSilent(node=second))
    drive.wait(SECOND)
    drive.tell(NodeSilent(node=spare))
    drive.wait(SECOND)
    assert job.generation == 3
    assert job.placement.nodes == (0, 3)
    drive.run(job)
    assert (drive.last_restore().step, drive.last_restore().source) == (150, "peer")


def test_when_a_node_and_its_buddy_die_the_checkpoint_on_storage_is_used():
    drive = Drive(8)
    job = drive.running()
    for node in job.placement.nodes:
        drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)
    drive.run(job, -1)
    assert (drive.last_restore().step, drive.last_restore().source) == (100, "remote")


def test_failures_that_come_together_make_one_new_generation():
    drive = Drive(16)
    job = drive.running(gang=ELASTIC)
    for node in job.placement.nodes[:3]:
        drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)
    assert job.generation == 2 and len(drive.bodies(Form)) == 2


def test_a_symptom_does_not_hide_the_cause():
    drive = Drive()
    job = drive.running(spares=1)
    first, second = job.placement.nodes
    drive.tell(exited(job, "lost_peer", first))
    drive.tell(exited(job, "hbm_ecc", second))
    drive.wait(SECOND)
    assert job.gang.cause == "hbm_ecc"
    assert second not in job.placement.nodes and first in job.placement.nodes


def test_a_fact_about_an_older_generation_is_ignored():
    drive = Drive()
    job = drive.running(spares=1)
    old = exited(job)
    drive.tell(old)
    drive.wait(SECOND)
    drive.run(job)
    drive.tell(old)
    drive.tell(GangReady(job=job.id, generation=1, step=9))
    drive.wait(SECOND)
    assert job.state == "running" and job.generation == 2


def test_a_hang_names_the_node_that_is_behind():
    drive = Drive()
    job = drive.running(spares=1)
    culprit = job.placement.nodes[1]
    drive.tell(NoProgress(job=job.id, generation=1, step=150, nodes=(culprit,)))
    drive.wait(SECOND)
    assert culprit not in job.placement.nodes
    assert drive.core.view.fleet.state(culprit) is NodeState.SUSPECT


def test_a_hang_of_nobody_in_particular_restarts_the_gang_where_it_is():
    drive = Drive()
    job = drive.running(spares=1)
    before = job.placement.nodes
    drive.tell(NoProgress(job=job.id, generation=1, step=150))
    drive.wait(SECOND)
    assert job.placement.nodes == before and job.generation == 2


def test_an_anonymous_deadline_does_not_forget_who_was_missing():
    drive = Drive()
    job = drive.submit(spares=1)
    late = job.placement.nodes[1]
    drive.wait(job.gang.deadline_ns - drive.now_ns)
    drive.tell(GangStuck(job=job.id, generation=1, phase="join", nodes=(late,)))
    drive.wait(2 * SECOND)
    assert job.generation == 1  # the first attempt's timer means nothing any more
    drive.wait(10 * SECOND)
    assert job.generation == 2 and late not in job.placement.nodes


def test_a_gang_makes_steps_only_when_all_are_ready_and_the_log_knows_it():
    drive = Drive()
    job = drive.submit()
    drive.tell(GangJoined(job=job.id, generation=1, step=-1))
    assert not drive.bodies(Go)
    drive.tell(GangReady(job=job.id, generation=1, step=0))
    assert drive.sent[-1].body == Go(reason=drive.sent[-1].body.reason, job=job.id, generation=1)
    assert drive.sent[-1].target == job.placement.nodes


def test_a_node_that_left_gives_up_its_snapshots_when_the_others_run():
    drive = Drive()
    job = drive.running(spares=1)
    node = job.placement.nodes[0]
    drive.tell(DeviceError(node=node, cause="hbm_ecc"))
    drive.wait(SECOND)
    assert drive.last_form().kept_generation == 1
    drive.run(job)
    kept = [(c.target, c.body.keep_snapshots) for c in drive.sent if isinstance(c.body, Stop)]
    assert kept == [((node,), True), ((node,), False)]


def test_a_node_that_does_not_answer_is_asked_again_and_then_replaced():
    drive = Drive()
    job = drive.submit(spares=1)
    late = job.placement.nodes[1]
    drive.tell(GangStuck(job=job.id, generation=1, phase="join", nodes=(late,)), 60 * SECOND)
    assert drive.sent[-1].target == (late,) and isinstance(drive.sent[-1].body, Form)
    assert job.generation == 1
    drive.tell(GangStuck(job=job.id, generation=1, phase="join", nodes=(late,)), SECOND)
    drive.wait(SECOND)
    assert job.generation == 2 and late not in job.placement.nodes


SLOW = structs.replace(EXPECTED, steps=1_000_000, micro_batches=16)


@pytest.mark.parametrize(
    ("slowdown_ppm", "spares", "rung"),
    [
        (300_000, 1, "swap"),  # a pause now is cheaper than a day of slow steps
        (300_000, 0, "rebalance"),
        (30_000, 0, "degraded"),  # one micro-batch less for it would cost the others more
    ],
)
def test_a_slow_rank_is_dealt_with_in_the_cheapest_way(slowdown_ppm, spares, rung):
    shape = GangShape(replicas=4, tensor=8, slot_gpus=8, slot_cpus=8)
    drive = Drive(4 + spares)
    job = drive.running(gang=shape, spares=spares, expected=SLOW)
    node = job.placement.nodes[2]
    drive.tell(
        SlowRank(
            job=job.id,
            generation=1,
            node=node,
            rank=17,
            part="compute",
            slowdown_ppm=slowdown_ppm,
        )
    )
    drive.wait(SECOND)
    assert drive.bodies(Notify)[0].reason.facts["rung"] == rung
    if rung == "swap":
        assert node not in job.placement.nodes
        assert drive.core.view.fleet.state(node) is NodeState.QUARANTINED
    else:
        assert job.placement.nodes[2] == node and job.state == "running"
    if rung == "rebalance":
        shares = drive.bodies(Rebalance)[0].micro_batches
        assert sum(shares) == 4 * 16 and shares[2] == min(shares) < 16


@pytest.mark.parametrize(
    ("slowdown_ppm", "slow_step_ns", "rung"),
    [
        (9_000_000, 0, "swap"),
        (9_000_000, 10 * SECOND, "swap"),
        (9_000_000, SECOND, "degraded"),  # what is left takes six seconds with it
        (300_000, 0, "degraded"),
    ],
)
def test_a_short_job_is_as_much_longer_as_its_slow_rank_makes_it(slowdown_ppm, slow_step_ns, rung):
    # Six seconds are left: ten times slower they are a minute, and a swap costs ten seconds.
    short = structs.replace(EXPECTED, steps=156, step_ns=SECOND)
    drive = Drive(3)
    job = drive.running(spares=1, expected=short)
    slow = SlowRank(
        job=job.id,
        generation=1,
        node=job.placement.nodes[1],
        rank=8,
        part="compute",
        slowdown_ppm=slowdown_ppm,
        step_ns=slow_step_ns,
    )
    drive.tell(slow)
    drive.wait(SECOND)
    assert drive.bodies(Notify)[0].reason.facts["rung"] == rung


@pytest.mark.parametrize("part", ["compute", "host"])
def test_a_second_slow_replica_leaves_the_first_one_the_less_that_it_was_given(part):
    shape = GangShape(replicas=4, tensor=8, slot_gpus=8, slot_cpus=8)
    drive = Drive(4)
    job = drive.running(gang=shape, expected=SLOW)
    for slot in (2, 0):
        node = job.placement.nodes[slot]
        slow = SlowRank(
            job=job.id, generation=1, node=node, rank=8 * slot, part=part, slowdown_ppm=500_000
        )
        drive.tell(slow)
        drive.wait(SECOND)
    first, second = (order.micro_batches for order in drive.bodies(Rebalance))
    assert second[2] == first[2] < 16 and second[0] < 16
    assert sum(first) == sum(second) == 4 * 16
    assert min(second[1], second[3]) > max(first)


def test_a_slow_network_gets_no_less_work_because_that_would_not_help():
    drive = Drive(2)
    job = drive.running(expected=SLOW)
    drive.tell(
        SlowRank(
            job=job.id,
            generation=1,
            node=job.placement.nodes[0],
            rank=0,
            part="communication",
            slowdown_ppm=500_000,
        )
    )
    assert not drive.bodies(Rebalance)
    assert job.state == "running"


def test_a_lost_rail_is_borne_and_a_second_node_without_it_costs_nothing_more():
    exposed = structs.replace(EXPECTED, exposed_ns=SECOND // 100, steps=200)
    drive = Drive(4)
    job = drive.running(expected=exposed)
    for node in job.placement.nodes:
        drive.tell(DeviceError(node=node, cause="rail", rail=3))
    drive.wait(SECOND)
    assert job.state == "running" and job.generation == 1
    first, second = drive.bodies(Notify)
    assert first.reason.facts["rung"] == second.reason.facts["rung"] == "degraded"
    assert second.reason.facts["loss"] == 0
    assert drive.core.view.fleet.rails_down(job.placement.nodes[0]) == 0b1000


def test_a_node_that_lost_its_only_rail_stops_the_gang():
    drive = Drive(4)
    job = drive.running()
    node = job.placement.nodes[0]
    drive.core.view.fleet.set_rails_down(node, (1 << 7) - 1)
    drive.tell(DeviceError(node=node, cause="nic", rail=7))
    drive.wait(SECOND)
    assert node not in job.placement.nodes and job.generation == 2


def test_nodes_that_leave_a_gang_alive_keep_its_snapshots():
    drive = Drive()
    job = drive.running(spares=1)
    node = job.placement.nodes[0]
    drive.tell(DeviceError(node=node, cause="hbm_ecc"))
    drive.wait(SECOND)
    (stop,) = [c for c in drive.sent if isinstance(c.body, Stop)]
    assert stop.target == (node,) and stop.body.keep_snapshots
    # Its memory is not lost, but it does not join: its buddy says how far it was.
    assert drive.last_form().kept_nodes == (node, job.placement.nodes[1])


def test_late_progress_of_the_survivors_shortens_the_detection():
    drive = Drive()
    job = drive.running(spares=1)
    reported = drive.now_ns
    drive.wait(60 * SECOND)
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(SECOND)
    late = Progress(
        job=job.id,
        generation=1,
        step=158,
        committed=158,
        durable=100,
        at_ns=reported + 40 * SECOND,
    )
    drive.tell(late)
    drive.run(job, 158)
    account = drive.core.ledger.accounts[job.id]
    assert account.buckets["detection"] == 20 * SECOND * 16
    assert account.buckets["productive"] == 158 * EXPECTED.step_ns * 16
    assert job.step == 158
    drive.core.ledger.check(drive.core.view)


def test_scaling_moves_between_the_limits_of_the_job():
    drive = Drive(8)
    shape = structs.replace(ELASTIC, replicas=2, most_replicas=4)
    job = drive.running(gang=shape)
    drive.tell(Scale(job=job.id, replicas=4))
    drive.wait(SECOND)
    assert job.placement.replicas == 4
    drive.run(job)
    drive.train(job, 10)
    drive.tell(Scale(job=job.id, replicas=3))
    drive.wait(SECOND)
    assert job.placement.replicas == 3 and len(job.placement.nodes) == 6
    drive.run(job)
    (command,) = drive.tell(Scale(job=job.id, replicas=9))
    assert "runs with 2 to 4 replicas" in str(command.body.reason)
    drive.core.ledger.check(drive.core.view)


def test_the_way_out_is_the_one_with_the_least_predicted_loss():
    drive = Drive(9)
    job = drive.running(gang=ELASTIC, spares=1)
    drive.tell(NodeSilent(node=job.placement.nodes[1]))
    drive.wait(SECOND)
    facts = drive.last_form().reason.facts
    assert facts["rung"] == "swap"
    pause = EXPECTED.form_ns + EXPECTED.restore_peer_ns
    assert facts["loss"] == pause * 64 // SECOND
    assert facts["other"].startswith("requeue")


def test_a_node_that_fails_again_and_again_is_not_trusted_in_place_for_ever():
    drive = Drive(3)
    # No warm spare: a cold node costs more than one restart on the suspect, but not than many.
    slow_start = structs.replace(EXPECTED, start_ns=300 * SECOND, standby_ns=100 * SECOND)
    job = drive.running(expected=slow_start)
    node = job.placement.nodes[1]
    rungs = []
    for _ in range(3):
        drive.tell(exited(job, "network_link", node), SECOND)
        drive.wait(SECOND)
        rungs.append(drive.last_form().reason.facts["rung"])
        drive.run(job)
        drive.train(job, 1)
        if node not in job.placement.nodes:
            break
    assert rungs[0] == "in_place" and rungs[-1] == "swap"


@pytest.mark.parametrize("known", [True, False], ids=["known-job", "forgotten-job"])
def test_snapshots_of_a_job_that_went_elsewhere_are_dropped(known: bool):
    drive = Drive()
    job = drive.running(spares=1)
    gone = job.placement.nodes[0]
    drive.tell(NodeSilent(node=gone))
    drive.wait(SECOND)
    drive.run(job, job.step)
    assert gone not in job.placement.nodes
    kept = (job.id if known else 99, 100)
    drive.sent.clear()
    drive.tell(NodeSeen(node=gone, inventory=Inventory(incarnation=9, snapshots=(kept,))))
    (stop,) = [c for c in drive.sent if isinstance(c.body, Stop)]
    assert stop.target == (gone,) and stop.body.job == kept[0] and not stop.body.keep_snapshots
    assert stop.body.generation >= job.generation


def test_snapshots_that_a_gang_still_needs_stay_until_it_runs():
    drive = Drive()
    job = drive.running(spares=1)
    gone = job.placement.nodes[0]
    drive.tell(NodeSilent(node=gone))
    drive.wait(SECOND)
    assert job.state == "forming" and gone in job.gang.keepers
    drive.tell(NodeSeen(node=gone, inventory=Inventory(incarnation=9, snapshots=((job.id, 100),))))
    stops = [c for c in drive.sent if isinstance(c.body, Stop) and c.target == (gone,)]
    assert [stop.body.keep_snapshots for stop in stops] == [True]
    drive.run(job, job.step)
    stops = [c for c in drive.sent if isinstance(c.body, Stop) and gone in c.target]
    assert not stops[-1].body.keep_snapshots


def test_a_job_that_ends_while_it_forms_leaves_no_snapshots_with_those_who_left():
    drive = Drive()
    job = drive.running(spares=1)
    gone = job.placement.nodes[0]
    drive.tell(DeviceError(node=gone, cause="hbm_ecc"))
    drive.wait(SECOND)
    assert gone in job.gang.leftover
    drive.tell(Cancel(job=job.id))
    (stop,) = [c for c in drive.sent if isinstance(c.body, Stop)][-1:]
    assert gone in stop.target and not stop.body.keep_snapshots


def test_a_job_that_waits_for_a_node_goes_on_from_the_memory_of_the_others():
    drive = Drive(2)
    job = drive.running()
    nodes = job.placement.nodes
    dead, lives = nodes
    drive.tell(NodeSilent(node=dead))
    drive.wait(SECOND)
    assert job.state == "pending"
    (stop,) = [c for c in drive.sent if isinstance(c.body, Stop) and lives in c.target]
    assert stop.body.keep_snapshots
    drive.tell(NodeSeen(node=dead, inventory=Inventory(incarnation=2)), SECOND)
    drive.tell(CheckResult(node=dead, check="full", passed=True), SECOND)
    drive.wait(SECOND)
    assert job.placement is not None and job.kept is None
    assert drive.last_form().kept_generation == 1
    drive.tell(GangJoined(job=job.id, generation=job.generation, step=150, empty=(dead,)), SECOND)
    assert (drive.last_restore().step, drive.last_restore().source) == (150, "peer")


def waits_with_memory() -> tuple[Drive, ClusterJob, int, int]:
    drive = Drive(2)
    job = drive.running()
    dead, lives = job.placement.nodes
    drive.tell(NodeSilent(node=dead))
    drive.wait(SECOND)
    assert job.kept is not None
    return drive, job, dead, lives


def dropped(drive: Drive, job: ClusterJob, node: int) -> bool:
    """Whether the last word to a node about a job was to keep nothing of it."""
    stops = [c.body for c in drive.sent if isinstance(c.body, Stop) and node in c.target]
    return not [s for s in stops if s.job == job.id][-1].keep_snapshots


def test_memory_that_nobody_came_back_for_in_time_is_given_up():
    drive, job, _, lives = waits_with_memory()
    drive.wait(drive.core.view.policy.recovery.keep_memory_ns)
    assert job.kept is None and dropped(drive, job, lives)
    assert "50 committed steps (101 to 150) are lost" in str(drive.bodies(Notify)[-1].reason)


def test_a_job_that_ends_while_it_waits_leaves_nothing_in_memory():
    drive, job, _, lives = waits_with_memory()
    drive.tell(Cancel(job=job.id))
    assert job.kept is None and dropped(drive, job, lives)


def test_others_that_get_the_nodes_get_their_memory_too():
    drive, job, _, lives = waits_with_memory()
    other = drive.submit(gang=GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8))
    drive.wait(SECOND)
    assert other.placement is not None and other.placement.nodes == (lives,)
    assert job.kept is None and dropped(drive, job, lives)


def test_a_node_that_connects_again_keeps_what_a_waiting_job_needs():
    drive, job, _, lives = waits_with_memory()
    drive.tell(NodeSeen(node=lives, inventory=Inventory(incarnation=2, snapshots=((job.id, 150),))))
    assert job.kept is not None and not dropped(drive, job, lives)


def test_what_waits_in_memory_outlives_the_controller():
    drive, job, *_ = waits_with_memory()
    again = Core.restore(drive.core.snapshot())
    assert again.view.jobs[job.id].kept == job.kept
    assert again.snapshot() == drive.core.snapshot()


def test_a_site_may_drop_the_memory_of_waiting_jobs_at_once():
    drive = Drive(2, Policy(recovery=RecoveryPolicy(keep_memory_ns=0)))
    job = drive.running()
    dead, lives = job.placement.nodes
    drive.tell(NodeSilent(node=dead))
    drive.wait(SECOND)
    assert job.kept is None and dropped(drive, job, lives)
    said = [str(notice.reason) for notice in drive.bodies(Notify)]
    assert any("50 committed steps (101 to 150)" in text for text in said)
