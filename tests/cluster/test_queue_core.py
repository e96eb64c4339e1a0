"""The queue inside the core: quotas, windows and preemption as events and commands."""

from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.forecast.why import explain
from phalanx.cluster.jobs.job import ClusterJob, GangShape, JobSpec
from phalanx.cluster.policy import Policy, Qos, QueuePolicy, Quota, RecoveryPolicy
from phalanx.cluster.protocol.commands import Accept, Drain, Proposal, Refuse
from phalanx.cluster.protocol.events import (
    Cancel,
    Defragment,
    GangDrained,
    Hold,
    JobFinished,
    NodeSilent,
    NoProgress,
    Requeue,
    Scale,
    SetQuota,
    SetReservation,
    Submit,
)
from tests.cluster.drive import EXPECTED, SECOND, Drive
from tests.cluster.test_fuzz import POLICY, World

HOUR = 3600 * SECOND
NODE = GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)


def drained(drive: Drive, job: ClusterJob) -> None:
    drive.tell(
        GangDrained(job=job.id, generation=job.generation, step=job.step, durable=True), SECOND
    )
    drive.wait(SECOND)


def test_a_lender_gets_its_gpus_back_through_a_drain() -> None:
    drive = Drive(2)
    drive.tell(SetQuota(team="owner", gpus=16, request="q"))
    borrowers = [drive.running(team="guest", gang=NODE) for _ in range(2)]
    drive.wait(HOUR)
    owner = drive.submit(team="owner", gang=NODE)
    (order,) = drive.bodies(Drain)
    (leaving,) = [job for job in borrowers if job.state == "draining"]
    assert order.job == leaving.id and "owns 0" in str(leaving.why)
    found = explain(drive.core.queue, drive.core.view, owner.id)
    assert found.reason.code == "others_leave" and found.estimated_start_ns is not None
    drained(drive, leaving)
    assert owner.state == "forming" and leaving.state == "pending"
    # It comes back when there is room, with what it had saved: nobody says when that is.
    found = explain(drive.core.queue, drive.core.view, leaving.id)
    assert found.reason.code == "waits_for_room" and "neither a time limit" in found.unknown


def test_an_elastic_borrower_gives_up_replicas_only() -> None:
    drive = Drive(4)
    drive.tell(SetQuota(team="owner", gpus=16, request="q"))
    gang = GangShape(replicas=4, least_replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)
    borrower = drive.running(team="guest", gang=gang)
    drive.wait(HOUR)
    owner = drive.submit(team="owner", gang=NODE)
    assert not drive.bodies(Drain)
    assert borrower.placement is not None and borrower.placement.replicas == 3
    assert owner.state == "forming"


def test_an_urgent_job_preempts_and_the_log_replays_it() -> None:
    rules = {"normal": Qos(), "urgent": Qos(priority=10, preempts=True)}
    policy = Policy(queue=QueuePolicy(qos=rules))
    drive = Drive(2, policy)
    victim = drive.running(preemptible=True)
    drive.wait(HOUR)
    urgent = drive.submit(qos="urgent", gang=NODE)
    assert victim.state == "draining" and victim.preemptions == 1
    drained(drive, victim)
    assert urgent.state == "forming" and victim.state == "pending"
    again = Core(type(drive.core.view.fleet)(drive.core.view.fleet.nodes), policy)
    for event in drive.log:
        again.handle(event)
    assert again.snapshot() == drive.core.snapshot()


def test_a_maintenance_window_empties_its_node_in_time() -> None:
    drive = Drive(2)
    job = drive.running(gang=NODE)
    (node,) = job.placement.nodes
    start = drive.now_ns + HOUR
    drive.tell(
        SetReservation(name="fan", start_ns=start, end_ns=start + HOUR, nodes=(node,), request="r")
    )
    assert isinstance(drive.sent[-1].body, Accept)
    drive.wait(HOUR - 30 * SECOND)
    assert job.placement.nodes != (node,), "the other node is free: it moves there"
    drive.run(job)
    assert drive.last_restore().source == "peer" and job.preemptions == 0


