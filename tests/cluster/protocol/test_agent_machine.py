from __future__ import annotations

from msgspec import structs

from phalanx.cluster.jobs.job import GangShape
from phalanx.cluster.protocol.agent_machine import Agent
from phalanx.cluster.protocol.commands import Abort, Check, Command, Drain, Form, Go, Restore, Stop
from phalanx.cluster.protocol.keeper_state import KeptSteps
from phalanx.cluster.protocol.messages import (
    THIS_NODE,
    Applied,
    Busy,
    CheckResult,
    Connected,
    DeviceError,
    Disconnected,
    Drained,
    Finished,
    FlushWanted,
    Heartbeat,
    Joined,
    KeeperFound,
    KeeperSilent,
    LastSteps,
    NodeNotice,
    NodeSeen,
    ProgramEnded,
    Ready,
    Restored,
    RestoreFailed,
    Sealed,
    Steps,
    Wake,
    WardSealed,
    WorkerExited,
    WorkerFound,
    WorkerUp,
)
from phalanx.cluster.reasons import reason
from tests.cluster.drive import Drive

SECOND = 10**9
WHY = reason("test")
LEASE_OVER = reason("lease_over", seconds=60)
NODES = (7, 3)


class Node:
    """Node 3, slot 1 of a gang of two slots with two ranks each."""

    def __init__(self) -> None:
        self.agent = Agent(3, lease_ns=60 * SECOND, heartbeat_ns=5 * SECOND)
        self.now_ns = 0
        self.sequence = 0

    def command(self, body, epoch: int = 1):
        """Sends a new command; returns what comes of it beside the receipt."""
        self.sequence += 1
        receipt, *rest = self.agent.handle(
            Command(self.sequence, 0, epoch, (3,), body), self.now_ns
        )
        assert receipt == Applied(node=3, sequence=self.sequence, index=0)
        return rest

    def fact(self, fact):
        return self.agent.handle(fact, self.now_ns)

    def form(self, generation: int = 1, **fields):
        return self.command(
            Form(
                reason=WHY,
                job=1,
                generation=generation,
                nodes=NODES,
                gpus=(),
                slot_gpus=2,
                **fields,
            )
        )

    def join(self, generation: int = 1, **fields):
        self.form(generation, **fields)
        self.fact(WorkerUp(job=1, generation=generation, rank=2))
        (joined,) = self.fact(WorkerUp(job=1, generation=generation, rank=3))
        return joined

    def restore(self, generation: int = 1, step: int = 0):
        self.command(Restore(reason=WHY, job=1, generation=generation, step=step, source="peer"))
        self.fact(Restored(job=1, generation=generation, rank=2, step=step))
        (ready,) = self.fact(Restored(job=1, generation=generation, rank=3, step=step))
        return ready

    def go(self, generation: int = 1):
        return self.command(Go(reason=WHY, job=1, generation=generation))

    def run(self, generation: int = 1, step: int = 0, **fields) -> None:
        self.join(generation, **fields)
        self.restore(generation, step)
        assert self.go(generation) == [Go(reason=WHY, job=1, generation=generation)]

    def exit(self, rank: int, step: int, cause: str = "", detail: str = ""):
        return self.fact(
            WorkerExited(
                node=THIS_NODE,
                job=1,
                generation=1,
                rank=rank,
                step=step,
                cause=cause,
                detail=detail,
            )
        )

    def seal(self, step: int, generation: int = 1, ranks=(2, 3), acknowledged: bool = True):
        for rank in ranks:
            out = self.fact(
                Sealed(
                    job=1,
                    generation=generation,
                    rank=rank,
                    step=step,
                    at_ns=step * SECOND,
                    acknowledged=acknowledged,
                )
            )
            assert out == []


def test_a_node_joins_restores_and_goes():
    node = Node()
    (form,) = node.form()
    assert isinstance(form, Form) and form.ranks_on(3) == (2, 3) and form.world_size == 4
    assert node.fact(WorkerUp(job=1, generation=1, rank=2)) == []
    assert node.fact(WorkerUp(job=1, generation=1, rank=3)) == [Joined(node=3, job=1, generation=1)]
    assert node.restore(step=5) == Ready(node=3, job=1, generation=1, step=5)
    node.go()
    assert node.agent.inventory().jobs[0].phase == "running"


def test_a_command_that_comes_twice_is_carried_out_once():
    node = Node()
    command = Command(
        9, 2, 1, (3,), Form(reason=WHY, job=1, generation=1, nodes=NODES, gpus=(), slot_gpus=2)
    )
    first = node.agent.handle(command, 0)
    assert [type(out) for out in first] == [Applied, Form]
    assert node.agent.handle(command, 0) == [Applied(node=3, sequence=9, index=2)]


