"""What is asked of the measuring program, and what it tells."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from phalanx.cluster.fabric.verdict import (
    MOST_FINDINGS,
    MOST_TEXT,
    FabricFinding,
    FabricVerdict,
)
from phalanx.config import ConfigError
from phalanx.config.errors import did_you_mean
from phalanx.doctor.fabric.explain import TIERS, Part, PartKind
from phalanx.doctor.fabric.links import FLOOR_SHARE, NodeLinks, reported_floor
from phalanx.doctor.fabric.search import SearchOutcome
from phalanx.hardware.links import nics

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all")
MOST_BYTES = 8 << 30
PROGRAM = "phalanx.doctor.fabric.program"
# Lines of the program's output that are the report, and not what libraries print.
REPORT_MARK = "phalanx-fabric-report "

PairsWanted = Literal["auto", "all", "log", "none"]
Path = Literal["rdma", "sockets", "loopback", "unknown"]
GpuDirect = Literal["used", "unknown", "none"]


class FabricRequest(Struct, frozen=True, kw_only=True):
    """What the ranks measure."""

    ranks_per_node: int = 1  # one a rail
    pairs: PairsWanted = "auto"
    pair_bytes: int = 0  # 0: as the backend's devices need
    slower: float = 0.10
    collectives: tuple[str, ...] = COLLECTIVES
    most_bytes: int = 0  # of the sweep; 0: as the backend's devices need
    places: dict[str, tuple[str, str]] = {}  # leaf and pod of nodes, where they are known


def program_arguments(request: FabricRequest) -> tuple[str, ...]:
    """What a Python is given to run the measuring program."""
    return ("-m", PROGRAM, msgspec.json.encode(request).decode())


class PairRate(Struct, frozen=True, kw_only=True):
    """What two nodes reached on a rail; ``level`` is over what is usual among such pairs."""

    first: str
    second: str
    rail: int
    bytes_per_second: float
    latency_seconds: float
    level: float


class SweepRow(Struct, frozen=True, kw_only=True):
    """One collective with one size among all ranks."""

    collective: str
    bytes: int
    seconds: float = 0.0
    algbw: float = 0.0  # bytes per second
    busbw: float = 0.0
    problem: str = ""


class Transport(Struct, frozen=True, kw_only=True):
    """Which way a node's bytes went, by counters of the kernel while pairs were measured."""

    node: str
    path: Path
    sent_bytes: int
    rdma_bytes: int = -1  # -1: there is no such counter
    socket_bytes: int = -1
    loopback_bytes: int = -1
    gpu_direct: GpuDirect = "none"  # memory of GPUs, registered with the cards


class FabricReport(Struct, frozen=True, kw_only=True):
    """All that a run of the measuring program found."""

    backend: str
    nodes: list[str]
    rails: int
    pairs: list[PairRate]
    outcome: SearchOutcome | None  # None: pairs were not measured
    sweep: list[SweepRow]
    transports: list[Transport]
    seconds: float
    links: list[NodeLinks] = []  # as nodes describe themselves; []: nothing follows from them


class FabricProblem(Struct, frozen=True, kw_only=True):
    """Something that a person should look at; ``nodes``: whose fault it may be."""

    text: str
    nodes: tuple[str, ...] = ()


SENTENCES = {
    PartKind.RAIL: "rail {rail} of all nodes",
    PartKind.UPLINK: "the uplinks of leaf switch {leaf}",
    PartKind.NODE: "node {nodes}: card, cable, PCIe or host",
    PartKind.PORT: "node {nodes} on rail {rail}: card, cable or switch port",
    PartKind.PATH: "the path between {nodes}{on_rail}: both are well with others",
}


def part_in_words(part: Part, names: list[str]) -> str:
    """A part for a person."""
    return SENTENCES[part.kind].format(
        rail=part.rail,
        leaf=part.leaf,
        nodes=" and ".join(names[node] for node in part.nodes),
        on_rail=f" on rail {part.rail}" if part.rail >= 0 else "",
    )


