"""How long nodes stay away: as it was seen, by cause, and what is expected of those that are."""

from __future__ import annotations

import pytest

from phalanx.cluster.core import Core
from phalanx.cluster.fleet import time_away
from phalanx.cluster.policy import Policy, RecoveryPolicy
from phalanx.cluster.protocol.events import NodeRepaired, NodeSilent, Tick
from phalanx.cluster.protocol.messages import CheckResult
from tests.cluster.drive import SECOND, Drive

HOUR = 3600 * SECOND


def goes(drive: Drive, node: int) -> None:
    drive.tell(NodeSilent(node=node))
    drive.wait(SECOND)


def comes_back(drive: Drive, node: int) -> None:
    drive.tell(NodeRepaired(node=node))
    drive.tell(CheckResult(node=node, check="full", passed=True), 60 * SECOND)
    drive.wait(SECOND)


def test_until_some_came_back_a_node_is_expected_when_the_policy_says():
    drive = Drive(8, Policy(recovery=RecoveryPolicy(repair_ns=12 * HOUR)))
    goes(drive, 0)
    ctx = drive.core._ctx
    assert time_away.away(ctx) == [0]
    assert time_away.expected_ns(ctx, (0,), 1) == 12 * HOUR
    assert time_away.expected_ns(ctx, (0,), 2) is None


def test_what_was_seen_of_a_cause_replaces_the_policy():
    drive = Drive(8)
    for node in range(3):
        goes(drive, node)
        drive.wait(HOUR)
        comes_back(drive, node)
    goes(drive, 7)
    expected = time_away.expected_ns(drive.core._ctx, (7,), 1)
    assert expected == pytest.approx(HOUR + 61 * SECOND, rel=0.01)


def test_nodes_that_are_not_back_yet_make_the_wait_longer():
    drive = Drive(8)
    for node in range(3):
        goes(drive, node)
        drive.wait(HOUR)
        comes_back(drive, node)
    goes(drive, 7)
    drive.tell(Tick(), 30 * HOUR)
    expected = time_away.expected_ns(drive.core._ctx, (7,), 1)
    assert expected == pytest.approx(11 * HOUR, rel=0.02)


def test_of_many_that_are_away_the_first_is_back_the_sooner():
    drive = Drive(16)
    ctx = drive.core._ctx
    for node in range(4):
        goes(drive, node)
    one = time_away.expected_ns(ctx, (0,), 1)
    assert time_away.expected_ns(ctx, time_away.away(ctx), 1) == one // 4
    assert time_away.expected_ns(ctx, time_away.away(ctx), 2) == one // 2


def test_what_was_seen_is_in_a_snapshot():
    drive = Drive(8)
    goes(drive, 0)
    drive.wait(HOUR)
    comes_back(drive, 0)
    seen = Core.restore(drive.core.snapshot())._ctx.health.returns
    assert {cause: known.count for cause, known in seen.items()} == {"node_silent": 1}
    assert seen == drive.core._ctx.health.returns
