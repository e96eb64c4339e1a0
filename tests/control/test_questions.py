"""What a person must decide is told with its nodes."""

from __future__ import annotations

from phalanx.cluster.protocol.events import NodeSilent
from phalanx.control.server.http.views import questions
from tests.cluster.drive import SECOND, Drive


def test_a_question_names_the_nodes_that_wait_for_its_answer_and_why() -> None:
    drive = Drive(64)
    for node in range(20):
        drive.tell(NodeSilent(node=node))
    drive.wait(60 * SECOND)
    (asked,) = questions(drive.core)
    kept = drive.core.withheld
    assert set(asked.nodes) == {drive.core.view.fleet.nodes[node].name for node in kept}
    assert len(asked.nodes) == 16
    assert set(asked.causes) == set(kept.values())