def problems_of(report: FabricReport, card: str = "") -> list[FabricProblem]:
    """What is wrong with a fabric.

    ``card``: of the catalogue, whose rate it should reach; "": that of what the nodes report.
    """
    names, problems = report.nodes, []
    if report.outcome is not None:
        for one in report.outcome.accused:
            words = part_in_words(one.part, names)
            text = f"{words}: {one.level:.0%} of the usual rate, {one.measurements} times measured"
            problems.append(
                FabricProblem(text=text, nodes=tuple(names[node] for node in one.part.nodes))
            )
    problems += _below_floor(report, *_floor(report, card), every_tier=bool(card))
    for node in _with_less(report):
        problems.append(FabricProblem(text=f"{node.node} reports {node.cards}, most others more"))
    for each in report.transports:
        if each.rdma_bytes >= 0 and each.path == "sockets":
            text = f"{each.node} has RDMA cards, and what it sent went through sockets"
            problems.append(FabricProblem(text=text, nodes=(each.node,)))
    return problems


def all_clear(report: FabricReport) -> str:
    """What is said where there is no problem: no more than could have been seen."""
    if report.outcome is None:
        return "nothing is slow"
    if report.outcome.boundary <= 0:
        return "nothing could be told: rates differed too much; try again when it is quiet"
    return f"nothing is slow by {1 - report.outcome.boundary:.0%} or more"


def verdict_of(report: FabricReport) -> FabricVerdict:
    """What the core is told that wanted a check."""
    if report.outcome is not None and report.outcome.boundary <= 0:
        return FabricVerdict(unclear=all_clear(report))
    problems = problems_of(report)[:MOST_FINDINGS]  # a result has an end
    return FabricVerdict(
        findings=tuple(
            FabricFinding(text=one.text[:MOST_TEXT], nodes=one.nodes) for one in problems
        )
    )


def floor_of(card: str) -> float:
    """Bytes per second that a rail with such a card has to reach."""
    known = nics()
    if card not in known:
        raise ConfigError(
            "--card", card, "is no card of the catalogue", did_you_mean(card, tuple(known))
        )
    return FLOOR_SHARE * known[card].bandwidth * known[card].payload_share


def _floor(report: FabricReport, card: str) -> tuple[float, str]:
    """The rate that a rail has to reach, and by whom; 0: nobody knows."""
    if card:
        return floor_of(card), f"{FLOOR_SHARE:.0%} of what {card} carries"
    found = reported_floor(report.links)
    return (0.0, "") if found is None else (found.bytes_per_second, found.why)


def _with_less(report: FabricReport) -> tuple[NodeLinks, ...]:
    """Nodes that report slower links than most."""
    found = reported_floor(report.links)
    return () if found is None else found.less


def _below_floor(
    report: FabricReport, floor: float, why: str, *, every_tier: bool
) -> list[FabricProblem]:
    """Everybody may be slow alike, which only the catalogue tells.

    Where nobody asked for a rate, only the nearest pairs have to reach it: uplinks may be fewer.
    """
    problems = []
    usual = report.outcome.usual if report.outcome is not None else {}
    nearest = min(usual, key=TIERS.index, default="")
    for tier, rate in usual.items():
        if rate < floor and (every_tier or tier == nearest):
            reached = f"pairs ({tier}) usually reach {rate / 1e9:.3g} GB/s"
            text = f"{reached}, below {floor / 1e9:.3g}: {why}"
            problems.append(FabricProblem(text=text))
    # Rings of a collective use all rails of a node; an all-to-all sends from each rank by its own.
    for name in COLLECTIVES:
        rows = [row for row in report.sweep if row.collective == name and not row.problem]
        wanted = floor if name == "all_to_all" else floor * report.rails
        if rows and rows[-1].busbw < wanted:
            text = f"{name} has a busbw of {rows[-1].busbw / 1e9:.3g} GB/s, below "
            problems.append(
                FabricProblem(text=f"{text}{wanted / 1e9:.3g} ({rows[-1].bytes} bytes): {why}")
            )
    return problems


def find_report(output: bytes) -> FabricReport | None:
    """The report in what rank 0 printed; None: it has not come to that."""
    for line in reversed(output.splitlines()):
        _, mark, text = line.partition(REPORT_MARK.encode())
        if mark:
            return msgspec.json.decode(text, type=FabricReport)
    return None
