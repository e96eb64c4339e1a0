"""Which node takes a slot: the cheapest by its start, its failures to come and its traffic."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import GangShape
from phalanx.cluster.node import Node, NodeState
from phalanx.cluster.placement.replacements import NodePrices, replacements
from phalanx.cluster.placement.request import PlacementRequest
from phalanx.cluster.policy import FabricPolicy
from phalanx.cluster.reasons import reason
from phalanx.plan.cost.traffic import AxisTraffic
from tests.cluster.fleets import fleet_of, occupy

WHY = reason("test")
SECOND = 10**9
PLAIN = GangShape(replicas=4, tensor=8, slot_gpus=8)


def placed(
    fleet: Fleet, shape: GangShape = PLAIN, count: int = 4, **more: object
) -> PlacementRequest:
    """A gang on the first nodes of a fleet."""
    for node in range(count):
        occupy(fleet, node, 8)
    keep = tuple(range(count))
    return PlacementRequest(job=1, shape=shape, replicas=shape.replicas, keep=keep, **more)  # type: ignore[arg-type]


def prices(fleet: Fleet, failures: dict[int, int], both: int = 1, **more: int) -> NodePrices:
    """A failure costs 100 s: of some nodes, seconds of them; ``both``: so much more together."""
    by_node = np.full(len(fleet), SECOND, np.int64)
    for node, seconds in failures.items():
        by_node[node] = seconds * SECOND
    given = {"cold_ns": 30 * SECOND, "steps": 10_000, "alike_ns": SECOND, **more}
    return NodePrices(failures_ns=by_node, both_copies_ns=by_node * both, **given)


def spare(fleet: Fleet, node: int, job: int = 0) -> None:
    fleet.set_state(node, NodeState.SPARE, 0, WHY, spare_for=job)


def test_a_slot_gets_its_jobs_spare_then_the_pools_then_any_free_node_nearest_first() -> None:
    fleet = fleet_of(16, leaf=4, pod=8)
    asked = placed(fleet)
    assert replacements(fleet, asked, [(0, ())]) == ((0, 4),)  # its pod
    spare(fleet, 15)
    assert replacements(fleet, asked, [(0, ())]) == ((0, 15),)
    spare(fleet, 5)
    assert replacements(fleet, asked, [(0, ())]) == ((0, 5),)
    spare(fleet, 14, job=1)
    assert replacements(fleet, asked, [(0, ())]) == ((0, 14),)


def test_nodes_that_fail_alike_are_taken_as_if_nobody_had_asked_for_their_price() -> None:
    fleet = fleet_of(16, leaf=4, pod=8)
    asked = placed(fleet, warm=(14,))
    alike = prices(fleet, {})
    for node, job in ((None, 0), (15, 0), (5, 0), (13, 1), (14, 1)):
        if node is not None:
            spare(fleet, node, job)
        for wanted in ([(0, ())], [(0, (1,)), (1, (2,)), (3, ())]):
            usual = replacements(fleet, asked, wanted)
            assert replacements(fleet, asked, wanted, alike) == usual


@pytest.mark.parametrize(
    ("failures", "taken", "why"),
    [
        ({}, 12, "of equals the job's own spare with started workers"),
        ({12: 3}, 13, "another one of its own that fails less"),
        ({12: 20, 13: 25}, 12, "the failures to come cost less than a start"),
        ({12: 40, 13: 45}, 5, "now a start costs less: the pool's"),
        ({12: 40, 13: 45, 5: 3}, 4, "a free node that fails less than the pool's"),
        ({12: 90, 13: 90, 5: 90, 4: 90, 6: 90, 7: 90}, 8, "any node that does not fail so often"),
    ],
)
def test_the_price_of_failures_is_weighed_against_the_start(
    failures: dict[int, int], taken: int, why: str
) -> None:
    fleet = fleet_of(16, leaf=4, pod=16)
    asked = placed(fleet, warm=(12, 13))
    for node in (12, 13):
        spare(fleet, node, job=1)
    spare(fleet, 5)
    found = replacements(fleet, asked, [(0, ())], prices(fleet, failures))
    assert found == ((0, taken),), why


def test_less_than_a_hundredth_of_a_failure_decides_nothing() -> None:
    fleet = fleet_of(8, leaf=8)
    asked = placed(fleet)
    spare(fleet, 6)
    close = prices(fleet, {})
    close.failures_ns[4] -= 1_000_000
    close.failures_ns[6] += 1_000_000
    assert replacements(fleet, asked, [(0, ())], close) == ((0, 6),)


def test_nodes_are_used_once_and_the_cheapest_first() -> None:
    fleet = fleet_of(8, leaf=8)
    asked = placed(fleet)
    risky = prices(fleet, {4: 50, 6: 9})
    found = replacements(fleet, asked, [(slot, ()) for slot in range(4)], risky)
    assert found == ((0, 5), (1, 7), (2, 6), (3, 4))
    assert replacements(fleet, asked, [(slot, ()) for slot in range(5)], risky) == found


def test_a_node_beside_the_copy_of_its_snapshot_costs_what_losing_both_does() -> None:
    fleet = Fleet(
        Node(name=f"n{i}", gpus=8, leaf="l", rack=f"r{i % 4}", switch=f"s{i}") for i in range(12)
    )
    asked = placed(fleet)
    # The buddy stands in rack 1, and so do nodes 5 and 9.
    only = {4: 4, 6: 4, 7: 4, 8: 4, 10: 4, 11: 4}
    assert replacements(fleet, asked, [(0, (1,))], prices(fleet, only)) == ((0, 5),)
    assert replacements(fleet, asked, [(0, (1,))], prices(fleet, only, both=20)) == ((0, 4),)


def test_longer_steps_outweigh_failures_where_it_is_known_what_ranks_send() -> None:
    """One node alone in a pod behind oversubscribed uplinks makes every step longer."""
    fleet = fleet_of(12, leaf=6, pod=6)
    traffic = (AxisTraffic("data", 4, 8, 2e9, False),)
    fabric = FabricPolicy(pod_oversubscription_ppm=7_000_000)
    known = GangShape(replicas=4, tensor=8, slot_gpus=8, traffic=traffic)
    asked = placed(fleet, known, fabric=fabric)
    risky = prices(fleet, {4: 40, 5: 40})
    assert replacements(fleet, asked, [(0, ())], risky) == ((0, 4),)
    unknown = placed(fleet_of(12, leaf=6, pod=6), fabric=fabric)
    assert replacements(fleet, unknown, [(0, ())], risky) == ((0, 6),)


def test_a_wide_tensor_group_is_replaced_only_within_its_domain() -> None:
    fleet = fleet_of(8, leaf=8, domain=4)
    shape = GangShape(tensor=16, slot_gpus=8)
    asked = PlacementRequest(job=1, shape=shape, replicas=1, keep=(0, 1))
    for node in (4, 5, 6, 7):
        spare(fleet, node)
    for weighed in (None, prices(fleet, {2: 90, 3: 95})):
        assert replacements(fleet, asked, [(0, ())], weighed) == ((0, 2),)
    for node in (2, 3):
        fleet.set_state(node, NodeState.DEAD, 0, WHY)
    assert replacements(fleet, asked, [(0, ())]) == ()