def test_an_elastic_job_leaves_the_nodes_of_a_window_and_goes_on_with_the_others() -> None:
    drive = Drive(2)
    job = drive.running(gang=structs.replace(NODE, replicas=2, least_replicas=1))
    kept, node = job.placement.nodes
    start = drive.now_ns + HOUR
    drive.tell(SetReservation(name="fan", start_ns=start, end_ns=start + HOUR, nodes=(node,)))
    drive.wait(HOUR - 30 * SECOND)
    assert job.placement.nodes == (kept,) and job.placement.replicas == 1
    drive.run(job)
    assert drive.last_restore().source == "peer" and job.preemptions == 0
    drive.wait(HOUR + 60 * SECOND)
    assert job.placement.replicas == 2, "the window is over"


@pytest.mark.parametrize("order", [Cancel, Hold])
def test_what_was_promised_to_a_job_that_is_withdrawn_is_used_at_once(order) -> None:
    drive = Drive(4)
    drive.running(10, gang=structs.replace(NODE, replicas=2), time_limit_ns=10 * HOUR)
    large = structs.replace(NODE, replicas=4)
    first = drive.submit(gang=large, time_limit_ns=HOUR, priority=100)
    small = drive.submit(gang=NODE)
    assert (first.state, small.state) == ("pending", "pending")
    drive.tell(order(job=first.id))
    drive.wait(SECOND)
    assert small.state == "forming"


@pytest.mark.parametrize("order", [Cancel, Hold])
def test_an_elastic_job_grows_on_what_was_promised_to_one_that_is_withdrawn(order) -> None:
    drive = Drive(3)
    whole = structs.replace(NODE, replicas=3, least_replicas=1)
    job = drive.running(10, gang=whole, time_limit_ns=10 * HOUR)
    drive.tell(Scale(job=job.id, replicas=1))
    drive.run(job)
    drive.wait(15 * 60 * SECOND)
    three = structs.replace(NODE, replicas=3)
    waits = drive.submit(gang=three, time_limit_ns=HOUR, priority=100)
    drive.tell(Scale(job=job.id, replicas=3))
    drive.wait(15 * 60 * SECOND)
    assert job.placement.replicas == 1 and waits.state == "pending"
    drive.tell(order(job=waits.id))
    drive.wait(SECOND)
    assert job.placement.replicas == 3


def test_a_job_that_a_window_shuts_out_saves_its_steps_before_it_opens() -> None:
    drive = Drive(1)
    slow = structs.replace(EXPECTED, flush_ns=20 * 60 * SECOND)  # far more than the grace
    job = drive.running(gang=NODE, expected=slow)
    start = drive.now_ns + 3 * HOUR
    drive.tell(SetReservation(name="fan", start_ns=start, end_ns=start + HOUR, nodes=(0,)))
    drive.wait(2 * HOUR)
    assert job.state == "running"
    drive.wait(HOUR - 20 * 60 * SECOND)
    assert job.state == "draining" and "fan" in str(job.why)
    assert drive.bodies(Drain)[-1].deadline_ns == start
    drained(drive, job)
    assert job.state == "pending" and job.durable == job.step


def test_a_job_that_should_have_ended_long_ago_leaves_a_window_all_the_same() -> None:
    drive = Drive(1)
    steps = structs.replace(EXPECTED, steps=200)  # and the last of them take far too long
    job = drive.running(gang=NODE, expected=steps)
    start = drive.now_ns + HOUR
    drive.tell(SetReservation(name="fan", start_ns=start, end_ns=start + HOUR, nodes=(0,)))
    drive.wait(HOUR - 30 * SECOND)
    assert job.state == "draining" and "fan" in str(job.why)


def test_a_job_that_is_late_takes_no_node_of_a_window_for_one_that_it_lost() -> None:
    drive = Drive(2)
    steps = structs.replace(EXPECTED, steps=200)
    job = drive.running(gang=NODE, expected=steps)
    (node,) = job.placement.nodes
    drive.wait(HOUR)
    now = drive.now_ns
    reserved = SetReservation(name="w", start_ns=now, end_ns=now + HOUR, nodes=(1 - node,))
    drive.tell(structs.replace(reserved, teams=("others",)))
    drive.tell(NodeSilent(node=node))
    drive.wait(10 * SECOND)
    assert job.state == "pending"


