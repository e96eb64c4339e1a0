"""Placement: seconds for one giant gang, and predicted communication beside a hop-count best fit.

The comparison is the rule of Slurm's topology/tree plugin as its documentation describes it: the
lowest switch below which the job fits, then its leaves by best fit, ranks in the order of nodes.
Both place the same gang on the same fleet; ``communication.cost_of`` judges both.

A fleet counts as fragmented for a gang when the gang must stand below more leaves or more pods than
it would need on an empty fleet: a matter of free nodes alone, whoever places it and whatever the
links cost. Where the tree rule is already at what the NICs alone take, no rule can win anything;
those fleets count all the same, and are shown apart. The bar is the mean (geometric, of ratios)
over all fragmented fleets.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from phalanx.cluster.fleet.columns import Column
from phalanx.cluster.fleet.fleet import Fleet
from phalanx.cluster.jobs.job import GangShape, Placement
from phalanx.cluster.node import Held, Node
from phalanx.cluster.placement.choose import PlacementRequest, place
from phalanx.cluster.placement.communication import cost_of, inside_leaf_ns
from phalanx.cluster.policy import FabricPolicy
from phalanx.cluster.units import MILLION
from phalanx.config import PRESETS, resolve_model
from phalanx.hardware import cluster
from phalanx.plan import Mapping, Workload
from phalanx.plan.cost.traffic import traffic
from proof.report import report

NODES = 12_500


@dataclass(frozen=True)
class Site:
    """A fabric: nodes of a leaf and of a pod, and what is lost above each."""

    name: str
    leaf_nodes: int
    pod_nodes: int
    leaf_oversubscription: float
    pod_oversubscription: float

    def fabric(self) -> FabricPolicy:
        return FabricPolicy(
            leaf_oversubscription_ppm=int(self.leaf_oversubscription * MILLION),
            pod_oversubscription_ppm=int(self.pod_oversubscription * MILLION),
        )


SITES = (
    # "The Llama 3 Herd of Models", 3.3.1: two servers a rack, pods of 3,072 GPUs, 1:7 above.
    Site("llama3-clos", 2, 384, 1.0, 7.0),
    # Alibaba HPN (SIGCOMM 2024): segments of 1,024 GPUs, pods of about 15,000, 15:1 above.
    Site("hpn", 128, 1_920, 1.0, 15.0),
    Site("roce 2:1 and 4:1", 16, 128, 2.0, 4.0),
    Site("rails 1:1 and 2:1", 32, 256, 1.0, 2.0),
    Site("rails, nothing lost", 32, 256, 1.0, 1.0),
)

# (preset, samples of a step, sequence, mapping); zero and schedule as the published runs chose.
GANGS = {
    "8B, 256 GPUs": ("llama3-8b", 512, 8192, Mapping(data=256, zero=3, micro_batch=2)),
    "70B, 1024 GPUs": ("llama3-70b", 1024, 8192, Mapping(tensor=8, pipeline=4, data=32)),
    "405B, 4096 GPUs": ("llama3-405b", 1024, 8192, Mapping(tensor=8, pipeline=16, data=32)),
    "405B, 16384 GPUs": (
        "llama3-405b",
        2048,
        8192,
        Mapping(tensor=8, pipeline=16, data=128, schedule="interleaved", virtual_stages=4),
    ),
    "DeepSeek-V3, 2048 GPUs": (
        "deepseek-v3",
        15_360,
        4096,
        Mapping(pipeline=16, data=128, expert=64, schedule="dualpipe"),
    ),
}


def shape(name: str) -> GangShape:
    """The gang of a published kind of run, with the traffic that the planner predicts."""
    preset, batch, sequence, mapping = GANGS[name]
    work = Workload(model=resolve_model(PRESETS[preset]), sequence=sequence, global_batch=batch)
    return gang_of(work, mapping)


def gang_of(work: Workload, mapping: Mapping) -> GangShape:
    """The gang of a mapping on nodes of eight GPUs."""
    return GangShape(
        replicas=mapping.data,
        tensor=mapping.tensor,
        context=mapping.context,
        pipeline=mapping.pipeline,
        slot_gpus=min(8, mapping.gpus),
        traffic=traffic(work, mapping, cluster(f"h100-{mapping.gpus}")),
    )


def whole(node: Node) -> Held:
    """All of a node."""
    return Held((1 << node.gpus) - 1, node.cpus, node.memory_bytes)


def fleet_of(site: Site, nodes: int = NODES) -> Fleet:
    """An empty fleet of a site."""
    return Fleet(
        Node(
            name=f"node-{i}",
            leaf=f"leaf-{i // site.leaf_nodes}",
            pod=f"pod-{i // site.pod_nodes}",
            rails=8,
        )
        for i in range(nodes)
    )


def tree_best_fit(fleet: Fleet, wanted: int) -> Column | None:
    """Slurm's tree rule: lowest sufficient switch, then leaves by best fit, in order of nodes."""
    columns = fleet.columns
    free = np.flatnonzero(columns.free_gpus == columns.gpus)
    if len(free) < wanted:
        return None
    for level in (columns.leaf, columns.pod, np.zeros(len(fleet), np.int64)):
        counts = np.bincount(level[free])
        enough = np.flatnonzero(counts >= wanted)
        if len(enough):
            below = free[level[free] == enough[np.argmin(counts[enough])]]
            break
    taken: list[Column] = []
    left = wanted
    counts = np.bincount(columns.leaf[below])
    while left:
        # The smallest leaf that holds the rest, or else the largest.
        enough = np.flatnonzero(counts >= left)
        leaf = int(enough[np.argmin(counts[enough])]) if len(enough) else int(np.argmax(counts))
        mine = below[columns.leaf[below] == leaf][:left]
        taken.append(mine)
        left -= len(mine)
        counts[leaf] = 0
    return np.sort(np.concatenate(taken))


