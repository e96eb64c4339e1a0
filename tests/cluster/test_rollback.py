"""Going back: to older checkpoints, behind corruptions and spikes, past sources that fail."""

from __future__ import annotations

from itertools import pairwise

import pytest

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import DURABLES_KEPT, ClusterJob
from phalanx.cluster.node import NodeState
from phalanx.cluster.policy import Policy, RecoveryPolicy
from phalanx.cluster.protocol.commands import Notify
from phalanx.cluster.protocol.events import (
    Corruption,
    GangJoined,
    GangReady,
    LossSpike,
    NodeRepaired,
    NodeSilent,
    StorageSlow,
)
from phalanx.cluster.protocol.messages import CheckResult, RestoreFailed
from tests.cluster.drive import EXPECTED, SECOND, Drive
from tests.cluster.recovery.test_recover import exited


def test_a_job_goes_back_to_the_newest_clean_checkpoint_however_old():
    drive = Drive(8)
    job = drive.submit()
    drive.run(job)
    for _ in range(40):
        drive.train(job, 100)
    drive.tell(Corruption(job=job.id, generation=job.generation, step=4000, clean_step=350))
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=job.generation, step=4000))
    assert drive.last_restore().step == 300 and drive.last_restore().source != "none"


def test_a_job_that_waits_for_nodes_after_a_corruption_still_goes_back_behind_it():
    drive = Drive(2)
    job = drive.running(steps=100)
    for steps in (100, 100, 100, 50):
        drive.train(job, steps)
    wrong = job.placement.nodes[0]
    told = {"job": job.id, "generation": job.generation, "step": 450, "clean_step": 350}
    drive.tell(Corruption(**told, nodes=(wrong,)))
    drive.wait(SECOND)
    assert job.state == "pending"
    drive.tell(NodeRepaired(node=wrong))
    drive.tell(CheckResult(node=wrong, check="full", passed=True))
    drive.wait(SECOND)
    # Whoever joins finds the newest checkpoint, which has the wrong numbers.
    drive.tell(GangJoined(job=job.id, generation=job.generation, step=-1, durable=400))
    assert drive.last_restore().step == 300


def test_checkpoints_that_retention_removed_are_not_tried_one_by_one():
    drive = Drive(8)
    job = drive.submit()
    drive.run(job)
    for _ in range(40):
        drive.train(job, 100)
    drive.tell(Corruption(job=job.id, generation=job.generation, step=4000, clean_step=3550))
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=job.generation, step=4000))
    told = {"job": job.id, "generation": job.generation, "node": 0, "step": 3500}
    for source in ("disk", "remote"):
        drive.tell(RestoreFailed(**told, source=source, there=(1000, 2000)))
    assert drive.last_restore().step == 2000


def test_of_very_many_checkpoints_the_older_half_is_thinned_and_none_is_lost_for_good():
    drive = Drive(8)
    job = drive.submit()
    steps = range(10, 10 * (DURABLES_KEPT * 3 + 1), 10)
    for step in steps:
        job.add_durable(step)
    assert len(job.durables) <= DURABLES_KEPT and job.durables[0] == 10
    recent = list(steps[-DURABLES_KEPT // 2 :])
    assert job.durables[-len(recent) :] == recent
    gaps = [late - early for early, late in pairwise(job.durables)]
    assert max(gaps) < steps[-1] // 4


def test_a_job_outlasts_an_outage_of_the_storage_that_it_restores_from():
    drive = Drive(8, Policy(recovery=RecoveryPolicy(failed_formations=2, peer_memory=False)))
    job = drive.running(steps=150)
    drive.tell(StorageSlow(bytes_per_second=0))
    drive.tell(exited(job, cause="worker_killed"))
    for _ in range(5_000):  # whoever joined can restore nothing, for hours
        drive.wait(5 * SECOND)
        assert job.state == "forming"
        if job.gang.phase == "joining":
            drive.tell(GangJoined(job=job.id, generation=job.generation, step=-1))
            told = {"job": job.id, "generation": job.generation, "node": 0, "step": 100}
            for source in ("disk", "remote"):
                if job.gang.source == source:
                    drive.tell(RestoreFailed(**told, source=source))
    assert job.generation > 5
    drive.tell(StorageSlow(bytes_per_second=-1))
    drive.wait(SECOND)
    drive.run(job)
    assert job.state == "running" and job.gang.restored == 100
    told = [str(each.reason) for each in drive.bodies(Notify)]
    assert sum("storage gives and takes nothing" in each for each in told) == 1
    assert "remote storage is back" in told


def test_a_refused_source_is_not_used_again():
    drive = Drive()
    job = drive.running(spares=1)
    drive.tell(NodeSilent(node=job.placement.nodes[0]))
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=2, step=150))
    assert drive.last_restore().source == "peer"
    drive.tell(RestoreFailed(job=job.id, generation=2, node=1, source="peer", step=150))
    assert (drive.last_restore().step, drive.last_restore().source) == (100, "remote")
    drive.tell(RestoreFailed(job=job.id, generation=2, node=1, source="remote", step=100))
    assert (drive.last_restore().step, drive.last_restore().source) == (0, "none")


def test_the_checkpoint_before_a_bad_one_is_used():
    drive = Drive()
    job = drive.running(steps=120)
    drive.train(job, 100)
    assert job.durables == [100, 200]
    for node in job.placement.nodes:
        drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)
    drive.tell(GangJoined(job=job.id, generation=2, step=-1))
    drive.tell(RestoreFailed(job=job.id, generation=2, node=1, source="remote", step=200))
    assert drive.last_restore().step == 100


