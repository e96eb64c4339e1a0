"""The rate that rails have to reach, by what nodes say of their cards and GPUs."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from phalanx.doctor.fabric.links import NodeLinks, links_of, reported_floor
from phalanx.doctor.fabric.report import problems_of
from phalanx.hardware.links import pcie_bandwidth
from phalanx.hardware.probe import (
    GpuDescription,
    Known,
    NicDescription,
    NodeDescription,
    RecordedReader,
    describe,
)
from tests.doctor.fabric.test_report import OUTCOME, REPORT
from tests.hardware.probe.test_describe import RECORDED

NDR = NodeLinks(node="a", bits_per_second=400 * 10**9, pcie_generation=5, pcie_lanes=16)
WELL = structs.replace(REPORT, outcome=structs.replace(OUTCOME, accused=()), sweep=[])


def with_links(*links: NodeLinks, rate: float = 30e9):
    assert WELL.outcome is not None
    outcome = structs.replace(WELL.outcome, usual={"leaf": rate})
    return structs.replace(WELL, outcome=outcome, links=list(links))


@pytest.mark.parametrize(
    ("name", "gigabits", "shared", "slot"),
    [
        ("h100-4-rails", 400, 1, (5, 16)),
        ("a100-pcie", 200, 4, (4, 16)),
        ("cpu-only", 0, 1, (0, 0)),
    ],
)
def test_links_are_read_from_what_a_node_says_of_itself(
    name: str, gigabits: int, shared: int, slot: tuple[int, int]
) -> None:
    links = links_of(name, describe(RecordedReader(RECORDED / name), Known()))
    assert links.bits_per_second == gigabits * 10**9
    assert links.gpus_per_card == shared
    assert (links.pcie_generation, links.pcie_lanes) == slot


def test_a_fabric_that_is_slow_everywhere_is_seen_without_naming_a_card() -> None:
    (problem,) = problems_of(with_links(NDR, NDR, NDR))
    assert "30 GB/s, below 39" in problem.text and "cards of 400 Gbit/s" in problem.text
    assert problem.nodes == ()
    assert problems_of(with_links(NDR, NDR, NDR, rate=45e9)) == []


def test_a_card_that_is_named_counts_instead_of_what_nodes_report() -> None:
    assert problems_of(with_links(NDR, NDR, rate=30e9), "hdr") == []


def test_gpus_that_share_a_card_share_its_rate_and_a_slow_slot_bounds_it() -> None:
    shared = structs.replace(NDR, gpus_per_card=2)
    assert shared.bytes_per_second == pytest.approx(NDR.bytes_per_second / 2)
    slow = structs.replace(NDR, pcie_generation=3)
    assert slow.bytes_per_second == pcie_bandwidth(3, 16) < NDR.bytes_per_second


@pytest.mark.parametrize(
    "change",
    [
        {"bits_per_second": 0},
        {"bits_per_second": 123 * 10**9},
        {"bits_per_second": -(400 * 10**9)},
    ],
)
def test_cards_that_nobody_knows_lead_to_no_floor(change: dict[str, int]) -> None:
    assert problems_of(with_links(*[structs.replace(NDR, **change)] * 3, rate=1e6)) == []
    assert reported_floor([]) is None


def test_a_generation_of_pcie_that_the_catalogue_lacks_bounds_nothing() -> None:
    later = structs.replace(NDR, pcie_generation=9)
    assert later.bytes_per_second == structs.replace(NDR, pcie_lanes=0).bytes_per_second > 0


def test_a_node_with_slower_cards_than_most_is_named_and_does_not_lower_the_floor() -> None:
    half = structs.replace(NDR, node="b", bits_per_second=200 * 10**9)
    problems = problems_of(with_links(NDR, half, NDR, rate=45e9))
    assert ["b reports cards of 200 Gbit/s" in one.text for one in problems] == [True]
    assert problems[0].nodes == ()  # what a node says of itself has nobody drained
    found = reported_floor([NDR, half, NDR])
    assert found is not None and found.bytes_per_second == 0.8 * NDR.bytes_per_second


def test_where_few_nodes_say_what_they_have_nothing_follows() -> None:
    silent = NodeLinks(node="x")
    assert reported_floor([NDR, silent, silent]) is None
    assert reported_floor([NDR, NDR, silent]) is not None


def test_pairs_across_uplinks_may_reach_less_unless_a_card_is_named() -> None:
    outcome = structs.replace(OUTCOME, accused=(), usual={"leaf": 45e9, "pods": 6e9})
    report = structs.replace(WELL, outcome=outcome, links=[NDR, NDR])
    assert problems_of(report) == []
    assert ["pods" in one.text for one in problems_of(report, "ndr")] == [True]


def test_rails_without_gpus_near_them_and_a_report_without_links_are_read() -> None:
    nic = NicDescription(name="mlx5_0", bits_per_second=10**11, rail=0, gpus=(0, 1, 2, 3))
    described = NodeDescription(nics=(nic,), gpus=(GpuDescription(index=0, pcie_generation=4),))
    assert links_of("n", described).bytes_per_second == pytest.approx(10**11 / 8 / 4, rel=0.03)
    table = msgspec.to_builtins(REPORT)
    del table["links"]
    assert msgspec.convert(table, type(REPORT)) == REPORT