def test_a_deposed_controller_is_ignored():
    node = Node()
    node.command(Check(reason=WHY, check="quick", node=3), epoch=2)
    old = Command(5, 0, 1, (3,), Stop(reason=WHY, job=1, generation=99))
    assert node.agent.handle(old, 0) == []


def test_an_older_generation_loses_everywhere():
    node = Node()
    node.run(generation=2)
    assert node.form(generation=1) == []
    assert node.command(Abort(reason=WHY, job=1, generation=1)) == []
    assert node.command(Stop(reason=WHY, job=1, generation=1)) == []
    node.seal(8, generation=1)
    assert node.agent.committed(1) == 0
    assert node.exit(rank=2, step=3, cause="killed") == []


def test_a_new_generation_aborts_the_old_one_and_keeps_its_snapshots():
    node = Node()
    node.run()
    node.seal(1)
    node.seal(2)
    node.fact(WardSealed(job=1, generation=1, step=1))
    node.fact(WardSealed(job=1, generation=1, step=2))
    outputs = node.form(generation=2, kept_generation=1)
    assert outputs[0] == Abort(reason=WHY, job=1, generation=1)
    node.fact(WorkerUp(job=1, generation=2, rank=2))
    (joined,) = node.fact(WorkerUp(job=1, generation=2, rank=3))
    assert joined.kept == KeptSteps((2, 1, 0), (2, 1))
    assert (joined.reached, joined.reached_ns) == (2, 2 * SECOND)


def test_three_snapshots_of_the_own_slot_count():
    node = Node()
    node.run()
    for step in range(1, 6):
        node.seal(step)
    joined = node.join(generation=2, kept_generation=1)
    assert joined.kept.own == (5, 4, 3)


def test_a_step_is_committed_when_every_rank_has_sealed_it_and_its_buddy_has_it():
    node = Node()
    node.run()
    node.seal(1)
    node.seal(2, ranks=(2,))
    assert node.agent.committed(1) == 1
    node.seal(2, ranks=(3,), acknowledged=False)
    assert node.agent.committed(1) == 1
    node.seal(2, ranks=(3,))
    assert node.agent.committed(1) == 2


def test_what_was_restored_counts_only_when_the_generation_goes():
    node = Node()
    node.run()
    node.seal(1)
    node.seal(2)
    node.join(generation=2, kept_generation=1)
    node.restore(generation=2, step=1)
    assert node.agent.committed(1) == 2
    joined = node.join(generation=3, kept_generation=1)  # generation 2 never ran
    assert joined.kept.own[:2] == (2, 1)


def test_a_node_that_missed_the_go_knows_from_the_next_form_that_it_was_given():
    node = Node()
    node.run()
    node.seal(2)
    node.join(generation=2, kept_generation=1)
    node.restore(generation=2, step=1)
    joined = node.join(generation=3, kept_generation=2)
    assert joined.kept == KeptSteps((1,), (1,))


def test_snapshots_of_a_branch_that_was_given_up_count_for_nothing():
    node = Node()
    node.run()
    node.seal(50)
    joined = node.join(generation=6, kept_generation=5)
    assert (joined.kept, joined.reached) == (KeptSteps(), 0)


def test_a_node_that_left_and_returns_still_has_what_it_was_told_to_keep():
    node = Node()
    node.run()
    node.seal(9)
    stop = Stop(reason=WHY, job=1, generation=1, keep_snapshots=True)
    assert node.command(stop)[-1] == Stop(reason=WHY, job=1, generation=1, keep_snapshots=True)
    assert node.join(generation=2, kept_generation=1).kept.committed == 9
    node.command(Stop(reason=WHY, job=1, generation=2))
    assert node.join(generation=3, kept_generation=1).kept.committed == -1


def test_a_node_says_how_far_it_was_when_it_is_told_to_stop():
    node = Node()
    node.run()
    node.seal(9)
    node.seal(10, ranks=(2,))
    last = LastSteps(node=3, job=1, generation=1, committed=9, reached=9)
    abort = Abort(reason=WHY, job=1, generation=1)
    assert node.command(abort) == [last, Abort(reason=WHY, job=1, generation=1)]
    assert node.command(Stop(reason=WHY, job=1, generation=1))[0] == last


def test_a_generation_that_never_ran_has_no_last_word():
    node = Node()
    node.run()
    node.seal(9)
    node.join(generation=2, kept_generation=1)
    assert node.command(Abort(reason=WHY, job=1, generation=2)) == []


