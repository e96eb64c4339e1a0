"""When the fabric is measured by itself: new nodes once, doubted ones again; few are drained."""

from __future__ import annotations

from phalanx.doctor.fabric.report import FabricProblem
from phalanx.doctor.fabric.watch import (
    LONGEST_SECONDS,
    PAUSE_SECONDS,
    SETTLE_SECONDS,
    FabricWatch,
    SeenNode,
)


def fleet(count: int, **others: SeenNode) -> list[SeenNode]:
    nodes = {f"n{number}": SeenNode(f"n{number}", True, 1, True) for number in range(count)}
    return list((nodes | others).values())


def slow(*names: str) -> list[FabricProblem]:
    return [FabricProblem(text=f"node {name}", nodes=(name,)) for name in names]


def measured_once(nodes: list[SeenNode]) -> FabricWatch:
    watch = FabricWatch()
    watch.due(0.0, nodes)
    assert watch.due(SETTLE_SECONDS, nodes)
    watch.measured(node.name for node in nodes)
    assert watch.due(SETTLE_SECONDS, nodes) == ()
    return watch


def test_a_wave_of_joins_is_measured_once_when_it_has_settled() -> None:
    watch = FabricWatch()
    for second in range(5):
        assert watch.due(float(second), fleet(3 + second)) == ()
    assert watch.due(4 + SETTLE_SECONDS, fleet(7)) == tuple(f"n{number}" for number in range(7))


def test_joins_that_do_not_end_are_not_waited_for_for_ever() -> None:
    watch = FabricWatch()
    seconds = int(LONGEST_SECONDS)
    for second in range(seconds):
        assert watch.due(float(second), fleet(3 + second)) == ()
    assert watch.due(LONGEST_SECONDS, fleet(3 + seconds))


def test_a_node_that_was_doubted_is_measured_again_also_where_nobody_looked_meanwhile() -> None:
    watch = measured_once(fleet(4))
    away = fleet(4, n2=SeenNode("n2", False, 5, False))
    assert watch.due(100.0, away) == ()
    back = fleet(4, n2=SeenNode("n2", True, 6, True))
    assert watch.due(200.0, back) == ()
    assert watch.due(200.0 + SETTLE_SECONDS, back) == ("n2",)
    watch.measured(["n0", "n1", "n2", "n3"])
    between = fleet(4, n1=SeenNode("n1", True, 9, True), n2=back[2])
    assert watch.due(300.0, between) == ()
    assert watch.due(300.0 + SETTLE_SECONDS, between) == ("n1",)


def test_a_node_at_work_is_measured_when_it_is_free() -> None:
    watch = measured_once(fleet(4))
    busy = fleet(4, n9=SeenNode("n9", True, 7, False))
    assert watch.due(100.0, busy) == watch.due(200.0, busy) == ()
    assert watch.due(201.0, fleet(4, n9=SeenNode("n9", True, 7, True))) == ("n9",)


def test_two_nodes_are_not_measured_and_a_failure_is_not_repeated_at_once() -> None:
    watch = FabricWatch()
    watch.due(0.0, fleet(2))
    assert watch.due(100.0, fleet(2)) == ()
    assert watch.due(101.0, [*fleet(2), SeenNode("x", True, 1, True)]) == ()
    assert watch.due(120.0, fleet(3))
    watch.not_measured(120.0)
    assert watch.due(121.0, fleet(3)) == ()
    assert watch.due(120.0 + PAUSE_SECONDS, fleet(3))


def test_nodes_are_drained_within_a_bound_and_paths_are_nobodys() -> None:
    watch = measured_once(fleet(40))
    path = FabricProblem(text="the path between", nodes=("n1", "n2"))
    assert watch.to_drain(0.0, [path, FabricProblem(text="a rail")]) == ()
    assert watch.to_drain(0.0, slow("n1", "n2", "n3")) == ()  # 5 % of 40 are two
    assert watch.to_drain(0.0, slow("n1", "n1")) == ("n1",)
    assert watch.to_drain(60.0, slow("n4", "n5")) == ()  # three within an hour
    assert watch.to_drain(3700.0, slow("n4", "n5")) == ("n4", "n5")
