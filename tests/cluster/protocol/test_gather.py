from __future__ import annotations

from msgspec import structs

from phalanx.cluster.protocol.commands import Command, Drain, Form, Restore, Stop
from phalanx.cluster.protocol.events import (
    Corruption,
    GangDrained,
    GangJoined,
    GangReady,
    GangStuck,
    JobFinished,
    Progress,
)
from phalanx.cluster.protocol.gather import Gather
from phalanx.cluster.protocol.keeper_state import KeptSteps
from phalanx.cluster.protocol.messages import (
    Drained,
    Finished,
    Joined,
    LastSteps,
    Ready,
    ReplicasDiffer,
    RestoreFailed,
    Steps,
    WorkerExited,
)
from phalanx.cluster.protocol.outbox import Outbox
from phalanx.cluster.reasons import reason

SECOND = 10**9
WHY = reason("test")


def form(generation: int = 1, nodes=(0, 1, 2), kept=(), shift: int = 1) -> Command:
    """``kept``: nodes by slot of the generation before; (): the same."""
    body = Form(
        reason=WHY,
        job=1,
        generation=generation,
        nodes=nodes,
        gpus=(),
        kept_generation=generation,
        kept_nodes=kept,
        kept_shift=shift,
        deadline_ns=60 * SECOND,
    )
    return Command(generation, 0, 1, nodes, body)


def restore(step: int, generation: int = 1) -> Command:
    body = Restore(
        reason=WHY,
        job=1,
        generation=generation,
        step=step,
        source="peer",
        deadline_ns=90 * SECOND,
    )
    return Command(10 + generation, 0, 1, (0, 1, 2), body)


def joined(node: int, *own: int, ward: tuple[int, ...] = (), **fields) -> Joined:
    return Joined(node=node, job=1, generation=1, kept=KeptSteps(own, ward), **fields)


def steps(node: int, step: int, committed: int | None = None, **fields) -> Steps:
    return Steps(
        node=node,
        job=1,
        generation=1,
        step=step,
        committed=step if committed is None else committed,
        durable=0,
        at_ns=step * SECOND,
        **fields,
    )


def running() -> Gather:
    gather = Gather()
    gather.expect(form())
    for node in range(3):
        gather.receive(joined(node), 0)
    gather.expect(restore(0))
    for node in range(3):
        gather.receive(Ready(node=node, job=1, generation=1, step=0), 0)
    return gather


def test_the_last_answer_completes_a_phase():
    gather = Gather()
    gather.expect(form())
    assert gather.receive(joined(0), 0) == []
    assert gather.receive(joined(0), 0) == []  # twice is once
    assert gather.receive(joined(2), 0) == []
    (event,) = gather.receive(joined(1), 0)
    assert event == GangJoined(job=1, generation=1, step=-1, empty=(0, 2, 1))
    gather.expect(restore(0))
    gather.receive(Ready(node=0, job=1, generation=1, step=0), 0)
    gather.receive(Ready(node=1, job=1, generation=1, step=0), 0)
    assert gather.receive(Ready(node=2, job=1, generation=1, step=0), 0) == [
        GangReady(job=1, generation=1, step=0)
    ]


def test_the_step_to_restore_is_the_least_that_all_have_committed():
    gather = Gather()
    gather.expect(form())
    gather.receive(joined(0, 41, 40), 0)
    gather.receive(joined(1, 40, 39), 0)
    (event,) = gather.receive(joined(2, 41, 40), 0)
    assert event == GangJoined(job=1, generation=1, step=40, newest=40)


def test_lost_slots_count_by_what_their_buddies_keep():
    gather = Gather()
    gather.expect(form(kept=(0, 9, 2)))  # what slot 1 had on node 9 is kept by node 2
    gather.receive(joined(0, 41, 40, ward=(41,)), 0)
    gather.receive(joined(1), 0)  # new here
    (event,) = gather.receive(joined(2, 41, 40, ward=(40, 39)), 0)
    assert event == GangJoined(job=1, generation=1, step=40, empty=(1,), newest=41)


def test_a_gang_that_had_one_node_counts_by_what_its_spare_keeps():
    gather = Gather()
    alone = Form(
        reason=reason("stop"),
        job=1,
        generation=2,
        nodes=(4,),
        gpus=(),
        kept_generation=1,
        kept_nodes=(9,),
        kept_backup=4,
    )
    gather.expect(Command(12, 0, 1, (4,), alone))
    kept = Joined(node=4, job=1, generation=2, kept=KeptSteps((), (41, 40)))
    assert gather.receive(kept, 0) == [GangJoined(job=1, generation=2, step=41, newest=41)]


