"""A keeper that does not answer is told to people, with the step that is still safe."""

from __future__ import annotations

import pytest

from phalanx.cluster.protocol.agent_machine import Agent
from phalanx.cluster.protocol.commands import Notify
from phalanx.cluster.protocol.gather import Gather
from phalanx.cluster.protocol.messages import THIS_NODE, KeeperSilent
from tests.cluster.drive import Drive


def test_what_an_agent_finds_becomes_an_event():
    (message,) = Agent(3, 0, 0).handle(
        KeeperSilent(node=THIS_NODE, job=7, state="silent", seconds=5), 0
    )
    (event,) = Gather().receive(message, 0)
    assert event == KeeperSilent(job=7, node=3, state="silent", seconds=5)


@pytest.mark.parametrize("state", ["silent", "answers", "replaced"])
def test_people_are_told_what_becomes_of_a_silent_keeper(state: str):
    drive = Drive()
    job = drive.running()
    node = job.placement.nodes[0]
    commands = drive.tell(KeeperSilent(job=job.id, node=node, state=state, seconds=21))
    (notice,) = [c.body for c in commands if isinstance(c.body, Notify)]
    assert (notice.job, notice.node) == (job.id, node)
    assert drive.core.view.fleet.nodes[node].name in str(notice.reason)
    assert notice.level == ("info" if state == "answers" else "warning")


def test_a_keeper_of_a_node_that_the_job_has_left_says_nothing():
    drive = Drive()
    job = drive.running()
    other = next(n for n in range(len(drive.core.view.fleet)) if n not in job.placement.nodes)
    commands = drive.tell(KeeperSilent(job=job.id, node=other, state="silent", seconds=5))
    assert not [c for c in commands if isinstance(c.body, Notify)]