def fragment(fleet: Fleet, free: int, rng: random.Random) -> None:
    """Fills the fleet with jobs of 1 to 64 nodes by the tree rule, then ends some by chance."""
    jobs: dict[int, Column] = {}
    number = 10**9
    while True:
        size = min(2 ** rng.randint(0, 6), int((fleet.columns.free_gpus > 0).sum()))
        if not size:
            break
        number += 1
        found = tree_best_fit(fleet, size)
        assert found is not None
        jobs[number] = found
        for node in found.tolist():
            fleet.take(number, node, whole(fleet.nodes[node]))
    left = free
    for job in rng.sample(sorted(jobs), len(jobs)):
        if left <= 0:
            break
        for node in jobs[job].tolist():
            fleet.release(job, node)
        left -= len(jobs[job])


def fragmented(fleet: Fleet, wanted: int) -> bool:
    """Whether a gang of whole nodes must stand below more switches than on an empty fleet."""
    columns = fleet.columns
    free = np.flatnonzero(columns.free_gpus == columns.gpus)
    return any(
        fewest(np.bincount(level[free]), wanted) > fewest(np.bincount(level), wanted)
        for level in (columns.leaf, columns.pod)
    )


def fewest(counts: Column, wanted: int) -> int:
    """Switches that have so many nodes below them together, the fullest first."""
    return 1 + int(np.searchsorted(np.cumsum(np.sort(counts)[::-1]), wanted))


@dataclass(frozen=True)
class Costs:
    """Predicted nanoseconds of a step's communication on one fleet."""

    ours: int
    tree: int
    floor: int  # what the NICs alone take: no arrangement is cheaper
    fragmented: bool

    @property
    def ratio(self) -> float:
        return self.ours / self.tree

    @property
    def floored(self) -> bool:
        """Whether no rule could beat the tree rule."""
        return self.tree <= self.floor * 1.001


def compare(site: Site, gang: str, seed: int, nodes: int) -> Costs:
    """The same gang on the same fragmented fleet, placed by both rules."""
    rng = random.Random(f"{site.name}/{gang}/{seed}")
    asked = shape(gang)
    wanted = asked.slots(asked.replicas)
    fleet = fleet_of(site, nodes)
    fragment(fleet, int(wanted * rng.uniform(1.05, 2.5)), rng)
    theirs = tree_best_fit(fleet, wanted)
    request = PlacementRequest(job=1, shape=asked, replicas=asked.replicas, fabric=site.fabric())
    ours = place(fleet, request)
    assert theirs is not None and isinstance(ours, Placement)
    ours_ns, tree_ns = (
        cost_of(fleet, site.fabric(), asked, asked.replicas, found).time_ns
        for found in (np.asarray(ours.nodes, np.int64), theirs)
    )
    return Costs(
        ours_ns,
        tree_ns,
        inside_leaf_ns(site.fabric(), asked, asked.replicas),
        fragmented(fleet, wanted),
    )