def test_two_steps_behind_the_others_a_replica_still_finds_a_step_that_all_have():
    """The keeper of slot 1 died with a snapshot under way, when the others had made the next."""
    gather = Gather()
    gather.expect(form())
    gather.receive(joined(0, 41, 40, 39), 0)
    gather.receive(joined(1), 0)  # its keeper is another one
    (event,) = gather.receive(joined(2, 41, 40, 39, ward=(39, 38)), 0)
    assert (event.step, event.empty) == (39, (1,))


def test_a_lost_slot_that_nobody_keeps_leaves_no_step_in_memory():
    gather = Gather()
    gather.expect(form(shift=0))
    gather.receive(joined(0, 41, 40), 0)
    gather.receive(joined(1), 0)
    (event,) = gather.receive(joined(2, 41, 40), 0)
    assert event.step == -1


def test_what_the_survivors_reached_is_reported_before_they_join():
    gather = Gather()
    gather.expect(form())
    gather.receive(joined(0, 41, 40, reached=42, reached_ns=420), 0)
    gather.receive(joined(1, 41, 40, reached=41, reached_ns=417), 0)
    progress, event = gather.receive(joined(2, 41, 40, reached=41, reached_ns=419), 0)
    assert isinstance(progress, Progress) and isinstance(event, GangJoined)
    assert (progress.step, progress.at_ns, progress.committed) == (41, 419, 41)


def test_answers_of_another_generation_or_from_strangers_do_not_count():
    gather = Gather()
    gather.expect(form(generation=2))
    assert gather.receive(joined(0), 0) == []
    stranger = Joined(node=9, job=1, generation=2)
    assert gather.receive(stranger, 0) == []
    assert [event.nodes for event in gather.due(60 * SECOND)] == [(0, 1, 2)]


def test_who_is_late_is_named_once_and_again_after_the_order_was_repeated():
    gather = Gather()
    gather.expect(form())
    gather.receive(joined(1), 0)
    assert gather.next_deadline_ns() == 60 * SECOND
    assert gather.due(59 * SECOND) == []
    stuck = GangStuck(job=1, generation=1, phase="join", nodes=(0, 2))
    assert gather.due(60 * SECOND) == [stuck]
    assert gather.due(61 * SECOND) == []
    gather.expect(form())
    gather.receive(joined(0), 0)
    assert gather.due(60 * SECOND) == [GangStuck(job=1, generation=1, phase="join", nodes=(2,))]


def test_progress_is_the_least_of_all_nodes_and_the_longest_wait_of_any():
    gather = running()
    gather.receive(steps(0, 5, data_wait_ns=3), SECOND)
    gather.receive(steps(1, 4, 3), SECOND)
    assert gather.receive(steps(2, 5, data_wait_ns=7), 2 * SECOND) == []  # too soon to report
    (event,) = gather.receive(steps(1, 6, 5), 6 * SECOND)
    assert (event.step, event.committed, event.data_wait_ns) == (5, 5, 7)
    assert event.at_ns == 5 * SECOND


def test_steps_said_twice_count_once():
    gather = running()
    for _ in range(2):
        gather.receive(steps(0, 5, data_wait_ns=3), SECOND)
    gather.receive(steps(1, 5), SECOND)
    (event,) = gather.receive(steps(2, 5), 6 * SECOND)
    assert event.data_wait_ns == 3


def test_a_gang_is_finished_or_drained_when_all_its_nodes_are():
    gather = running()
    for node in (0, 1):
        gather.receive(Finished(node=node, job=1, generation=1, step=9), 0)
    assert gather.receive(Finished(node=2, job=1, generation=1, step=9), 0) == [
        JobFinished(job=1, generation=1, step=9)
    ]
    gather = running()
    order = Drain(reason=WHY, job=1, generation=1, deadline_ns=SECOND)
    gather.expect(Command(20, 0, 1, (0, 1, 2), order))
    for node in (0, 1):
        gather.receive(Drained(node=node, job=1, generation=1, step=7), 0)
    last = Drained(node=2, job=1, generation=1, step=0, durable=False)
    assert gather.receive(last, 0) == [GangDrained(job=1, generation=1, step=0, durable=False)]


def test_an_order_to_restore_that_goes_out_when_all_have_restored_is_not_waited_for():
    """As after the start of a controller: nodes come back one by one, ready, and are told again."""
    gather = running()
    gather.expect(restore(0))
    finished = [Finished(node=node, job=1, generation=1, step=9) for node in range(3)]
    events = [event for message in finished for event in gather.receive(message, SECOND)]
    assert events[-1] == JobFinished(job=1, generation=1, step=9)