def test_corruption_rolls_the_job_back_behind_it_and_quarantines_the_culprit():
    drive = Drive()
    job = drive.running(steps=120, spares=1)
    drive.train(job, 100)
    culprit = job.placement.nodes[1]
    drive.tell(Corruption(job=job.id, generation=1, step=170, clean_step=160, nodes=(culprit,)))
    drive.wait(SECOND)
    assert culprit not in job.placement.nodes
    assert drive.core.view.fleet.state(culprit) is NodeState.QUARANTINED
    drive.run(job, 220)
    assert (drive.last_restore().step, drive.last_restore().source) == (100, "remote")
    assert job.durables == [100]
    drive.train(job, 120)
    account = drive.core.ledger.accounts[job.id]
    assert account.buckets["recompute"] == 120 * EXPECTED.step_ns * 16


def disputes(drive: Drive, job: ClusterJob, *words: int) -> None:
    """The first nodes of the gang tell what step 120 gave them; the gang forms again, if it may."""
    claims = tuple(zip(job.placement.nodes, words, strict=False))
    seen = Corruption(
        job=job.id, generation=job.generation, step=120, clean_step=100, claims=claims
    )
    drive.tell(seen, SECOND)
    drive.wait(SECOND)
    if job.gang is not None:
        drive.run(job, 120)
        assert drive.last_restore().step == 100


def test_of_two_replicas_the_one_that_erred_once_is_named_by_the_step_made_again():
    drive = Drive()
    job = drive.running(steps=120, spares=1)
    first, second = job.placement.nodes[:2]
    disputes(drive, job, 5, 6)
    assert job.placement.nodes[:2] == (first, second)
    assert drive.last_restore().told == (120, 0)  # they say what they get this time
    disputes(drive, job, 5, 5)
    assert first in job.placement.nodes and second not in job.placement.nodes
    assert drive.core.view.fleet.state(second) is NodeState.QUARANTINED
    assert drive.last_restore().told == (0, 0) and job.dispute is None


@pytest.mark.parametrize("liar", [0, 1])
def test_of_two_replicas_that_insist_a_third_one_names_the_culprit(liar):
    drive = Drive()
    job = drive.running(steps=120, spares=2)
    pair = job.placement.nodes[:2]
    honest = pair[1 - liar]
    words = (6, 5) if liar == 0 else (5, 6)
    disputes(drive, job, *words)
    disputes(drive, job, *words)
    (stays,) = set(pair) & set(job.placement.nodes)
    fleet = drive.core.view.fleet
    (gone,) = set(pair) - {stays}
    assert fleet.state(gone) is NodeState.SUSPECT  # and tested: nothing is proved yet
    drive.tell(CheckResult(node=gone, check="full", passed=True), SECOND)
    assert fleet.state(gone) in (NodeState.HEALTHY, NodeState.SPARE)
    said = tuple(6 if node == pair[liar] else 5 for node in job.placement.nodes[:2])
    disputes(drive, job, *said)
    assert fleet.state(pair[liar]) is NodeState.QUARANTINED
    assert pair[liar] not in job.placement.nodes
    assert fleet.state(honest) in (NodeState.HEALTHY, NodeState.SPARE)
    assert job.dispute is None and job.state == "running"


def test_the_words_of_a_dispute_outlive_the_controller():
    drive = Drive()
    job = drive.running(steps=120, spares=1)
    disputes(drive, job, 5, 6)
    again = Core.restore(drive.core.snapshot()).view.jobs[job.id]
    assert again.dispute == job.dispute and again.dispute.claims


def test_where_all_contradict_themselves_nobody_is_named_and_the_job_stops_in_the_end():
    drive = Drive()
    job = drive.running(steps=120, spares=1)
    pair = job.placement.nodes[:2]
    disputes(drive, job, 1, 2)
    disputes(drive, job, 3, 4)
    disputes(drive, job, 5, 6)
    assert job.state == "failed" and "ranks disagree" in job.evidence[-1]
    states = [drive.core.view.fleet.state(node) for node in pair]
    assert NodeState.QUARANTINED not in states


def test_replicas_that_agree_on_something_new_go_on_without_a_culprit():
    drive = Drive()
    job = drive.running(steps=120, spares=1)
    nodes = job.placement.nodes
    disputes(drive, job, 1, 2)
    disputes(drive, job, 3, 3)
    assert job.placement.nodes == nodes and job.dispute is None


def test_a_loss_spike_is_only_said_unless_the_site_wants_it_undone():
    drive = Drive()
    job = drive.running()
    drive.tell(LossSpike(job=job.id, generation=1, step=150))
    assert job.state == "running"
    assert "loss jumped at step 150" in str(drive.bodies(Notify)[-1].reason)


def test_a_loss_spike_can_be_undone_and_its_batch_left_out():
    policy = Policy(recovery=RecoveryPolicy(spike_rollback_steps=20, skip_batch=True))
    drive = Drive(8, policy)
    job = drive.running(steps=150)
    for generation, known in ((1, ()), (2, ((1192, 1200),))):
        drive.tell(LossSpike(job=job.id, generation=generation, step=150))
        drive.wait(SECOND)
        drive.tell(GangJoined(job=job.id, generation=generation + 1, step=150))
        restore = drive.last_restore()
        assert (restore.step, restore.skip_step, restore.skipped) == (100, 150, known)
        # Which samples they were is the workers' to know.
        ready = GangReady(job=job.id, generation=generation + 1, step=100, skipped=(1192, 1200))
        drive.tell(ready)
    assert job.gang.skip_step == 0
