"""A gang that makes no steps is asked before it is called hung."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from phalanx.cluster.jobs.job import GangShape, Placement
from phalanx.cluster.protocol.events import EventBody, NoProgress
from phalanx.cluster.protocol.hang_limits import fixed_limits
from phalanx.cluster.watch import StepWatch
from phalanx.control.server.hang_diagnosis import HangDiagnosis
from phalanx.control.wire.agent_messages import Seen

SECOND = 1_000_000_000
HANG = NoProgress(job=1, generation=1, step=20)


def seen(node: int, step: int, *, waits: bool = False) -> Seen:
    return Seen(node=node, job=1, generation=1, ranks={node: 2 * step + waits}, folder="")


async def look(answers: Sequence[Seen]) -> tuple[list[EventBody], StepWatch]:
    """What is told of a gang of two nodes, last heard of at step 20, after they answered."""
    watch, told, asked = StepWatch(), list[EventBody](), list[int]()
    placement = Placement((0, 1), (), replicas=2)
    watch.begin(1, 1, GangShape(replicas=2, slot_gpus=1), placement, fixed_limits(2 * SECOND), 0)
    watch.alive(1, 1, 20, SECOND)
    diagnosis = HangDiagnosis(
        watch, lambda node, _: asked.append(node) is None, told.extend, lambda: 5 * SECOND
    )
    diagnosis.begin(HANG, (0, 1))
    assert asked == [0, 1]
    for answer in answers:
        diagnosis.receive(answer)
    return told, watch


def test_ranks_that_made_steps_since_the_last_report_do_not_hang() -> None:
    told, watch = asyncio.run(look([seen(0, 23), seen(1, 22, waits=True)]))
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
    (fact,), _ = asyncio.run(look(answers))
    assert isinstance(fact, NoProgress) and fact.nodes == (1,)


def test_a_gang_whose_nodes_are_not_all_connected_is_not_judged() -> None:
    async def away() -> tuple[list[EventBody], HangDiagnosis]:
        told = list[EventBody]()
        diagnosis = HangDiagnosis(
            StepWatch(), lambda node, _: node == 0, told.extend, lambda: 5 * SECOND
        )
        diagnosis.begin(HANG, (0, 1))
        diagnosis.receive(seen(0, 20, waits=True))
        await asyncio.sleep(0)
        return told, diagnosis

    told, diagnosis = asyncio.run(away())
    assert told == [] and diagnosis._open == {}
