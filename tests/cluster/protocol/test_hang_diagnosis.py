"""A gang that makes no steps is asked before it is called hung."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from phalanx.cluster.jobs.job import GangShape, Placement
from phalanx.cluster.protocol.events import EventBody, NoProgress
from phalanx.cluster.protocol.hang_diagnosis import LOOK_NS, HangDiagnosis
from phalanx.cluster.protocol.messages import Seen
from phalanx.cluster.protocol.step_watch import StepWatch
from phalanx.cluster.protocol.timeouts import fixed_limits

SECOND = 1_000_000_000
NOW = 5 * SECOND
HANG = NoProgress(job=1, generation=1, step=20)


def seen(node: int, step: int, *, waits: bool = False) -> Seen:
    return Seen(node=node, job=1, generation=1, ranks={node: 2 * step + waits}, folder="")


def begun() -> tuple[HangDiagnosis, StepWatch]:
    """A gang of two nodes, last heard of at step 20, that is being looked at."""
    watch = StepWatch()
    placement = Placement((0, 1), (), replicas=2)
    watch.begin(1, 1, GangShape(replicas=2, slot_gpus=1), placement, fixed_limits(2 * SECOND), 0)
    watch.alive(1, 1, 20, SECOND)
    diagnosis = HangDiagnosis(watch)
    assert diagnosis.begin(HANG, (0, 1), NOW)
    return diagnosis, watch


def look(answers: Sequence[Seen]) -> tuple[list[EventBody], StepWatch]:
    """What is told after the nodes answered."""
    diagnosis, watch = begun()
    return [fact for answer in answers for fact in diagnosis.receive(answer, NOW)], watch


def test_ranks_that_made_steps_since_the_last_report_do_not_hang() -> None:
    told, watch = look([seen(0, 23), seen(1, 22, waits=True)])
    assert told == []
    assert watch.due(6 * SECOND) == [] and watch.gangs[1].reached == 22


@pytest.mark.parametrize(
    "answers",
    [[seen(0, 20, waits=True), seen(1, 20)], [seen(0, 21, waits=True), seen(1, 20)]],
    ids=["one-waits", "one-is-ahead"],
)
def test_ranks_that_stand_where_they_were_hang_and_the_one_behind_is_named(
    answers: list[Seen],
) -> None:
    (fact,), _ = look(answers)
    assert isinstance(fact, NoProgress) and fact.nodes == (1,)


def test_a_node_that_does_not_answer_in_time_is_named() -> None:
    diagnosis, _ = begun()
    assert not diagnosis.begin(HANG, (0, 1), NOW + 1)  # it is looked at already
    assert diagnosis.receive(seen(0, 20, waits=True), NOW + SECOND) == ()
    assert diagnosis.next_deadline_ns() == NOW + LOOK_NS
    assert diagnosis.due(NOW + LOOK_NS - 1) == []
    (fact,) = diagnosis.due(NOW + LOOK_NS)
    assert isinstance(fact, NoProgress) and fact.nodes == (1,)
    assert diagnosis.next_deadline_ns() is None


def test_a_gang_of_which_a_node_cannot_be_asked_is_not_judged() -> None:
    diagnosis, _ = begun()
    diagnosis.abandon(1)
    assert diagnosis.receive(seen(0, 20, waits=True), NOW) == ()
    assert diagnosis.due(NOW + LOOK_NS) == []