def test_what_a_keeper_says_after_the_abort_counts():
    node = Node()
    node.run()
    node.seal(8)
    node.seal(9, ranks=(2,))
    node.command(Abort(reason=WHY, job=1, generation=1))
    node.seal(9, ranks=(3,))  # its buddy had it in the end
    node.fact(WardSealed(job=1, generation=1, step=9))
    joined = node.join(generation=2, kept_generation=1)
    assert (joined.kept.own[:2], joined.kept.ward[0]) == ((9, 8), 9)


def test_why_a_worker_left_is_said_to_the_next_controller_too():
    node = Node()
    node.run()
    node.fact(Disconnected())  # the controller dies with the worker: nobody hears this
    (exited,) = node.exit(rank=2, step=4, cause="worker_killed", detail="9")
    hello, again = node.fact(Connected())
    assert hello.inventory.jobs[0].phase == "aborted"
    assert (
        again
        == exited
        == WorkerExited(
            node=3, job=1, generation=1, rank=2, cause="worker_killed", step=4, detail="9"
        )
    )
    node.form(generation=2, kept_generation=1)
    assert [type(out) for out in node.fact(Connected())] == [NodeSeen]  # it is dealt with


def test_a_fenced_job_does_not_come_back():
    node = Node()
    node.run()
    node.command(Stop(reason=WHY, job=1, generation=4))
    assert node.form(generation=4) == []
    assert len(node.form(generation=5)) == 1


def test_an_answer_that_was_lost_is_given_again():
    node = Node()
    joined = node.join()
    assert node.form() == [joined]
    ready = node.restore()
    assert node.command(Restore(reason=WHY, job=1, generation=1, step=0, source="peer")) == [ready]
    hello, again = node.fact(Connected())
    assert isinstance(hello, NodeSeen) and again == ready


def test_another_source_is_tried_within_the_generation():
    node = Node()
    node.join()
    node.command(Restore(reason=WHY, job=1, generation=1, step=7, source="peer"))
    failed = RestoreFailed(
        node=THIS_NODE, job=1, generation=1, source="peer", step=7, detail="checksum"
    )
    assert node.fact(failed) == [structs.replace(failed, node=3)]
    (action,) = node.command(Restore(reason=WHY, job=1, generation=1, step=4, source="remote"))
    assert action == Restore(reason=WHY, job=1, generation=1, step=4, source="remote")
    assert node.fact(Restored(job=1, generation=1, rank=3, step=7)) == []  # of the old order
    assert node.fact(failed) == []


def test_a_fact_is_told_of_the_own_node_and_generation_whatever_it_names():
    node = Node()
    node.run()
    elsewhere = 8
    for fact in (
        DeviceError(node=elsewhere, cause="xid"),
        NodeNotice(node=elsewhere, deadline_ns=9),
        CheckResult(node=elsewhere, check="full", passed=False),
        KeeperSilent(node=elsewhere, job=1, state="silent", seconds=5),
        Busy(node=elsewhere, job=1, generation=1, step=2, what="a validation"),
        WorkerExited(node=elsewhere, job=1, generation=1, rank=2, cause="xid"),
    ):
        assert node.fact(fact) == [structs.replace(fact, node=3)]
    node.form(generation=2)
    old = FlushWanted(job=1, generation=1)
    assert node.fact(old) == [] and node.fact(structs.replace(old, generation=3)) == []
    assert node.fact(structs.replace(old, job=7)) == []
    assert node.fact(structs.replace(old, generation=2)) == [FlushWanted(job=1, generation=2)]


def test_a_dead_worker_is_reported_with_the_steps_before_it():
    node = Node()
    node.run()
    node.seal(1)
    steps, exited = node.exit(rank=3, step=1, cause="gpu_out_of_memory", detail="OOM")
    assert isinstance(steps, Steps) and steps.step == 1
    assert exited == WorkerExited(
        node=3,
        job=1,
        generation=1,
        rank=3,
        cause="gpu_out_of_memory",
        step=1,
        detail="OOM",
    )
    assert node.exit(rank=3, step=1, cause="x") == []


def test_progress_goes_out_with_heartbeats_and_sums_what_was_measured():
    node = Node()
    node.run()
    node.fact(Connected())
    for step in (1, 2):
        for rank in (2, 3):
            node.fact(
                Sealed(job=1, generation=1, rank=rank, step=step, at_ns=step, data_wait_ns=10)
            )
    node.now_ns = node.agent.next_deadline_ns()
    heartbeat, steps = node.fact(Wake())
    assert heartbeat == Heartbeat(node=3, incarnation=0)
    assert (steps.step, steps.committed, steps.data_wait_ns) == (2, 2, 20)
    assert node.fact(Wake()) == []


