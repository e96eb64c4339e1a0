"""Nodes that become slow, lose a network card, and storage that browns out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import msgspec

from phalanx.cluster.causes import Cause
from phalanx.cluster.fabric.verdict import FabricFinding, FabricVerdict
from phalanx.cluster.policy import DAY_NS
from phalanx.cluster.protocol import commands as order
from phalanx.cluster.protocol import events as fact
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.messages import DeviceError
from phalanx.cluster.units import MILLION, SECOND_NS
from phalanx.simulate.draws import DrawStream
from phalanx.simulate.scenario.shape import ns
from phalanx.simulate.world.incidents import on_nodes

if TYPE_CHECKING:
    from phalanx.simulate.world.runs import GangRun
    from phalanx.simulate.world.world import World

Arrivals = Iterator[tuple[int, int, DrawStream]]  # when, to which node, and the luck of the rest
# What a rank that is slow for a cause shows.
PARTS: dict[str, Literal["compute", "communication"]] = {
    Cause.SLOW_COMPUTE: "compute",
    Cause.SLOW_NETWORK: "communication",
}
MEASURED_NS = 10 * SECOND_NS  # that a check of the fabric takes
SLOW_FABRIC = (Cause.SLOW_NETWORK, Cause.NIC)  # what it sees


class SlowNodes:
    """What hurts without stopping anything."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._slow: dict[int, int] = {}  # node: how much longer its steps take, ppm
        faults = world.scenario.faults
        given = world.scenario, world.fleet, world.draws
        self._slows_next = on_nodes(*given, "slow", faults.slow_per_1000_node_days)
        self._rails_next = on_nodes(*given, "rail", faults.rail_per_1000_node_days)
        self._storage = world.draws.stream("storage")
        self._causes: dict[int, str] = {}
        self.found = 0

    def start(self) -> None:
        """Plans the first of everything."""
        self._plan(self._slows_next, self._slows)
        self._plan(self._rails_next, self._rail_dies)
        self._plan_storage()

    def factor_ppm(self, nodes: tuple[int, ...]) -> int:
        """How much longer a step of a gang on these nodes takes: its slowest node decides."""
        return max(self._among(nodes).values(), default=0)

    def _among(self, nodes: tuple[int, ...]) -> dict[int, int]:
        """Those of some nodes that are slow."""
        gang = set(nodes) if self._slow else ()
        return {node: ppm for node, ppm in self._slow.items() if node in gang}

    def pace_ppm(self, run: GangRun) -> int:
        """How much longer its steps take: that of its slowest node, or of its slowest replica.

        Where a slow replica was given fewer micro-batches, each is slow for as many as it has;
        that helps against slow computing, not against a slow network.
        """
        if not run.shares:
            return self.factor_ppm(run.nodes)
        shape = self.world.view.jobs[run.job].spec.gang
        replicas = len(run.shares)
        slow, least = dict.fromkeys(range(replicas), 0), 0
        for node, ppm in self._among(run.nodes).items():
            if self._causes[node] != Cause.SLOW_COMPUTE:
                least = max(least, ppm)
                continue
            for replica in shape.slot_replicas(run.nodes.index(node), replicas):
                slow[replica] = max(slow[replica], ppm)
        longest = max(run.shares[replica] * (MILLION + ppm) for replica, ppm in slow.items())
        even = -(-sum(run.shares) // replicas)
        return max(least, longest // even - MILLION)

    def cause(self, node: int) -> str:
        """What a check finds slow about a node; "": nothing."""
        return self._causes.get(node, "") if node in self._slow else ""

    def _plan(self, what: Arrivals, then: Callable[[int, DrawStream], None]) -> None:
        found = next(what, None)
        if found is not None and found[0] <= self.world.end_ns:
            self.world.agenda.at(found[0], then, found[1], found[2])

    def _slows(self, node: int, luck: DrawStream) -> None:
        self._plan(self._slows_next, self._slows)
        faults = self.world.scenario.faults
        network = luck.chance(faults.slow_share_network)
        if node in self.world.broken or node in self._slow:
            return
        excess = round((faults.slow_factor - 1) * 1e6)
        length = luck.exponential(faults.slow_minutes * 60e9)
        self._causes[node] = Cause.SLOW_NETWORK if network else Cause.SLOW_COMPUTE
        self._set(node, excess)
        self.world.agenda.after(int(length), self._recovers, node)
        for job in self.world.jobs_on([node]):
            run = self.world.gangs.runs.get(job)
            if run is not None and run.phase == "running":
                self._plan_found(run, node)

    def watch(self, run: GangRun) -> None:
        """A gang makes steps: those of its nodes that are slow will be found."""
        for node in self._among(run.nodes):
            if self._causes[node] in PARTS:  # a dead network card has told an error of its own
                self._plan_found(run, node)

    def _plan_found(self, run: GangRun, node: int) -> None:
        wait = self.world.scenario.detection.slow_steps * run.pace().step_ns
        self.world.agenda.after(wait, self._found, run.job, run.generation, node)

    def _found(self, job: int, generation: int, node: int) -> None:
        run = self.world.gangs.runs.get(job)
        current = run is not None and run.generation == generation and run.phase == "running"
        if run is None or not current or node not in run.nodes or self.cause(node) not in PARTS:
            return
        self.found += 1
        self.world.gangs.report(run)
        width = max(1, self.world.view.jobs[job].spec.gang.slot_gpus)
        self.world.tell(
            fact.SlowRank(
                job=job,
                generation=generation,
                node=node,
                rank=run.nodes.index(node) * width,
                part=PARTS[self._causes[node]],
                slowdown_ppm=self._slow[node],
                step_ns=run.pace().step_ns,
            )
        )

    def _recovers(self, node: int) -> None:
        self._set(node, 0)

    def _set(self, node: int, ppm: int) -> None:
        jobs = self.world.jobs_on([node])
        gangs, now = self.world.gangs, self.world.agenda.now_ns
        for job in jobs:  # what was reached at the old speed is told before it changes
            run = gangs.runs.get(job)
            if run is not None and run.phase == "running":
                gangs.report(run)
        if ppm:
            self._slow[node] = ppm
        else:
            self._slow.pop(node, None)
        for job in jobs:
            run = gangs.runs.get(job)
            if run is not None and run.phase == "running":
                gangs.change_pace(run, now, self.pace_ppm(run))

    # Network cards.

    def _rail_dies(self, node: int, luck: DrawStream) -> None:
        self._plan(self._rails_next, self._rail_dies)
        rails = self.world.scenario.fleet.rails
        rail = luck.below(rails)
        if node in self.world.broken or node in self._slow or rails < 2:
            return
        exposed = self.world.scenario.job.exposed_share
        self._causes[node] = Cause.NIC
        self._set(node, max(1, round(exposed * 1e6 / (rails - 1))))
        delay = ns(self.world.scenario.detection.exit_seconds)
        error = DeviceError(node=node, cause=Cause.NIC, rail=rail)
        self.world.agenda.after(delay, self.world.tell, error)
        hours = self.world.scenario.repair.hours
        repair = luck.exponential((24.0 if hours is None else hours) * 3600e9)
        self.world.agenda.after(int(repair), self._recovers, node)

    # Storage.

    def _plan_storage(self) -> None:
        faults = self.world.scenario.faults
        if faults.storage_per_day:
            delay = self._storage.exponential(DAY_NS / faults.storage_per_day)
            self.world.agenda.after(int(delay), self._browns_out)

    def _browns_out(self) -> None:
        length = int(self._storage.exponential(self.world.scenario.faults.storage_minutes * 60e9))
        now = self.world.agenda.now_ns
        self.world.gangs.brownouts.add(now, now + length)
        self.world.tell(fact.StorageSlow(bytes_per_second=0))
        self.world.agenda.after(length, self._storage_back)

    def _storage_back(self) -> None:
        self.world.tell(fact.StorageSlow(bytes_per_second=-1))
        self._plan_storage()


class MeasuredFabric:
    """Programs of fabric checks: they run for some seconds, and tell whose network is slow."""

    def __init__(self, world: World) -> None:
        self._world = world

    def on_go(self, body: order.Go, command: Command) -> None:
        """A gang goes; where it is a check, it has measured soon."""
        check = self._world.view.fabric_checks.running
        if check is not None and check.job == body.job:
            self._world.agenda.after(MEASURED_NS, self._measured, body.job, body.generation)

    def _measured(self, job: int, generation: int) -> None:
        run = self._world.gangs.runs.get(job)
        if run is None or run.generation != generation or run.phase != "running":
            return
        names = self._world.fleet.nodes
        findings = (
            FabricFinding(text=f"node {names[node].name}", nodes=(names[node].name,))
            for node in run.nodes
            if self._world.slow.cause(node) in SLOW_FABRIC
        )
        result = msgspec.json.encode(FabricVerdict(findings=tuple(findings))).decode()
        done = fact.JobFinished(job=job, generation=generation, step=0, result=result)
        self._world.tell(done)
