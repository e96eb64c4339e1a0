from __future__ import annotations

import pytest
from msgspec import structs

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.gang.layout import (
    buddy_shift,
    column_of,
    column_replicas,
    column_slots,
    with_columns,
    without_columns,
)
from phalanx.cluster.jobs.job import Expected, GangShape
from phalanx.cluster.node import Node
from phalanx.cluster.placement.constraints import matches, parse
from phalanx.cluster.policy import TimeoutPolicy
from phalanx.cluster.protocol.events import NodeSilent
from phalanx.cluster.protocol.liveness import Liveness
from phalanx.cluster.protocol.timeouts import derive
from phalanx.cluster.reasons import reason
from phalanx.config import ConfigError
from tests.cluster.drive import SECOND, fleet_of


@pytest.mark.parametrize(
    ("text", "features", "fits"),
    [
        ("", (), True),
        ("a100|h100 & nvlink", ("h100", "nvlink"), True),
        ("a100|h100 & nvlink", ("h100",), False),
        ("a100|h100&nvlink", ("a100", "nvlink"), True),
        ("(a100 | h100) & !old", ("a100",), True),
        ("(a100 | h100) & !old", ("a100", "old"), False),
        ("!a100", ("h100",), True),
    ],
)
def test_constraints(text, features, fits):
    assert matches(parse(text), features) is fits


@pytest.mark.parametrize("text", ["&", "a|", "a b", "(a", "a)", "a & & b", "!", "a $ b", "()"])
def test_a_constraint_that_makes_no_sense_is_refused(text):
    with pytest.raises(ConfigError, match="constraint"):
        parse(text)


def test_timeouts_have_an_order_that_works():
    found = derive(TimeoutPolicy(), Expected(step_ns=10 * SECOND))
    assert found.heartbeat_ns < found.silent_ns < found.lease_ns
    assert found.silent_ns + found.abort_ns < found.lease_ns


def test_a_measured_step_time_moves_the_deadlines():
    usual = derive(TimeoutPolicy(), Expected(step_ns=60 * SECOND))
    slower = derive(TimeoutPolicy(), Expected(step_ns=60 * SECOND), step_ns=90 * SECOND)
    assert slower.hang_ns > usual.hang_ns > 5 * 60 * SECOND


@pytest.mark.parametrize(
    ("field", "value", "key"),
    [
        ("missed_heartbeats", 1, "timeouts.missed_heartbeats"),
        ("heartbeat_ns", SECOND, "timeouts.heartbeat_ns"),
        ("slack_ppm", 999_999, "timeouts.slack_ppm"),
        ("hang_steps", 1, "timeouts.hang_steps"),
        ("lease_margin_ns", -100 * SECOND, "timeouts.lease_margin_ns"),
    ],
)
def test_an_impossible_order_of_timeouts_is_refused(field, value, key):
    with pytest.raises(ConfigError, match=key):
        derive(structs.replace(TimeoutPolicy(), **{field: value}), Expected())


def test_a_node_without_heartbeats_is_reported_once():
    watch = Liveness(20 * SECOND)
    for node in range(3):
        watch.watch(node, 0)
    watch.heartbeat(0, 15 * SECOND)
    assert watch.next_deadline_ns() == 20 * SECOND
    assert watch.silent(19 * SECOND) == []
    assert [fact.node for fact in watch.silent(20 * SECOND)] == [1, 2]
    assert watch.silent(21 * SECOND) == []
    assert watch.heartbeat(1, 22 * SECOND) is True  # the shell asks what still runs there
    watch.watch(1, 22 * SECOND)
    assert watch.heartbeat(1, 23 * SECOND) is False


def test_a_heartbeat_of_an_agent_that_is_gone_keeps_nobody_alive():
    watch = Liveness(20 * SECOND)
    watch.watch(0, 0, incarnation=2)
    watch.heartbeat(0, 19 * SECOND, incarnation=1)
    assert [fact.node for fact in watch.silent(20 * SECOND)] == [0]


def test_a_broken_connection_is_known_at_once():
    watch = Liveness(20 * SECOND)
    watch.watch(0, 0)
    assert watch.lost(0) == NodeSilent(node=0, connection_lost=True, heard_ns=0)
    assert watch.lost(0) is None
    assert watch.silent(60 * SECOND) == []


def test_nodes_can_be_watched_after_others_were_looked_at():
    watch = Liveness(20 * SECOND)
    watch.watch(0, 0)
    watch.silent(0)
    watch.watch(5, 0)
    for node in (0, 5):
        watch.heartbeat(node, 10 * SECOND)
    assert watch.next_deadline_ns() == 30 * SECOND
    assert [fact.node for fact in watch.silent(40 * SECOND)] == [0, 5]


def test_a_gang_counts_its_slots_and_who_is_in_them():
    shape = GangShape(replicas=4, tensor=4, pipeline=3, slot_gpus=8)
    assert shape.slot_replicas(0, 4) == (0, 1)
    assert shape.slots(4) == 6 and shape.gpus(4) == 48


