"""The rule that placement is compared with does what Slurm's tree plugin documents."""

from __future__ import annotations

from benchmarks.placement import SITES, compare, tree_best_fit
from tests.cluster.fleets import fleet_of, occupy


def test_the_lowest_sufficient_switch_is_used_and_its_tightest_leaf_first() -> None:
    fleet = fleet_of(24, leaf=4, pod=8)
    occupy(fleet, 4, 8)
    found = tree_best_fit(fleet, 3)
    assert found is not None and found.tolist() == [5, 6, 7]
    occupy(fleet, 9, 8)
    found = tree_best_fit(fleet, 7)  # only pods 0 and 1 are tight; both have seven
    assert found is not None and found.tolist() == [0, 1, 2, 3, 5, 6, 7]


def test_it_takes_large_leaves_and_then_the_smallest_that_holds_the_rest() -> None:
    fleet = fleet_of(12, leaf=4, pod=12)
    for node in (4, 8, 9):
        occupy(fleet, node, 8)
    found = tree_best_fit(fleet, 6)  # four of the first leaf, two of the last
    assert found is not None and found.tolist() == [0, 1, 2, 3, 10, 11]
    assert tree_best_fit(fleet, 10) is None


def test_both_rules_place_on_the_same_fleet_and_ours_is_no_dearer() -> None:
    costs = compare(SITES[2], "70B, 1024 GPUs", seed=0, nodes=400)
    assert costs.floor <= costs.ours <= costs.tree