def test_a_small_gang_may_report_more_often_than_it_breathes():
    node = Node()
    node.agent = Agent(3, lease_ns=60 * SECOND, heartbeat_ns=5 * SECOND, report_ns=SECOND)
    node.fact(Connected())
    assert node.agent.next_deadline_ns() == 5 * SECOND  # nothing to report yet
    node.run()
    node.seal(1)
    assert node.agent.next_deadline_ns() == SECOND
    node.now_ns = SECOND
    (steps,) = node.fact(Wake())
    assert steps.step == 1


def test_a_drained_and_a_finished_job_say_so_when_the_last_rank_has_left():
    for order, said in ((True, Drained), (False, Finished)):
        node = Node()
        node.run()
        if order:
            drain = Drain(reason=WHY, job=1, generation=1, deadline_ns=9)
            assert node.command(drain) == [Drain(reason=WHY, job=1, generation=1, deadline_ns=9)]
        assert node.exit(rank=2, step=4) == []
        (last,) = node.exit(rank=3, step=4)
        assert isinstance(last, said)


def test_workers_end_with_the_lease_when_nobody_speaks():
    node = Node()
    node.run()
    node.fact(Connected())
    node.fact(Disconnected())
    node.now_ns = node.agent.next_deadline_ns() - 1
    assert node.fact(Wake()) == []
    node.now_ns += 1
    assert node.fact(Wake()) == [Stop(reason=LEASE_OVER, job=1, generation=1)]
    assert node.form(generation=1) == []
    assert node.agent.inventory().jobs == ()


def test_snapshots_that_outlived_their_workers_end_with_the_lease_too():
    node = Node()
    node.run()
    node.command(Stop(reason=WHY, job=1, generation=1, keep_snapshots=True))
    assert node.agent.inventory().snapshots
    node.fact(Connected())
    node.fact(Disconnected())
    node.now_ns = node.agent.next_deadline_ns()
    assert node.fact(Wake()) == [Stop(reason=LEASE_OVER, job=1, generation=1)]
    assert node.agent.inventory().snapshots == ()


def test_a_connection_in_time_keeps_the_workers():
    node = Node()
    node.run()
    node.fact(Disconnected())
    node.now_ns = 59 * SECOND
    (hello,) = node.fact(Connected())
    assert hello.inventory.jobs[0].generation == 1
    node.now_ns = 100 * SECOND
    assert not [out for out in node.fact(Wake()) if isinstance(out, Stop)]


def test_a_new_agent_adopts_what_outlived_the_old_one():
    node = Node()
    for rank in (2, 3):
        node.fact(WorkerFound(job=1, generation=4, rank=rank, step=9 + rank, committed=9))
    assert node.agent.inventory().jobs[0].phase == "running"
    node.seal(13, generation=4)
    assert node.agent.committed(1) == 13


def test_a_new_agent_knows_what_the_keeper_holds_of_dead_workers():
    node = Node()
    kept = KeptSteps((20, 19), (20,))
    node.fact(KeeperFound(job=1, kept_generation=4, kept=kept))
    joined = node.join(generation=5, kept_generation=4)
    assert joined.kept == kept


def test_a_worker_that_waits_for_its_go_is_found_waiting():
    node = Node()
    for rank in (2, 3):
        node.fact(WorkerFound(job=1, generation=4, rank=rank, step=9, committed=9, running=False))
    _, ready = node.fact(Connected())
    assert ready == Ready(node=3, job=1, generation=4, step=9)
    assert node.go(4) == [Go(reason=WHY, job=1, generation=4)]


def test_an_order_to_restore_that_comes_before_the_workers_is_kept_for_them():
    """An agent that is started anew is told at once what its gang was told before."""
    node = Node()
    node.form()
    order = Restore(reason=WHY, job=1, generation=1, step=7, source="peer")
    assert node.command(order) == []
    assert node.fact(WorkerUp(job=1, generation=1, rank=2)) == []
    joined, restore = node.fact(WorkerUp(job=1, generation=1, rank=3))
    assert isinstance(joined, Joined)
    assert restore == Restore(reason=WHY, job=1, generation=1, step=7, source="peer")
    assert node.fact(Restored(job=1, generation=1, rank=2, step=7)) == []
    (ready,) = node.fact(Restored(job=1, generation=1, rank=3, step=7))
    assert ready == Ready(node=3, job=1, generation=1, step=7)


