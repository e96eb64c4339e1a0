"""The search for slow parts: found within few rounds, and nobody else is accused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from phalanx.doctor.fabric.explain import FabricShape, Part, PartKind
from phalanx.doctor.fabric.pairing import logarithmic, ordered, tournament
from phalanx.doctor.fabric.search import Aim, Measurement, Search, SearchOutcome
from tests.doctor.fabric.played_fabric import PlayedFabric

SEEDS = pytest.mark.parametrize("seeds", [6, pytest.param(100, marks=pytest.mark.soak)])
NODES = 64


def missed(seeds: int) -> int:
    """Of so many seeds, those that may go wrong: one in twenty."""
    return max(1, seeds // 20)


def node(draw: random.Random, fleet: FabricShape) -> Part:
    return Part(kind=PartKind.NODE, nodes=(draw.randrange(fleet.nodes),))


def port(draw: random.Random, fleet: FabricShape) -> Part:
    rail = draw.randrange(fleet.rails)
    return Part(kind=PartKind.PORT, nodes=(draw.randrange(fleet.nodes),), rail=rail)


def rail(draw: random.Random, fleet: FabricShape) -> Part:
    return Part(kind=PartKind.RAIL, rail=draw.randrange(fleet.rails))


def path(draw: random.Random, fleet: FabricShape) -> Part:
    first, second = draw.sample(range(fleet.nodes), 2)
    return Part(kind=PartKind.PATH, nodes=ordered(first, second))


def uplink(draw: random.Random, fleet: FabricShape) -> Part:
    return Part(kind=PartKind.UPLINK, leaf=draw.choice(fleet.leaves))


def played(
    fleet: FabricShape, aim: Aim, draw: Callable[[random.Random, FabricShape], Part], seeds: int
) -> tuple[int, list[SearchOutcome]]:
    """How many seeds name exactly the part that is a tenth slower, and all outcomes."""
    found, outcomes = 0, []
    for seed in range(seeds):
        part = draw(random.Random(seed), fleet)
        outcome = PlayedFabric(fleet=fleet, seed=seed, slow={part: 0.9}).search(aim)
        found += [one.part for one in outcome.accused] == [part]
        outcomes.append(outcome)
    return found, outcomes


LEAVES = tuple(f"leaf-{number // 8}" for number in range(NODES))


@SEEDS
@pytest.mark.parametrize(
    ("fleet", "draw"),
    [
        (FabricShape(nodes=NODES), node),  # a cable of a node with one card
        (FabricShape(nodes=NODES, rails=4), port),
        (FabricShape(nodes=NODES, rails=4), node),
        (FabricShape(nodes=NODES, rails=4), rail),
        (FabricShape(nodes=NODES, leaves=LEAVES), node),
        (FabricShape(nodes=NODES, leaves=LEAVES), uplink),
    ],
)
def test_a_tenth_slower_part_is_named_in_twelve_slots_and_nobody_else(
    fleet: FabricShape, draw: Callable[[random.Random, FabricShape], Part], seeds: int
) -> None:
    found, outcomes = played(fleet, Aim(every_pair=False), draw, seeds)
    assert found >= seeds - missed(seeds)
    assert max(outcome.rounds for outcome in outcomes) <= 12
    late = sum(outcome.slots > 12 for outcome in outcomes)
    assert late <= missed(seeds)


@SEEDS
@pytest.mark.parametrize("draw", [path, node])
def test_a_tenth_slower_path_between_two_good_nodes_is_named_where_all_pairs_are_measured(
    draw: Callable[[random.Random, FabricShape], Part], seeds: int
) -> None:
    found, outcomes = played(FabricShape(nodes=NODES), Aim(every_pair=True), draw, seeds)
    assert found >= seeds - missed(seeds)
    assert max(outcome.rounds for outcome in outcomes) <= 12


@SEEDS
def test_a_good_fabric_has_no_slow_part(seeds: int) -> None:
    for every_pair in (False, True):
        for seed in range(seeds):
            fabric = PlayedFabric(fleet=FabricShape(nodes=NODES), seed=seed)
            assert fabric.search(Aim(every_pair=every_pair)).accused == ()


@SEEDS
def test_two_slow_nodes_are_both_named(seeds: int) -> None:
    parts = {Part(kind=PartKind.NODE, nodes=(number,)) for number in (5, 40)}
    slow = dict.fromkeys(parts, 0.8)
    found = 0
    for seed in range(seeds):
        outcome = PlayedFabric(fleet=FabricShape(nodes=NODES), seed=seed, slow=slow).search(Aim())
        found += {one.part for one in outcome.accused} == parts
    assert found >= seeds - missed(seeds)


@SEEDS
@pytest.mark.parametrize("nodes", [3, 4, 5, 8])
def test_among_few_nodes_a_half_as_fast_one_is_named(nodes: int, seeds: int) -> None:
    part = Part(kind=PartKind.NODE, nodes=(1,))
    found = 0
    for seed in range(seeds):
        fabric = PlayedFabric(fleet=FabricShape(nodes=nodes), seed=seed, slow={part: 0.5})
        found += [one.part for one in fabric.search(Aim()).accused] == [part]
    assert found >= seeds - missed(seeds)


def test_of_two_nodes_nobody_can_be_told_apart_and_nobody_is_accused() -> None:
    part = Part(kind=PartKind.NODE, nodes=(1,))
    fabric = PlayedFabric(fleet=FabricShape(nodes=2), seed=0, slow={part: 0.5})
    assert fabric.search(Aim()).accused == ()


def test_in_loud_noise_the_boundary_moves_and_says_so() -> None:
    draw = random.Random(1)
    search = Search(FabricShape(nodes=16), Aim())
    while slots := search.next_round():
        pairs = [pair for slot in slots for pair in slot]
        search.take(slots, [Measurement(*pair, 0, draw.gauss(10, 2)) for pair in pairs])
    outcome = search.outcome()
    assert outcome.boundary < 0.6 and outcome.noise > 0.1
    assert outcome.accused == ()


def test_what_could_not_be_decided_in_the_rounds_given_is_said() -> None:
    part = Part(kind=PartKind.NODE, nodes=(3,))
    fabric = PlayedFabric(fleet=FabricShape(nodes=16), seed=0, slow={part: 0.5})
    outcome = fabric.search(Aim(most_rounds=3))
    assert outcome.accused == () and outcome.undecided == (part,) and outcome.rounds == 3


def test_a_survey_that_measured_nothing_accuses_nobody() -> None:
    search = Search(FabricShape(nodes=4), Aim())
    search.take(search.next_round(), [])
    assert search.next_round() == () and search.outcome().accused == ()


@pytest.mark.parametrize("nodes", [2, 3, 4, 7, 8, 64, 65])
def test_a_tournament_has_every_pair_once_and_a_short_survey_a_logarithm_of_it(nodes: int) -> None:
    slots = tournament(nodes)
    pairs = [pair for slot in slots for pair in slot]
    assert len(pairs) == len(set(pairs)) == math.comb(nodes, 2)
    assert len(slots) == nodes - 1 + nodes % 2
    for slot in slots:
        assert len({number for pair in slot for number in pair}) == 2 * len(slot)
    assert len(logarithmic(nodes)) <= max(3, math.ceil(math.log2(nodes)))
