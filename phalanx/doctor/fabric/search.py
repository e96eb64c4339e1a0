"""The search for slow parts of a fabric, round by round; pure, whoever measures.

The first round is a survey: every pair, or a logarithmic number of peers for each node. Parts that
explain what is slow there are suspects. Each further round is one slot that measures suspects
again, among pairs that keep the fabric as busy as before. A suspect is accused by new measurements
alone: of many that were slow once by chance none is slow again.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from msgspec import Struct

from phalanx.doctor.fabric.explain import (
    FEW_EDGES,
    SPREAD,
    Edge,
    FabricShape,
    Levels,
    Part,
    PartKind,
    concerns,
    noise_of,
    slow_parts,
    usual_rates,
)
from phalanx.doctor.fabric.pairing import (
    Pair,
    Slot,
    disjoint,
    logarithmic,
    ordered,
    tournament,
)

CLEARED_BY, ACCUSED_BY = 3, 5  # new measurements
TURN = 7  # slots of the tournament from one round to the next, so that peers change


class Aim(Struct, frozen=True, kw_only=True):
    """What is looked for, and how long."""

    slower: float = 0.10  # share of the usual rate that a bad part lacks
    every_pair: bool = True  # else a logarithmic number of peers for each node
    most_rounds: int = 12


class Measurement(NamedTuple):
    """What a pair of nodes reached on a rail, in bytes per second one way."""

    first: int
    second: int
    rail: int
    rate: float

    @property
    def edge(self) -> Edge:
        return (*ordered(self.first, self.second), self.rail)


class Slowness(Struct, frozen=True, kw_only=True):
    """A slow part, and how much of the usual rate it reached when it was measured again."""

    part: Part
    level: float
    measurements: int


class SearchOutcome(Struct, frozen=True, kw_only=True):
    """What a search found."""

    accused: tuple[Slowness, ...]
    undecided: tuple[Part, ...]  # the rounds were not enough
    usual: dict[str, float]  # bytes per second, by tier
    noise: float  # standard deviation over the usual rate
    boundary: float  # levels below it are slow
    rounds: int
    slots: int


class Search:
    """``next_round`` says what to measure, ``take`` hears what came out, until nothing is left."""

    def __init__(self, fleet: FabricShape, aim: Aim) -> None:
        self._fleet, self._aim = fleet, aim
        self._survey: dict[Edge, list[float]] = defaultdict(list)
        self._again: dict[Edge, list[float]] = defaultdict(list)
        self._rounds = self._slots = 0
        self._usual: dict[str, float] = {}
        self._noise, self._boundary = 0.0, 1 - aim.slower / 2
        self.levels: Levels = {}  # each measured edge over what is usual in its tier
        self._suspects: dict[Part, list[float]] = {}  # and their levels when measured again

    def next_round(self) -> tuple[Slot, ...]:
        """Slots to measure one after another; none: the search has ended."""
        if not self._rounds:
            survey = tournament if self._aim.every_pair else logarithmic
            return tuple(survey(self._fleet.nodes))
        if self._rounds >= self._aim.most_rounds or not self._open():
            return ()
        return (self._slot(),)

    def take(self, slots: Sequence[Slot], measurements: Sequence[Measurement]) -> None:
        """What a round measured; pairs may be missing that could not be measured."""
        kept = self._again if self._rounds else self._survey
        for measurement in measurements:
            kept[measurement.edge].append(measurement.rate)
        self._rounds += 1
        self._slots += len(slots)
        self._judge()

    def outcome(self) -> SearchOutcome:
        """What is known so far."""
        accused = [
            Slowness(part=part, level=statistics.median(again), measurements=len(again))
            for part, again in self._suspects.items()
            if len(again) >= ACCUSED_BY and statistics.median(again) < self._boundary
        ]
        return SearchOutcome(
            accused=tuple(accused),
            undecided=tuple(self._open()),
            usual=self._usual,
            noise=self._noise,
            boundary=self._boundary,
            rounds=self._rounds,
            slots=self._slots,
        )

    def _judge(self) -> None:
        # Of two measurements the better one: what disturbs makes slower, and nothing faster.
        rates = {
            edge: statistics.median_high([*self._survey.get(edge, ()), *self._again.get(edge, ())])
            for edge in {**self._survey, **self._again}
        }
        if not rates:
            return
        self._usual = usual_rates(self._fleet, rates)
        self.levels = {edge: self._level(edge, rate) for edge, rate in rates.items()}
        self._noise = self._repeated_noise(rates)
        if len(self.levels) >= FEW_EDGES:  # of fewer, half may be slow by one node
            self._noise = max(self._noise, noise_of(self.levels.values()))
        self._boundary = 1 - max(self._aim.slower / 2, SPREAD * self._noise)
        parts = slow_parts(self._fleet, self.levels, self._boundary)
        self._suspects = {part: self._levels_again(part, parts) for part in parts}

    def _repeated_noise(self, rates: dict[Edge, float]) -> float:
        """How far measurements of the same edge are apart: a few edges alone do not show it."""
        apart = [
            rate / rates[edge]
            for edge, again in self._again.items()
            for rate in [*self._survey.get(edge, ()), *again]
            if len(again) + len(self._survey.get(edge, ())) > 1
        ]
        return noise_of(apart) if apart else 0.0

    def _level(self, edge: Edge, rate: float) -> float:
        return rate / self._usual[self._fleet.tier(edge)]

    def _levels_again(self, part: Part, suspects: list[Part]) -> list[float]:
        """New measurements of a suspect, without those that another suspect may have spoilt."""
        others = [other for other in suspects if other != part]
        return [
            self._level(edge, rate)
            for edge, rates in self._again.items()
            if concerns(self._fleet, part, edge)
            and not any(concerns(self._fleet, other, edge) for other in others)
            for rate in rates
        ]

    def _open(self) -> list[Part]:
        """Suspects that more measurements decide about."""
        return [p for p, again in self._suspects.items() if _is_open(again, self._boundary)]

    def _slot(self) -> Slot:
        """Pairs of open suspects first, those with the fewest new measurements before others."""
        waiting = sorted(self._open(), key=lambda part: len(self._suspects[part]))
        blamed = {node for part in self._suspects for node in part.nodes}
        spread = self._turned()
        wanted = [pair for part in waiting for pair in self._pairs(part, blamed, spread)]
        return tuple(disjoint(_with_controls(wanted, blamed, spread)))

    def _turned(self) -> list[Pair]:
        """Every pair of the fleet, another slot of the tournament first in each round."""
        slots = tournament(self._fleet.nodes)
        at = self._rounds * TURN % len(slots)
        return [pair for slot in slots[at:] + slots[:at] for pair in slot]

    def _pairs(self, part: Part, blamed: set[int], spread: list[Pair]) -> list[Pair]:
        """Pairs that measure a part, with a peer that nobody suspects where there is one."""
        if part.kind == PartKind.PATH:
            return [ordered(*part.nodes)]
        rail = max(0, part.rail)
        touching = [pair for pair in spread if concerns(self._fleet, part, (*pair, rail))]
        if part.kind in (PartKind.RAIL, PartKind.UPLINK):
            return touching
        others = blamed - set(part.nodes)
        return [pair for pair in touching if others.isdisjoint(pair)] or touching


def _is_open(again: list[float], boundary: float) -> bool:
    """A few that are well clear a suspect, more of them accuse it."""
    if len(again) >= ACCUSED_BY:
        return False
    return len(again) < CLEARED_BY or statistics.median(again) < boundary


def _with_controls(wanted: list[Pair], blamed: set[int], spread: list[Pair]) -> Iterator[Pair]:
    yield from wanted
    yield from (pair for pair in spread if blamed.isdisjoint(pair))