def test_who_learns_of_a_window_too_late_has_the_grace_to_save_its_steps() -> None:
    drive = Drive(1)
    job = drive.running(gang=NODE)
    now = drive.now_ns
    drive.tell(SetReservation(name="fan", start_ns=now + SECOND, end_ns=now + HOUR, nodes=(0,)))
    drive.wait(2 * SECOND)
    assert job.state == "draining"
    assert drive.bodies(Drain)[-1].deadline_ns >= now + Policy().queue.grace_ns


def test_a_submission_that_can_never_run_is_refused() -> None:
    drive = Drive(2)
    spec = JobSpec(name="huge", gang=GangShape(replicas=100, tensor=8, slot_gpus=8))
    (command,) = drive.tell(Submit(spec=spec, request="r"))
    assert isinstance(command.body, Refuse) and "the fleet has 2" in str(command.body.reason)
    spec = JobSpec(name="j", gang=NODE, qos="gold", expected=EXPECTED)
    (command,) = drive.tell(Submit(spec=spec, request="r"))
    assert isinstance(command.body, Refuse) and "gold" in str(command.body.reason)


def test_a_proposal_to_defragment_names_the_move_that_frees_a_node() -> None:
    drive = Drive(2)
    first, second, third = (drive.running(gang=GangShape(replicas=4, slot_gpus=4)) for _ in "abc")
    assert first.placement.nodes == second.placement.nodes != third.placement.nodes
    drive.tell(JobFinished(job=first.id, generation=first.generation, step=first.step))
    (command,) = drive.tell(Defragment(request="d"))
    assert isinstance(command.body, Proposal)
    (move,) = command.body.moves
    assert set(move[1:]) == {*second.placement.nodes, *third.placement.nodes}


@pytest.mark.parametrize("hours", [0, 1, 9])
def test_no_job_is_proposed_to_move_onto_nodes_that_a_window_closes_before_it_ends(hours) -> None:
    drive = Drive(2)
    half = {"gang": GangShape(replicas=4, slot_gpus=4), "time_limit_ns": hours * HOUR}
    first, second, third = (drive.running(**half) for _ in "abc")
    drive.tell(JobFinished(job=first.id, generation=first.generation, step=first.step))
    start = drive.now_ns + 4 * HOUR
    reserved = SetReservation(name="w", start_ns=start, end_ns=start + HOUR, gpus=16)
    drive.tell(structs.replace(reserved, gpus=0, nodes=second.placement.nodes))
    (command,) = drive.tell(Defragment(request="d"))
    targets = [move[2] for move in command.body.moves]
    if hours == 1:  # both would be gone in time
        assert len(targets) == 1
    else:
        assert targets == list(third.placement.nodes), "only away from the node that is closed"


CONTESTED = structs.replace(
    POLICY,
    queue=QueuePolicy(
        qos={"normal": Qos(), "urgent": Qos(priority=10, preempts=True), "few": Qos(most_gpus=16)},
        quotas={"red": Quota(gpus=48), "blue": Quota(gpus=16, ceiling=64)},
        least_run_ns=20 * SECOND,
        grace_ns=10 * SECOND,
        starving_ns=600 * SECOND,
        reservations=2,
    ),
)


class Contested(World):
    """The random world with teams that own, borrow and preempt, and windows that come and go."""

    def submission(self) -> Submit:
        rng = self.rng
        found = super().submission()
        limit = rng.choice((0, 100, 1000)) * SECOND
        spec = structs.replace(
            found.spec,
            qos=rng.choice(("normal", "normal", "urgent", "few")),
            preemptible=rng.random() < 0.5,
            priority=rng.choice((0, 0, 5)),
            time_limit_ns=limit,
        )
        return structs.replace(found, spec=spec)

    def next_event(self) -> object:
        rng, now = self.rng, self.drive.now_ns
        if rng.random() < 0.02:
            team = rng.choice(("red", "blue", "green"))
            return SetQuota(team=team, gpus=rng.choice((0, 16, 48)))
        if rng.random() < 0.02:
            start = now + rng.choice((0, 30, 300)) * SECOND
            return SetReservation(
                name=rng.choice("xy"),
                start_ns=start,
                end_ns=start + rng.choice((0, 200)) * SECOND,
                nodes=rng.choice(((), (0, 1), (5,))),
                gpus=rng.choice((0, 16)),
                teams=rng.choice(((), ("red",))),
            )
        return super().next_event()

    def run(self, events: int) -> None:
        super().run(events)
        core = self.drive.core
        for number in core.view.pending:
            found = explain(core.queue, core.view, number)
            assert "{" not in str(found.reason)


