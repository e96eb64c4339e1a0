"""A fabric with known faults, for the search: rates with noise, bursts of others, uneven nodes."""

from __future__ import annotations

import random

from phalanx.doctor.fabric.explain import FabricShape, Part, concerns
from phalanx.doctor.fabric.pairing import Slot
from phalanx.doctor.fabric.search import Aim, Measurement, Search, SearchOutcome

RATE = 48e9
REPEATS = 3  # of one measurement, the fastest counts, as in the measuring program
NOISE, UNEVEN = 0.02, 0.005  # standard deviations, of a repeat and of a node
BURSTS, WORST_BURST = 0.05, 0.5  # how often other traffic disturbs a repeat, and how much


class PlayedFabric:
    """Answers a search as a fabric would of which some parts reach less."""

    def __init__(
        self, *, fleet: FabricShape, seed: int, slow: dict[Part, float] | None = None
    ) -> None:
        self.fleet, self.slow = fleet, slow or {}  # parts and the share of their rate they reach
        self.random = random.Random(seed)
        self.uneven = [self.random.gauss(1, UNEVEN) for _ in range(fleet.nodes)]

    def measure(self, slots: tuple[Slot, ...]) -> list[Measurement]:
        """What a round would measure."""
        return [
            Measurement(first, second, rail, self._rate(first, second, rail))
            for slot in slots
            for first, second in slot
            for rail in range(self.fleet.rails)
        ]

    def _rate(self, first: int, second: int, rail: int) -> float:
        edge = (first, second, rail)
        shares = [share for part, share in self.slow.items() if concerns(self.fleet, part, edge)]
        best = RATE * min([1.0, *shares]) * min(self.uneven[first], self.uneven[second])
        return best * max(self._disturbed() for _ in range(REPEATS))

    def _disturbed(self) -> float:
        burst = self.random.random() < BURSTS
        lost = self.random.uniform(0, WORST_BURST) if burst else 0.0
        return self.random.gauss(1, NOISE) * (1 - lost)

    def search(self, aim: Aim) -> SearchOutcome:
        """Play a whole search; each slot has to leave every node with one peer."""
        search = Search(self.fleet, aim)
        while slots := search.next_round():
            for slot in slots:
                named = [node for pair in slot for node in pair]
                assert len(named) == len(set(named))
            search.take(slots, self.measure(slots))
        return search.outcome()