def test_a_dead_worker_is_reported_at_once():
    exited = WorkerExited(node=1, job=1, generation=1, rank=8, cause="xid", step=4)
    assert running().receive(exited, 0) == [
        WorkerExited(job=1, generation=1, node=1, rank=8, cause="xid", step=4)
    ]


def test_a_refused_source_makes_everybody_start_over():
    gather = Gather()
    gather.expect(form())
    for node in range(3):
        gather.receive(joined(node, 5), 0)
    gather.expect(restore(5))
    gather.receive(Ready(node=0, job=1, generation=1, step=5), 0)
    (event,) = gather.receive(
        RestoreFailed(node=1, job=1, generation=1, source="peer", step=5, detail="crc"), 0
    )
    assert isinstance(event, RestoreFailed) and event.source == "peer"
    gather.expect(restore(3))
    gather.receive(Ready(node=0, job=1, generation=1, step=3), 0)
    gather.receive(Ready(node=1, job=1, generation=1, step=3), 0)
    assert gather.receive(Ready(node=2, job=1, generation=1, step=3), 0)


def test_a_stopped_gang_is_forgotten():
    gather = running()
    stop = Stop(reason=WHY, job=1, generation=1)
    gather.expect(Command(9, 0, 1, (0,), stop))
    assert 1 in gather.gangs  # only one node of it
    gather.expect(Command(9, 1, 1, (0, 1, 2), stop))
    assert 1 not in gather.gangs


def test_a_command_is_sent_again_until_it_is_confirmed():
    outbox = Outbox(SECOND)
    command = form()
    outbox.send(command, 0)
    outbox.applied(1, command.sequence, command.index)
    assert outbox.due(SECOND - 1) == []
    assert sorted(node for node, _ in outbox.due(SECOND)) == [0, 2]
    assert outbox.due(2 * SECOND) == []  # pauses double
    assert outbox.next_deadline_ns() == 3 * SECOND
    outbox.forget(2)
    assert [node for node, _ in outbox.due(3 * SECOND)] == [0]


def test_a_newer_generation_overtakes_commands_that_are_still_on_their_way():
    outbox = Outbox(SECOND)
    outbox.send(form(), 0)
    outbox.send(form(generation=2, nodes=(0, 1)), 0)
    sent = sorted((node, command.body.generation) for node, command in outbox.due(SECOND))
    assert sent == [(0, 2), (1, 2), (2, 1)]


def differed(node: int, copies) -> ReplicasDiffer:
    return ReplicasDiffer(
        node=node,
        job=1,
        generation=1,
        step=8,
        clean_step=7,
        world=3,
        copies=copies,
    )


def test_the_minority_of_replicas_that_disagree_is_named_once():
    gather = Gather()
    gather.expect(form(nodes=(4, 5, 6)))
    copies = ((0, 11), (1, 99), (2, 11))
    assert gather.receive(differed(4, copies), 0) == []
    (fact,) = gather.receive(differed(5, copies), 0)
    assert fact == Corruption(job=1, generation=1, step=8, clean_step=7, nodes=(5,))
    assert gather.receive(differed(6, copies), 0) == []
    assert gather.due(60 * SECOND) == [
        GangStuck(job=1, generation=1, phase="join", nodes=(4, 5, 6))
    ]


def test_one_node_alone_cannot_accuse_others_of_wrong_numbers():
    gather = Gather()
    gather.running(1, 1, (4, 5, 6), 0)
    lie = structs.replace(differed(4, ((0, 11), (1, 99))), changed=(1, 2))
    assert gather.receive(lie, 0) == []
    assert gather.receive(lie, 0) == []  # said twice, it is still one word
    (fact,) = gather.due(10 * SECOND)
    assert (fact.nodes, fact.claims) == ((), ())  # made again, and nobody leaves for it
    assert gather.due(20 * SECOND) == []


def test_what_a_node_says_of_its_own_ranks_needs_nobody_else():
    gather = Gather()
    gather.running(1, 1, (4, 5), 0, slot_gpus=4)
    own = structs.replace(differed(5, ((4, 1), (6, 2), (7, 1))), world=8)
    (fact,) = gather.receive(own, 0)
    assert fact.nodes == (5,)


def test_a_node_outside_a_gang_says_nothing_about_it():
    gather = Gather()
    gather.running(1, 1, (4, 5), 0)
    outside = differed(9, ((0, 1), (1, 2)))
    refused = RestoreFailed(node=9, job=1, generation=1, source="remote", step=3)
    for message in (outside, refused):
        assert gather.receive(message, 0) == []
    assert gather.takes_part(5, 1, 1) and not gather.takes_part(9, 1, 1)
    assert gather.due(60 * SECOND) == []
    absurd = structs.replace(differed(4, ((-1, 1), (1 << 40, 2))), changed=(77,))
    assert gather.receive(absurd, 0) == [] and gather.due(60 * SECOND) == []