@pytest.mark.parametrize("seed", range(15))
def test_a_contested_queue_breaks_no_invariant(seed: int) -> None:
    Contested(seed, CONTESTED).run(150)


@pytest.mark.soak
def test_a_contested_queue_breaks_no_invariant_for_long() -> None:
    for seed in range(1000, 4000):
        Contested(seed, CONTESTED).run(150)


def limited() -> Policy:
    """A site where team "red" may hold 24 GPUs, class "few" 16, and a job of class "low" 16."""
    return Policy(
        queue=QueuePolicy(
            quotas={"red": Quota(gpus=8, ceiling=24)},
            qos={"normal": Qos(), "few": Qos(most_gpus=16), "low": Qos(most_gpus_per_job=16)},
        ),
        recovery=RecoveryPolicy(grow_after_ns=SECOND),
    )


ELASTIC = GangShape(replicas=4, least_replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)


@pytest.mark.parametrize(
    ("fields", "most"),
    [({"team": "red"}, 3), ({"qos": "few"}, 2), ({"qos": "low"}, 2), ({"team": "blue"}, 4)],
)
def test_an_elastic_job_starts_and_grows_within_the_limits_of_its_team_and_class(
    fields: dict[str, str], most: int
) -> None:
    drive = Drive(8, limited())
    job = drive.submit(gang=ELASTIC, **fields)
    assert job.state == "forming" and job.placement.replicas == most
    drive.run(job)
    drive.tell(Scale(job=job.id, replicas=1))
    drive.run(job)
    assert job.placement.replicas == 1
    drive.wait(60 * SECOND)
    (told,) = [
        command.body
        for command in drive.tell(Scale(job=job.id, replicas=4))
        if isinstance(command.body, Accept)
    ]
    assert ("until that limit is raised" in str(told.reason)) == (most < 4)
    drive.run(job)
    drive.wait(1000 * SECOND)
    assert job.placement.replicas == most


def test_spares_count_against_the_limits_of_a_team() -> None:
    drive = Drive(8, limited())
    job = drive.submit(gang=structs.replace(ELASTIC, least_replicas=0, replicas=3), team="red")
    drive.run(job)
    refused = drive.submit(
        gang=structs.replace(ELASTIC, least_replicas=0, replicas=1), team="red", spares=1
    )
    assert refused.state == "pending"
    why = explain(drive.core.queue, drive.core.view, refused.id).reason
    assert "ceiling" in why.code or "24" in str(why)


def test_a_gang_that_must_leave_and_misses_several_nodes_leaves_once() -> None:
    drive = Drive(8)
    job = drive.running(gang=structs.replace(ELASTIC, least_replicas=0, replicas=3))
    drive.tell(Requeue(job=job.id))
    assert job.state == "draining"
    nodes = job.placement.nodes[:2]
    drive.tell(NoProgress(job=job.id, generation=job.generation, step=job.step, nodes=nodes))
    assert job.state in ("pending", "forming")


def test_an_owner_asks_as_soon_as_a_borrower_has_run_long_enough_though_nothing_else_happens() -> (
    None
):
    drive = Drive(2)
    drive.tell(SetQuota(team="owner", gpus=16))
    borrower = drive.running(team="guest", steps=10)
    drive.submit(team="owner", gang=NODE)
    assert borrower.state == "running"  # nobody is stopped in the first minutes
    drive.wait(Policy().queue.least_run_ns + SECOND)
    assert borrower.state == "draining"


def test_a_job_leaves_at_the_shorter_limit_that_it_was_given() -> None:
    drive = Drive(1)
    now = drive.core.view.now_ns
    drive.tell(
        SetReservation(
            name="repair", start_ns=now + 5 * HOUR, end_ns=now + 6 * HOUR, nodes=(0,), request="r"
        )
    )
    asked = {"time_limit_ns": 20 * HOUR, "time_min_ns": HOUR, "requeue_at_limit": True}
    job = drive.running(1, gang=NODE, **asked)
    assert HOUR < job.time_limit_ns < 5 * HOUR
    drive.wait(job.time_limit_ns)
    assert job.state == "draining" and job.why.code == "time_limit"
    drained(drive, job)
    assert job.state == "pending" and job.time_limit_ns == 20 * HOUR