def giant(rounds: int) -> tuple[list[float], list[float]]:
    """(by the clock, of CPU) seconds to place 98,304 GPUs on fragmented fleets of 100,000.

    Each fleet is a fresh one, so that its index is built within the time.
    """
    wall: list[float] = []
    cpu: list[float] = []
    mapping = Mapping(tensor=8, pipeline=16, data=768)
    work = Workload(model=resolve_model(PRESETS["llama3-405b"]), sequence=8192, global_batch=6144)
    gang = gang_of(work, mapping)
    for seed in range(rounds):
        fleet = fleet_of(SITES[0])
        rng = random.Random(seed)
        for node in rng.sample(range(NODES), NODES - gang.slots(768) - 50):
            fleet.take(10**9 + node, node, whole(fleet.nodes[node]))
        request = PlacementRequest(job=1, shape=gang, replicas=768)
        begun = time.perf_counter(), time.process_time()
        placement = place(fleet, request)
        wall.append(time.perf_counter() - begun[0])
        cpu.append(time.process_time() - begun[1])
        assert isinstance(placement, Placement) and len(placement.nodes) == gang.slots(768)
    return wall, cpu


def spread(ratios: list[float]) -> str:
    """Deciles of some ratios for the table."""
    ordered = sorted(ratios)
    picks = [ordered[len(ordered) * tenth // 10] for tenth in (1, 5, 9)]
    return "".join(f"{ratio:8.2f}" for ratio in [*picks, ordered[-1]])


def geometric(found: list[Costs]) -> float:
    """Mean of ratios: halving one and doubling another cancel out."""
    return statistics.geometric_mean([costs.ratio for costs in found])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fleets", type=int, default=20, help="random fleets for each row")
    parser.add_argument("--nodes", type=int, default=4_000, help="nodes of a random fleet")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/placement.json"))
    asked = parser.parse_args()
    seconds, cpu = giant(asked.rounds)
    print(
        f"98,304 GPUs on a fragmented fleet of 100,000: median {statistics.median(seconds):.3f} s,"
        f" worst {max(seconds):.3f} s of {len(seconds)};"
        f" of CPU {statistics.median(cpu):.3f} s, worst {max(cpu):.3f} s"
    )
    print("\npredicted communication, ours over the tree rule's:")
    print(f"{'fabric':22}{'gang':26}{'p10':>8}{'median':>8}{'p90':>8}{'worst':>8}   fragmented")
    rows: list[tuple[str, str, Costs]] = []
    for site in SITES:
        for gang in GANGS:
            found = [compare(site, gang, seed, asked.nodes) for seed in range(asked.fleets)]
            rows.extend((site.name, gang, costs) for costs in found)
            count = sum(costs.fragmented for costs in found)
            table = spread([costs.ratio for costs in found])
            print(f"{site.name:22}{gang:26}{table}   {count} of {len(found)}")
    broken = [costs for _, _, costs in rows if costs.fragmented]
    mean = geometric(broken)
    print(f"\n{'':22}{'':20}{'fleets':>6}{'mean':>8}{'p10':>8}{'median':>8}{'p90':>8}{'worst':>8}")
    for name, some in (
        ("all fleets", [costs for _, _, costs in rows]),
        ("fragmented", broken),
        ("fragmented, tree rule above the NICs' floor", [c for c in broken if not c.floored]),
        ("not fragmented", [costs for _, _, costs in rows if not costs.fragmented]),
    ):
        if some:
            table = spread([costs.ratio for costs in some])
            print(f"{name:42}{len(some):6}{geometric(some):8.2f}{table}")
    above = [costs.ours / costs.floor for _, _, costs in rows]
    print(f"ours over the floor, all fleets: p10 / p50 / p90 / worst {spread(above)}")
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    details = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "rows": [(*row[:2], asdict(row[2])) for row in rows],
    }
    asked.out.write_text(json.dumps(details))
    figures = {
        "giant_seconds": statistics.median(seconds),
        "cost_mean": mean,
        "cost_median": statistics.median(costs.ratio for costs in broken),
    }
    return report("placement", figures)


if __name__ == "__main__":
    sys.exit(main())