def test_last_words_come_from_nodes_that_took_part():
    gather = Gather()
    gather.running(1, 1, (4, 5), 0)
    stop = Stop(reason=WHY, job=1, generation=1)
    gather.expect(Command(1, 0, 1, (4, 5), stop))
    lie = LastSteps(node=9, job=1, generation=1, committed=0, reached=0, durable=1 << 40)
    assert gather.receive(lie, 0) == [] and gather.due(60 * SECOND) == []


def test_two_replicas_that_disagree_are_told_with_their_words():
    gather = Gather()
    gather.expect(form(nodes=(4, 5, 6)))
    assert gather.receive(differed(5, ((1, 11), (2, 99))), 0) == []
    (fact,) = gather.receive(differed(6, ((1, 11), (2, 99))), 0)
    assert (fact.nodes, fact.claims, fact.block) == ((), ((5, 11), (6, 99)), 1)
    gather.expect(form(generation=2, nodes=(4, 5, 6)))
    again = structs.replace(differed(5, ((1, 11), (2, 11))), generation=2)
    assert gather.receive(again, 0) == []
    (fact,) = gather.receive(structs.replace(again, node=6), 0)
    assert (fact.nodes, fact.claims) == ((), ((5, 11), (6, 11)))


def test_a_new_durable_checkpoint_is_reported_at_once():
    gather = Gather()
    gather.expect(form(nodes=(0,)))
    gather.receive(joined(0), 0)
    gather.expect(restore(0))
    gather.receive(Ready(node=0, job=1, generation=1, step=0), 0)
    said = Steps(node=0, job=1, generation=1, step=10, committed=10, durable=0, at_ns=5)
    assert gather.receive(said, 10) == []
    (fact,) = gather.receive(structs.replace(said, durable=10), 20)
    assert isinstance(fact, Progress) and fact.durable == 10


def test_a_checkpoint_is_known_though_a_node_never_reports_again():
    gather = Gather()
    gather.expect(form(nodes=(0, 1)))
    gather.receive(joined(0), 0)
    gather.receive(joined(1), 0)
    gather.expect(restore(0))
    for node in (0, 1):
        gather.receive(Ready(node=node, job=1, generation=1, step=0), 0)
    said = Steps(node=0, job=1, generation=1, step=12, committed=11, durable=10, at_ns=5)
    (fact,) = gather.receive(said, 10)
    assert isinstance(fact, Progress)
    assert (fact.step, fact.durable, fact.committed) == (10, 10, 0)
    assert gather.receive(structs.replace(said, step=13), 20) == []


def test_steps_that_are_said_again_after_a_report_are_counted_once():
    gather = Gather()
    gather.running(1, 1, (0, 1), 0)
    found = []
    for step, waited in ((10, 4), (10, 4), (20, 1)):
        for node in (0, 1):
            found += gather.receive(steps(node, step, data_wait_ns=waited * SECOND), step * SECOND)
    assert [(each.step, each.data_wait_ns) for each in found] == [(10, 4 * SECOND), (20, SECOND)]


def test_ranks_of_a_gang_whose_last_slot_is_not_full_are_found_on_their_nodes():
    gather = Gather()
    gather.running(1, 1, (5, 6), 0, slot_gpus=8)
    said = ReplicasDiffer(
        node=5,
        job=1,
        generation=1,
        step=9,
        clean_step=4,
        world=12,
        copies=((3, 1), (7, 2), (11, 1)),
    )
    assert gather.receive(said, 0) == []
    (event,) = gather.receive(structs.replace(said, node=6), 0)
    assert event.nodes == (5,)  # rank 7 is the last of the first node


def test_steps_without_snapshots_are_progress_with_nothing_committed():
    gather = running()
    for node in range(3):
        found = gather.receive(steps(node, 4, committed=-1), 10 * SECOND)
    (event,) = found
    assert isinstance(event, Progress) and (event.step, event.committed) == (4, 0)


def test_what_one_node_says_the_archive_lacks_is_in_the_end_of_its_job():
    gather = running()
    gather.receive(Finished(node=0, job=1, generation=1, step=9), 0)
    gather.receive(Finished(node=1, job=1, generation=1, step=9, not_archived="steps 9: 403"), 0)
    (ended,) = gather.receive(Finished(node=2, job=1, generation=1, step=9), 0)
    assert ended == JobFinished(job=1, generation=1, step=9, not_archived="steps 9: 403")