@pytest.mark.parametrize(
    ("shape", "together"),
    [
        (GangShape(replicas=6, tensor=8, pipeline=2, slot_gpus=8), 1),
        (GangShape(replicas=6, tensor=16, pipeline=2, slot_gpus=8), 1),
        (GangShape(replicas=6, tensor=4, pipeline=2, slot_gpus=8), 2),
        (GangShape(replicas=5, tensor=4, pipeline=2, slot_gpus=8), 0),
        (GangShape(replicas=6, tensor=3, slot_gpus=8), 0),
        (GangShape(replicas=6, slot_gpus=0), 1),
    ],
)
def test_replicas_that_share_slots_leave_together(shape, together):
    assert column_replicas(shape, shape.replicas) == together


@pytest.mark.parametrize("tensor", [4, 8, 16])
def test_a_column_cut_out_and_put_back_leaves_the_others_in_place(tensor):
    shape = GangShape(replicas=6, tensor=tensor, pipeline=3, slot_gpus=8)
    together = column_replicas(shape, 6)
    nodes = tuple(range(100, 100 + shape.slots(6)))
    last = 6 // together - 1
    gone = [nodes[slot] for slot in column_slots(shape, 6, last)]
    rest = without_columns(nodes, shape, 6, [last])
    assert sorted((*rest, *gone)) == list(nodes)
    assert with_columns(rest, shape, 6 - together, gone) == nodes
    for slot in column_slots(shape, 6, last):
        assert column_of(shape, 6, slot) == last
        assert 5 in shape.slot_replicas(slot, 6)


def test_buddies_stand_in_another_rack():
    fleet = fleet_of(64, per_leaf=4)  # a leaf is a rack here
    nodes = tuple(range(8, 48))
    shift = buddy_shift(fleet.columns, nodes)
    racks = fleet.columns.rack
    for slot, node in enumerate(nodes):
        assert racks[node] != racks[nodes[(slot + shift) % len(nodes)]]
    assert buddy_shift(fleet.columns, (3,)) == 0


def test_a_reason_reads_as_a_sentence_even_without_one():
    assert str(reason("never_heard_of", node=3)) == "never heard of (node 3)"


def test_a_buddy_stands_below_another_switch_where_there_is_one() -> None:
    # Eight nodes to a leaf, two to a rack: whatever takes a leaf must not take both copies.
    fleet = Fleet(
        Node(name=f"n{i}", rack=f"r{i // 2}", power=f"p{i // 2}", leaf=f"l{i // 8}")
        for i in range(32)
    )
    shift = buddy_shift(fleet.columns, tuple(range(32)))
    leaves = [i // 8 for i in range(32)]
    assert all(leaves[i] != leaves[(i + shift) % 32] for i in range(32))


def apart(fleet: Fleet, nodes: tuple[int, ...], shift: int) -> bool:
    """Whether nobody shares a failure domain with its buddy."""
    columns = fleet.columns
    pairs = [(node, nodes[(slot + shift) % len(nodes)]) for slot, node in enumerate(nodes)]
    places = (columns.rack, columns.power, columns.leaf)
    return not any(place[one] == place[other] for place in places for one, other in pairs)


def test_buddies_stay_apart_when_spares_have_taken_slots_anywhere() -> None:
    fleet = fleet_of(512, per_leaf=8)
    nodes = list(range(480))
    # Spares of one leaf took these slots: the shortest shifts and the longest pair them.
    for spare, slot in enumerate((0, 8, 240, 241), start=480):
        nodes[slot] = spare
    changed = tuple(nodes)
    assert not any(apart(fleet, changed, shift) for shift in (1, 8, 240))
    assert apart(fleet, changed, buddy_shift(fleet.columns, changed))


def test_what_fails_together_may_be_named_apart_from_the_network() -> None:
    # Two leaves hang on each chassis; the shift that leaves demand is not enough.
    fleet = Fleet(
        Node(name=f"n{i}", rack=f"r{i // 2}", leaf=f"l{i // 4}", switch=f"s{i // 8}")
        for i in range(32)
    )
    shift = buddy_shift(fleet.columns, tuple(range(32)))
    assert all(i // 8 != (i + shift) % 32 // 8 for i in range(32))


def test_the_shift_of_before_is_kept_where_it_will_do() -> None:
    fleet, nodes = fleet_of(64, per_leaf=4), tuple(range(64))
    assert buddy_shift(fleet.columns, nodes, before=24) == 24
    assert buddy_shift(fleet.columns, nodes, before=1) != 1


def test_who_has_a_process_standing_by_must_join_sooner() -> None:
    policy = TimeoutPolicy()
    cold = derive(policy, Expected(start_ns=60 * SECOND))
    ready = derive(policy, Expected(start_ns=60 * SECOND, standby_ns=10 * SECOND))
    assert cold.rejoin_ns == cold.join_ns == ready.join_ns
    assert ready.rejoin_ns < ready.join_ns


def test_workers_that_live_are_given_the_time_that_rejoining_takes() -> None:
    policy = TimeoutPolicy()
    times = Expected(start_ns=60 * SECOND, standby_ns=5 * SECOND, rejoin_ns=300 * SECOND)
    found = derive(policy, times)
    assert found.rejoin_ns > times.rejoin_ns and found.join_ns > times.rejoin_ns
