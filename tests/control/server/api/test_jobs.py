"""What the API tells of jobs."""

from __future__ import annotations

from phalanx.cluster.protocol.commands import Command, FailureRate, Notify, Stop
from phalanx.cluster.protocol.events import Event, Tick
from phalanx.cluster.reasons import reason
from phalanx.control.server.api.jobs import DECISIONS_TOLD, last_decisions


def commands(*bodies: FailureRate | Notify | Stop) -> list[Command]:
    return [
        Command(sequence=1, index=index, controller_epoch=1, target=(), body=body)
        for index, body in enumerate(bodies)
    ]


def test_the_reason_that_several_commands_share_is_told_once_the_newest_decision_first() -> None:
    stop = Stop(reason=reason("stop"), job=1, generation=1)
    rate = reason("failure_rate", rate="7.57", failures=1, days=2, nodes="4 h100")
    order = FailureRate(
        reason=rate,
        job=1,
        generation=1,
        per_million_node_days=7570,
        failures=1,
        node_days=2,
    )
    told = commands(order, Notify(reason=rate, job=1), Notify(reason=reason("go", step=0), job=2))
    recent = [
        (Event(sequence=1, time_ns=0, body=Tick()), commands(stop)),
        (Event(sequence=2, time_ns=1, body=Tick()), told),
        (Event(sequence=3, time_ns=2, body=Tick()), commands(stop)),
    ]
    assert [each.code for each in last_decisions(recent, 1)] == ["stop", "failure_rate", "stop"]
    assert [each.code for each in last_decisions(recent, 2)] == ["go"]
    many = [
        (recent[0][0], commands(Notify(reason=reason("go", step=step), job=1)))
        for step in range(2 * DECISIONS_TOLD)
    ]
    assert len(last_decisions(many, 1)) == DECISIONS_TOLD
