"""Questions about the queue change nothing: what is logged depends on events alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.cluster.core import Core
from phalanx.cluster.forecast.why import explain
from phalanx.cluster.jobs.job import GangShape
from phalanx.cluster.node import Node
from phalanx.cluster.protocol.events import NodeJoined, SetQuota, SetReservation
from phalanx.cluster.protocol.messages import Inventory
from phalanx.cluster.queue import fairshare
from tests.cluster.drive import SECOND, Drive
from tests.examples import examples

HOUR = 3600 * SECOND


def nodes(count: int) -> GangShape:
    return GangShape(replicas=count, tensor=8, slot_gpus=8, slot_cpus=8)


def played(*, curious: bool) -> Drive:
    """Half a day of one team, and of another that waits; somebody may ask all the time."""
    drive = Drive(4)
    first = drive.running(3, gang=nodes(3), team="a", time_limit_ns=1000 * HOUR)
    waits = drive.submit(gang=nodes(4), team="b")
    for _ in range(20):
        drive.train(first, 300)
        if curious:
            explain(drive.core.queue, drive.core.view, waits.id)
    drive.submit(gang=nodes(1), team="a")
    return drive


def test_asking_why_a_job_waits_changes_no_state() -> None:
    assert played(curious=True).core.snapshot() == played(curious=False).core.snapshot()


def test_asking_after_a_restore_changes_no_state() -> None:
    drive = played(curious=False)
    drive.tell(SetReservation(name="w", start_ns=100 * HOUR, end_ns=101 * HOUR, gpus=8))
    asked = Core.restore(drive.core.snapshot())
    before = asked.snapshot()
    for number in asked.view.pending:
        assert explain(asked.queue, asked.view, number).priority
    assert asked.snapshot() == before


@examples(100)
@given(st.lists(st.integers(0, 40 * HOUR), max_size=8), st.sampled_from([1, 300, 24 * HOUR]))
def test_usage_is_the_same_whenever_it_was_looked_at(cuts: list[int], half_life_ns: int) -> None:
    held, end_ns = {"a": 8, "b": 3}, 40 * HOUR + 1_234_567
    whole, parts = {"a": 10**12, "c": 10**9}, {"a": 10**12, "c": 10**9}
    fairshare.accrue(whole, held, 7, end_ns, half_life_ns)
    at_ns = 7
    for cut in [*sorted(cuts), end_ns]:
        fairshare.accrue(parts, held, at_ns, max(cut, at_ns), half_life_ns)
        at_ns = max(cut, at_ns)
    assert parts == whole


def test_usage_halves_with_every_half_life() -> None:
    usage = {"a": 10**12}
    fairshare.accrue(usage, {}, 0, 24 * HOUR, 24 * HOUR)
    assert usage["a"] == pytest.approx(5 * 10**11, rel=1e-6)


def test_a_larger_node_counts_for_those_who_wait_already() -> None:
    drive = Drive(2)
    drive.running(1, gang=nodes(2))
    whole = GangShape(replicas=1, tensor=4, slot_gpus=4, whole_nodes=True)
    waits = drive.submit(gang=whole, team="a")
    node = Node(name="large", gpus=16, kind="h100", leaf="leaf9", pod="pod9")
    drive.tell(NodeJoined(node=node, inventory=Inventory()))
    drive.tell(SetQuota(team="a", gpus=8, ceiling=8))
    twin = Core.restore(drive.core.snapshot())
    told = [str(explain(core.queue, core.view, waits.id).reason) for core in (drive.core, twin)]
    assert told[0] == told[1] and "needs 16" in told[0]