def test_checks_and_faults_are_passed_on():
    node = Node()
    (check,) = node.command(Check(reason=WHY, check="full", node=3))
    assert isinstance(check, Command) and check.body == Check(reason=WHY, check="full", node=3)
    assert node.fact(
        CheckResult(node=THIS_NODE, check="full", passed=False, command=1, cause="nvlink")
    ) == [CheckResult(node=3, check="full", passed=False, command=1, cause="nvlink")]
    assert node.fact(DeviceError(node=THIS_NODE, cause="xid", gpu=2)) == [
        DeviceError(node=3, cause="xid", gpu=2)
    ]


def test_a_spare_keeps_workers_warm_and_does_not_join():
    node = Node()
    spare = Form(reason=WHY, job=1, generation=1, nodes=(7, 8), gpus=(), slot_gpus=2, spares=(3,))
    (form,) = node.command(spare)
    assert form == spare and (form.ranks_on(3), form.gpus_on(3)) == ((), 0)
    assert node.agent.inventory().jobs == ()


def test_a_form_that_does_not_name_the_node_changes_nothing():
    node = Node()
    order = Form(reason=WHY, job=1, generation=1, nodes=(7, 8), gpus=(), slot_gpus=2)
    assert node.command(order) == []
    assert node.agent.inventory().jobs == ()


def test_a_form_says_which_ranks_and_gpus_a_node_has():
    form = Form(
        reason=WHY,
        job=1,
        generation=1,
        nodes=(7, 3),
        gpus=(0b0011, 0b1100),
        slot_gpus=2,
        world=3,
        spares=(9,),
    )
    assert [form.ranks_on(node) for node in (7, 3, 9)] == [(0, 1), (2,), ()]
    assert [form.gpus_on(node) for node in (7, 3, 9)] == [0b0011, 0b1100, 0]
    assert structs.replace(form, gpus=()).gpus_on(3) == 0  # the whole node


def test_the_last_slot_has_only_the_ranks_that_are_left():
    drive = Drive(4)
    drive.submit(gang=GangShape(replicas=3, tensor=4, slot_gpus=8))
    order = drive.last_form()
    ranks = []
    for number in order.nodes:
        agent = Agent(number, lease_ns=60 * SECOND, heartbeat_ns=5 * SECOND)
        (*_, form) = agent.handle(Command(1, 0, 1, order.nodes, order), 0)
        assert isinstance(form, Form) and form.world_size == 12
        ranks.append(len(form.ranks_on(number)))
        assert list(agent.jobs[order.job].ranks) == list(form.ranks_on(number))
    assert ranks == [8, 4]


def test_an_end_is_said_again_until_the_job_is_stopped_here():
    node = Node()
    node.fact(Connected())
    node.run(step=5)
    node.exit(rank=2, step=5)
    (said,) = node.exit(rank=3, step=5)
    assert isinstance(said, Finished)
    for _ in range(3):  # messages get lost, and nobody would ask
        node.now_ns += 10 * SECOND
        assert said in node.fact(Wake())
    node.command(Stop(reason=WHY, job=1, generation=1))
    node.now_ns += 10 * SECOND
    assert said not in node.fact(Wake())


def test_a_program_that_connects_before_its_first_step_has_lost_nothing():
    node = Node()
    node.run(step=25)
    for rank in (2, 3):  # it knows no step before it has restored one, and may never come so far
        node.fact(WorkerFound(job=1, generation=1, rank=rank, step=0, committed=-1))
    joined = node.join(generation=2, kept_generation=1)
    assert joined.kept.committed == 25 and joined.reached == 25


def test_a_worker_of_an_older_generation_says_nothing_about_this_one():
    node = Node()
    node.run(step=25)
    node.join(generation=2, kept_generation=1)
    node.fact(WorkerFound(job=1, generation=1, rank=2, step=3, committed=2))
    node.restore(generation=2, step=25)
    assert node.agent.committed(1) == 25


def test_an_end_that_is_waited_for_is_confirmed_also_of_a_job_that_is_not_known():
    node = Node()
    stop = Stop(reason=WHY, job=1, generation=2, confirm=True)
    assert node.command(stop) == [stop]  # its processes may outlive what is known here
    assert node.command(Stop(reason=WHY, job=9, generation=2)) == []
    ended = ProgramEnded(node=THIS_NODE, job=1, generation=2)
    assert node.fact(ended) == [ProgramEnded(node=3, job=1, generation=2)]


def test_what_the_archive_lacks_is_told_with_the_end():
    node = Node()
    node.run()
    node.exit(rank=2, step=9, detail="steps 9: 403")
    (finished,) = [out for out in node.exit(rank=3, step=9) if isinstance(out, Finished)]
    assert (finished.step, finished.not_archived) == (9, "steps 9: 403")
