"""Every invariant, broken on purpose, is caught; an unbroken core has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from msgspec import structs

from phalanx.cluster.core import Core
from phalanx.cluster.forecast.why import WaitExplainer, explainer
from phalanx.cluster.gang import formation
from phalanx.cluster.job_relations import Array, Dependency
from phalanx.cluster.jobs.job import GangShape
from phalanx.cluster.jobs.leave_cause import LeaveCause
from phalanx.cluster.node import Held, NodeState
from phalanx.cluster.policy import Partition, Qos, Quota, StoragePolicy
from phalanx.cluster.protocol.commands import Command, Drain, Form, Restore
from phalanx.cluster.protocol.events import Cancel, DrainNode, Event, Tick
from phalanx.cluster.queue.queue import Queue
from phalanx.cluster.reasons import Reason, reason
from phalanx.cluster.state import Reservation, View
from phalanx.simulate.chaos.lineage import Lineage
from phalanx.simulate.chaos.runner import play
from phalanx.simulate.rules import invariants
from phalanx.simulate.rules.invariants import RULES, Invariants
from phalanx.simulate.scenario.load import load_scenario
from tests.cluster.drive import SECOND, Drive
from tests.simulate.test_controller_mutations import WRONG_DECISIONS

ONE = GangShape(replicas=1, tensor=8, slot_gpus=8, slot_cpus=8)


def checked(break_it: Callable[[Drive, Invariants], None]) -> set[str]:
    """Rules that are found broken after a core was tampered with."""
    drive = Drive(8)
    first = drive.running(spares=1)
    drive.running(name="other")
    checks = Invariants(drive.core, sweep_events=1, replay_events=1000)
    checks.sweep()
    assert checks.found == []
    assert first.placement is not None
    break_it(drive, checks)
    checks.after(Event(drive.core.sequence, drive.now_ns, Tick()), [])
    return {violation.rule for violation in checks.found}


def command(body: Form | Restore, epoch: int = 1) -> Command:
    return Command(1, 0, epoch, (0,), body)


def form(generation: int) -> Form:
    return Form(reason=reason("x"), job=1, generation=generation, nodes=(0,), gpus=())


def two_gangs(drive: Drive, checks: Invariants) -> None:
    jobs = drive.core.view.jobs
    jobs[2].placement = jobs[1].placement


def half_gang(drive: Drive, checks: Invariants) -> None:
    job = drive.core.view.jobs[1]
    placement = job.placement
    job.placement = structs.replace(placement, nodes=placement.nodes[:1], gpus=placement.gpus[:1])


def wrong_books(drive: Drive, checks: Invariants) -> None:
    fleet = drive.core.view.fleet
    free = next(n for n in range(len(fleet)) if not fleet.held[n])
    fleet.held[free][2] = Held(1, 0, 0)


def above_ceiling(drive: Drive, checks: Invariants) -> None:
    drive.core.view.quotas["default"] = Quota(gpus=8, ceiling=8)


def waits_for_ever(drive: Drive, checks: Invariants) -> None:
    job = drive.submit(gang=structs.replace(drive.core.view.jobs[1].spec.gang, replicas=6))
    assert job.state == "pending"
    drive.wait(100 * SECOND)
    drive.tell(Tick())
    checks.starved(50 * SECOND)


def works_in_quarantine(drive: Drive, checks: Invariants) -> None:
    node = drive.core.view.jobs[1].placement.nodes[0]
    fleet = drive.core.view.fleet
    fleet.set_state(node, NodeState.QUARANTINED, drive.now_ns, reason("x"))


def spare_of_nobody(drive: Drive, checks: Invariants) -> None:
    fleet = drive.core.view.fleet
    node = next(n for n in range(8) if not fleet.held[n] and not fleet.spare_for(n))
    fleet.set_state(node, NodeState.SPARE, drive.now_ns, reason("x"), spare_for=2)


def old_generation(drive: Drive, checks: Invariants) -> None:
    event = Event(drive.core.sequence, drive.now_ns, Tick())
    checks.after(event, [command(form(3)), command(form(2))])


def old_epoch(drive: Drive, checks: Invariants) -> None:
    event = Event(drive.core.sequence, drive.now_ns, Tick())
    checks.after(event, [command(form(3), epoch=2), command(form(4), epoch=1)])


def never_durable(drive: Drive, checks: Invariants) -> None:
    event = Event(drive.core.sequence, drive.now_ns, Tick())
    restore = Restore(reason=reason("x"), job=1, generation=2, step=10**6, source="remote")
    checks.after(event, [command(restore)])


def lost_second(drive: Drive, checks: Invariants) -> None:
    drive.core.ledger.accounts[1].buckets["productive"] -= 1


def other_state(drive: Drive, checks: Invariants) -> None:
    drive.core.view.jobs[1].step += 1
    checks.replay()


def all_write_at_once(drive: Drive, checks: Invariants) -> None:
    view = drive.core.view
    view.policy = structs.replace(view.policy, storage=StoragePolicy(flushes=1))
    drive.core.writing.update({1: drive.now_ns, 2: drive.now_ns})


def too_many_of_an_array(drive: Drive, checks: Invariants) -> None:
    job = drive.submit(gang=ONE, array=Array(2, 2))
    for number in (job.id, job.id + 1):
        member = drive.core.view.jobs[number]
        member.spec = structs.replace(member.spec, array=Array(2, 1))


def before_its_time(drive: Drive, checks: Invariants) -> None:
    job = drive.submit(gang=ONE)
    job.spec = structs.replace(job.spec, after=(Dependency("afterok", 1),))


def beside_its_namesake(drive: Drive, checks: Invariants) -> None:
    job = drive.submit(gang=ONE, name="other")
    job.spec = structs.replace(job.spec, after=(Dependency("singleton"),))


def on_reserved_nodes(drive: Drive, checks: Invariants) -> None:
    job = drive.submit(gang=ONE)
    window = {"name": "w", "start_ns": 0, "end_ns": drive.now_ns + SECOND}
    nodes = job.placement.nodes
    drive.core.view.reservations["w"] = Reservation(**window, nodes=nodes, teams=("others",))


def stays_on_reserved_nodes(drive: Drive, checks: Invariants) -> None:
    view, nodes = drive.core.view, drive.core.view.jobs[1].placement.nodes
    window = Reservation(name="w", start_ns=0, end_ns=1 << 60, nodes=nodes)
    view.reservations["w"] = window
    checks.sweep()
    view.now_ns += 3600 * SECOND  # and nobody had it emptied
    drive.core.ledger.advance(view, view.now_ns)


def in_a_partition_for_others(drive: Drive, checks: Invariants) -> None:
    drive.submit(gang=ONE)
    view = drive.core.view
    rules = structs.replace(view.policy.queue, partitions={"default": Partition(teams=("others",))})
    view.policy = structs.replace(view.policy, queue=rules)


def stays_where_it_must_not(drive: Drive, checks: Invariants) -> None:
    node = drive.core.view.jobs[1].placement.nodes[0]
    view = drive.core.view
    view.fleet.set_state(node, NodeState.DRAINING, drive.now_ns, reason("x"))
    drain = DrainNode(node=node, deadline_ns=drive.now_ns + SECOND)
    checks.after(Event(drive.core.sequence, drive.now_ns, drain), [])
    view.now_ns += 3600 * SECOND  # and nobody had it emptied
    drive.core.ledger.advance(view, view.now_ns)
    checks.sweep()


def outlasts_its_limit(drive: Drive, checks: Invariants) -> None:
    job = drive.core.view.jobs[1]
    job.spec = structs.replace(job.spec, time_limit_ns=SECOND)
    job.ran_ns = 10**5 * SECOND


def outlasts_its_budget(drive: Drive, checks: Invariants) -> None:
    drive.core.view.jobs[1].budget_gpu_seconds = 1
    drive.core.view.now_ns += 10**5 * SECOND
    drive.core.ledger.advance(drive.core.view, drive.core.view.now_ns)


def above_its_spares(drive: Drive, checks: Invariants) -> None:
    view = drive.core.view  # its gang alone has 16 GPUs, and job 1 a spare beside
    rules = structs.replace(view.policy.queue, qos={"normal": Qos(most_gpus_per_job=16)})
    view.policy = structs.replace(view.policy, queue=rules)


def told_to_leave(drive: Drive, checks: Invariants, after_ns: int, why: Reason) -> None:
    drive.wait(after_ns)
    job = drive.core.view.jobs[1]
    job.why = why
    order = Drain(reason=why, job=1, generation=job.generation, deadline_ns=0)
    event = Event(drive.core.sequence, drive.now_ns, Tick())
    checks.after(event, [Command(1, 0, 1, (0,), order)])


def sent_away_though_it_may_stay(drive: Drive, checks: Invariants) -> None:
    told_to_leave(drive, checks, 3600 * SECOND, LeaveCause.PREEMPTED.because(job=2))


def sent_away_though_its_team_owns_that(drive: Drive, checks: Invariants) -> None:
    drive.core.view.quotas["default"] = Quota(gpus=64)
    told_to_leave(drive, checks, 3600 * SECOND, LeaveCause.TURN.because(job=2))


def sent_away_too_soon(drive: Drive, checks: Invariants) -> None:
    view = drive.core.view
    view.quotas["default"] = Quota(gpus=8)
    rules = structs.replace(view.policy.queue, least_run_ns=3600 * SECOND)
    view.policy = structs.replace(view.policy, queue=rules)
    told_to_leave(drive, checks, 0, LeaveCause.RECLAIMED.because(job=2))


def runs_though_it_is_held(drive: Drive, checks: Invariants) -> None:
    drive.submit(gang=ONE).held = True


def runs_before_it_was_to(drive: Drive, checks: Invariants) -> None:
    job = drive.submit(gang=ONE)
    job.spec = structs.replace(job.spec, begin_ns=drive.now_ns + SECOND)


def above_its_class(drive: Drive, checks: Invariants) -> None:
    view = drive.core.view
    rules = structs.replace(view.policy.queue, qos={"normal": Qos(most_gpus=8)})
    view.policy = structs.replace(view.policy, queue=rules)


SITE_BROKEN = [
    ("array", too_many_of_an_array),
    ("dependency", before_its_time),
    ("dependency", beside_its_namesake),
    ("window", on_reserved_nodes),
    ("window", stays_on_reserved_nodes),
    ("partition", in_a_partition_for_others),
    ("emptied", stays_where_it_must_not),
    ("limit", outlasts_its_limit),
    ("limit", outlasts_its_budget),
    ("quota", above_its_class),
    ("quota", above_its_spares),
    ("sent_away", sent_away_though_it_may_stay),
    ("sent_away", sent_away_though_its_team_owns_that),
    ("sent_away", sent_away_too_soon),
    ("kept_out", runs_though_it_is_held),
    ("kept_out", runs_before_it_was_to),
]


@pytest.mark.parametrize(("rule", "break_it"), SITE_BROKEN)
def test_a_site_whose_rules_are_broken_is_caught(
    rule: str, break_it: Callable[[Drive, Invariants], None]
) -> None:
    assert rule in checked(break_it)


def waits_for_one_of_an_array(drive: Drive, checks: Invariants) -> None:
    first = drive.submit(gang=ONE, array=Array(3))
    second = drive.core.view.jobs[first.id + 1]
    drive.tell(Cancel(job=second.id))
    drive.submit(gang=ONE, after=(Dependency("afterany", second.id),))


def sent_away_from_a_loan(drive: Drive, checks: Invariants) -> None:
    drive.core.view.quotas["default"] = Quota(gpus=8)
    told_to_leave(drive, checks, 3600 * SECOND, LeaveCause.RECLAIMED.because(job=2))


@pytest.mark.parametrize("order", [waits_for_one_of_an_array, sent_away_from_a_loan])
def test_what_a_site_may_do_is_no_violation(order: Callable[[Drive, Invariants], None]) -> None:
    assert not checked(order)


BROKEN = {
    "one_gang": two_gangs,
    "whole_gang": half_gang,
    "books": wrong_books,
    "quota": above_ceiling,
    "starved": waits_for_ever,
    "quarantined": works_in_quarantine,
    "spares": spare_of_nobody,
    "generation": old_generation,
    "epoch": old_epoch,
    "committed": never_durable,
    "flushes": all_write_at_once,
    "ledger": lost_second,
    "replay": other_state,
}


@pytest.mark.parametrize("rule", BROKEN)
def test_a_core_that_is_tampered_with_is_caught(rule: str) -> None:
    assert rule in checked(BROKEN[rule])


def lineage() -> tuple[Lineage, list[str]]:
    told: list[str] = []
    return Lineage(lambda rule, detail: told.append(rule)), told


def test_a_checkpoint_of_an_older_generation_is_caught() -> None:
    history, told = lineage()
    history.begin(1, 1, 0, 0)
    branch = history.step(1, 1, 1)
    history.begin(1, 2, 1, branch)
    history.durable(1, 1, 1, branch)
    assert told == ["two_generations"]


def test_a_restore_from_a_branch_that_was_given_up_is_caught() -> None:
    history, told = lineage()
    history.begin(1, 1, 0, 0)
    lost = history.step(1, 1, 1)
    history.begin(1, 2, 0, 0)
    history.step(1, 2, 1)
    history.begin(1, 3, 1, lost)
    assert told == ["exactly_once"]


def test_steps_that_are_left_out_or_missing_at_the_end_are_caught() -> None:
    history, told = lineage()
    history.begin(1, 1, 0, 0)
    history.step(1, 1, 1)
    history.step(1, 1, 3)
    history.finished(1, 5)
    assert told == ["exactly_once", "exactly_once"]


def chaos_rules(seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch, *patch: object) -> set[str]:
    monkeypatch.setattr(*patch)
    scenario = load_scenario("chaos")
    return {violation.rule for seed in seeds for violation in play(scenario, seed)[0].checks.found}


def test_a_core_that_forgets_its_snapshots_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*_: object) -> tuple[int, str]:
        return 0, "none"

    assert "committed" in chaos_rules(range(6), monkeypatch, formation, "choose_source", forgetful)


def test_a_core_that_says_nothing_of_what_it_lost_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(*_: object) -> int:
        return 0

    # Seeds in which a node outlives the loss that knows of it, which is rare.
    seeds = (141, 171, 203)
    assert "losses" in chaos_rules(seeds, monkeypatch, formation, "tell_restored", silent)


def test_a_queue_that_starts_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(*_: object) -> list[object]:
        return []

    assert "liveness" in chaos_rules(range(2), monkeypatch, Queue, "schedule", lazy)


def test_a_core_that_raises_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Core.handle

    def fragile(core: Core, event: Event) -> list[Command]:
        if event.sequence == 40:
            raise ZeroDivisionError
        return handle(core, event)

    assert "crash" in chaos_rules(range(2), monkeypatch, Core, "handle", fragile)


def test_a_queue_that_asking_changes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def meddling(queue: Queue, view: View) -> WaitExplainer:
        queue.state.usage_at_ns = view.now_ns + 1
        return explainer(queue, view)

    def waits(drive: Drive, checks: Invariants) -> None:
        drive.submit(gang=structs.replace(ONE, replicas=8))

    monkeypatch.setattr(invariants, "explainer", meddling)
    assert "asking" in checked(waits)


def test_every_rule_is_broken_by_some_test() -> None:
    elsewhere = {"two_generations", "exactly_once", "liveness", "crash", "asking", "losses"}
    elsewhere |= {"two_writers"}
    elsewhere |= {rule for rule, _ in SITE_BROKEN}
    elsewhere |= {rule for _, rule in WRONG_DECISIONS}
    assert set(BROKEN) | elsewhere == set(RULES)
