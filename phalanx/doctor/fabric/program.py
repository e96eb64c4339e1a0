"""The measuring program: one process a rank, started like any program under torchrun.

``python -m phalanx.doctor.fabric.program REQUEST``; rank 0 prints progress, and the report as one
line of JSON. Every rank runs the same search over the same measurements, so nobody has to be told
what comes next.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from phalanx.cluster.pipelines.step_order import RESULT_VARIABLE
from phalanx.doctor.fabric.counters import read_counters, transport_of
from phalanx.doctor.fabric.explain import Edge, FabricShape
from phalanx.doctor.fabric.links import NodeLinks, links_of
from phalanx.doctor.fabric.pairing import Slot
from phalanx.doctor.fabric.ranks import LATENCY_REPEATS, PAIR_REPEATS, FabricRanks
from phalanx.doctor.fabric.report import (
    REPORT_MARK,
    FabricReport,
    FabricRequest,
    PairRate,
    SweepRow,
    Transport,
    verdict_of,
)
from phalanx.doctor.fabric.search import Aim, Measurement, Search
from phalanx.doctor.fabric.sweep import sweep
from phalanx.hardware.probe import Known, MachineReader, describe

GLOO_PAIR_BYTES, NCCL_PAIR_BYTES = 4 << 20, 64 << 20
GLOO_MOST_BYTES, NCCL_MOST_BYTES = 16 << 20, 1 << 30
FEW_NODES = 64  # of which every pair is measured
MOST_PAIRS = 50_000  # in a report: it is read from the program's output


class PairTiming(NamedTuple):
    """What one rank measured with a peer."""

    edge: Edge
    seconds: float
    latency_seconds: float


class PairMeasurements:
    """The search, carried out by all ranks together."""

    def __init__(self, group: FabricRanks, request: FabricRequest, names: list[str]) -> None:
        self._group, self._names = group, names
        usual = NCCL_PAIR_BYTES if group.gpus else GLOO_PAIR_BYTES
        self._size = request.pair_bytes or usual
        every = request.pairs == "all" or (request.pairs == "auto" and len(names) <= FEW_NODES)
        fleet = FabricShape(nodes=group.nodes, rails=group.per_node, **_places(request, names))
        self.search = Search(fleet, Aim(slower=request.slower, every_pair=every))
        self._latencies: dict[Edge, float] = {}
        self._rates: dict[Edge, float] = {}
        self.sent_bytes = 0  # by this rank

    def run(self) -> None:
        """Rounds until the search has ended."""
        while slots := self.search.next_round():
            told = self._group.gather(self._measured(slots))
            self.search.take(slots, self._taken([one for own in told for one in own]))
            outcome = self.search.outcome()
            say(self._group, f"round {outcome.rounds}: {len(outcome.undecided)} open suspects")

    def _measured(self, slots: Sequence[Slot]) -> list[PairTiming]:
        measurements = []
        for slot in slots:
            self._group.barrier()
            for first, second in slot:
                if self._group.node in (first, second):
                    peer = second if self._group.node == first else first
                    seconds, latency = self._group.exchange(peer, self._size)
                    edge = (first, second, self._group.rail)
                    measurements.append(PairTiming(edge, seconds, latency))
                    self.sent_bytes += self._size * (PAIR_REPEATS + 1) + LATENCY_REPEATS
        return measurements

    def _taken(self, told: list[PairTiming]) -> list[Measurement]:
        """Both ends tell of an exchange: the slower one saw the end of it."""
        seconds: dict[Edge, float] = {}
        for one in told:
            seconds[one.edge] = max(one.seconds, seconds.get(one.edge, 0.0))
            self._latencies[one.edge] = one.latency_seconds
        rates = {edge: self._size / each for edge, each in seconds.items()}
        self._rates |= rates
        return [Measurement(*edge, rate) for edge, rate in rates.items()]

    def pairs(self) -> list[PairRate]:
        """Edges that were measured, each with its newest rate; of very many the slowest."""
        slowest = sorted(self.search.levels.items(), key=lambda item: item[1])[:MOST_PAIRS]
        return [
            PairRate(
                first=self._names[edge[0]],
                second=self._names[edge[1]],
                rail=edge[2],
                bytes_per_second=self._rates[edge],
                latency_seconds=self._latencies[edge],
                level=level,
            )
            for edge, level in sorted(slowest)
        ]


def _places(request: FabricRequest, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Leaves and pods by node, where all of them are known."""
    if any(not all(request.places.get(name, ("", ""))) for name in names):
        return {}
    leaves, pods = zip(*(request.places[name] for name in names), strict=True)
    return {"leaves": leaves, "pods": pods}


def say(group: FabricRanks, text: str) -> None:
    """Rank 0's word."""
    if group.rank == 0:
        _print(text)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")  # its output is its result
    sys.stdout.flush()


def measure(request: FabricRequest) -> FabricReport:
    """What every rank runs; all of them have the report."""
    began = time.monotonic()
    before = read_counters()
    group = FabricRanks(request.ranks_per_node)
    names = group.gather(group.name)[:: group.per_node]
    say(group, f"{group.nodes} nodes, {group.per_node} rails, {group.backend}")
    pairs = None
    transports: list[Transport] = []
    if request.pairs != "none" and group.nodes > 1:
        pairs = PairMeasurements(group, request, names)
        pairs.run()
        sent = group.gather(pairs.sent_bytes)
        first = group.node * group.per_node
        own_sent = sum(sent[first : first + group.per_node])
        own = transport_of(group.name, before, read_counters(), own_sent, group.gpus)
        transports = group.gather(own)[:: group.per_node]
    rows: list[SweepRow] = []
    most = request.most_bytes or (NCCL_MOST_BYTES if group.gpus else GLOO_MOST_BYTES)
    for row in sweep(group, request.collectives, most):
        rows.append(row)
        say(group, f"{row.collective} {row.bytes}: {row.problem or f'{row.busbw / 1e9:.3g} GB/s'}")
    links = _links(group)
    group.leave()
    return FabricReport(
        backend=group.backend,
        nodes=names,
        rails=group.per_node,
        pairs=pairs.pairs() if pairs else [],
        outcome=pairs.search.outcome() if pairs else None,
        sweep=rows,
        transports=transports,
        seconds=time.monotonic() - began,
        links=links,
    )


def _links(group: FabricRanks) -> list[NodeLinks]:
    """What nodes say of their cards; sockets between CPUs do not reach what cards could."""
    if not group.gpus:
        return []
    first = group.rank % group.per_node == 0
    own = links_of(group.name, describe(MachineReader(), Known())) if first else None
    return [one for one in group.gather(own) if one is not None]


def main(text: str) -> None:
    """Measure, and have rank 0 tell."""
    report = measure(msgspec.json.decode(text, type=FabricRequest))
    if os.environ.get("RANK", "0") == "0":
        _print(REPORT_MARK + msgspec.json.encode(report).decode())
        if result := os.environ.get(RESULT_VARIABLE):
            Path(result).write_bytes(msgspec.json.encode(verdict_of(report)))


if __name__ == "__main__":
    main(sys.argv[1])
