"""Nodes that become slow, lose a network card, and storage that browns out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from phalanx.cluster import events as fact
from phalanx.cluster.policy import DAY_NS
from phalanx.simulate.shape import ns

if TYPE_CHECKING:
    from phalanx.simulate.runs import Run
    from phalanx.simulate.world import World

# What a rank that is slow for a cause shows.
PARTS: dict[str, Literal["compute", "communication"]] = {
    "slow_compute": "compute",
    "slow_network": "communication",
}


class SlowNodes:
    """What hurts without stopping anything."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._slow: dict[int, int] = {}  # node: how much longer its steps take, ppm
        self._times = world.draws.stream("slow", "time")
        self._each = world.draws.stream("slow", "each")
        self._rail_times = world.draws.stream("rail", "time")
        self._rail_each = world.draws.stream("rail", "each")
        self._storage = world.draws.stream("storage")
        self._causes: dict[int, str] = {}
        self._number = 0
        self.found = 0

    def start(self) -> None:
        """Plans the first of everything."""
        faults, nodes = self.world.scenario.faults, len(self.world.fleet)
        self._slow_per_day = faults.slow_per_1000_node_days * nodes / 1000
        self._rail_per_day = faults.rail_per_1000_node_days * nodes / 1000
        self._plan_slow()
        self._plan_rail()
        self._plan_storage()

    def factor_ppm(self, nodes: tuple[int, ...]) -> int:
        """How much longer a step of a gang on these nodes takes: its slowest node decides."""
        if not self._slow:
            return 0
        gang = set(nodes)
        return max((ppm for node, ppm in self._slow.items() if node in gang), default=0)

    def cause(self, node: int) -> str:
        """What a check finds slow about a node; "": nothing."""
        return self._causes.get(node, "") if node in self._slow else ""

    def _plan_slow(self) -> None:
        if self._slow_per_day:
            delay = self._times.exponential(DAY_NS / self._slow_per_day)
            self.world.agenda.after(int(delay), self._slows)

    def _slows(self) -> None:
        self._plan_slow()
        luck = self._each.at(self._number)
        self._number += 1
        node = luck.below(len(self.world.fleet))
        faults = self.world.scenario.faults
        network = luck.chance(faults.slow_share_network)
        if node in self.world.broken or node in self._slow:
            return
        excess = round((faults.slow_factor - 1) * 1e6)
        length = luck.exponential(faults.slow_minutes * 60e9)
        self._set(node, excess)
        self._causes[node] = "slow_network" if network else "slow_compute"
        self.world.agenda.after(int(length), self._recovers, node)
        for job in self.world.jobs_on([node]):
            run = self.world.gangs.runs.get(job)
            if run is not None and run.phase == "running":
                self._plan_found(run, node)

    def watch(self, run: Run) -> None:
        """A gang makes steps: those of its nodes that are slow will be found."""
        gang = set(run.nodes) if self._slow else ()
        for node in self._slow:
            # A dead network card has told an error of its own.
            if node in gang and self._causes[node] in PARTS:
                self._plan_found(run, node)

    def _plan_found(self, run: Run, node: int) -> None:
        wait = self.world.scenario.detection.slow_steps * run.pace().step_ns
        self.world.agenda.after(wait, self._found, run.job, run.generation, node)

    def _found(self, job: int, generation: int, node: int) -> None:
        run = self.world.gangs.runs.get(job)
        current = run is not None and run.generation == generation and run.phase == "running"
        if run is None or not current or node not in self._slow or node not in run.nodes:
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
                gangs.change_pace(run, now, self.factor_ppm(run.nodes))

    # Network cards.

    def _plan_rail(self) -> None:
        if self._rail_per_day:
            delay = self._rail_times.exponential(DAY_NS / self._rail_per_day)
            self.world.agenda.after(int(delay), self._rail_dies)

    def _rail_dies(self) -> None:
        self._plan_rail()
        node = self._rail_each.below(len(self.world.fleet))
        rails = self.world.scenario.fleet.rails
        rail = self._rail_each.below(rails)
        if node in self.world.broken or node in self._slow or rails < 2:
            return
        exposed = self.world.scenario.job.exposed_share
        self._set(node, max(1, round(exposed * 1e6 / (rails - 1))))
        self._causes[node] = "nic"
        delay = ns(self.world.scenario.detection.exit_seconds)
        error = fact.DeviceError(node=node, cause="nic", rail=rail)
        self.world.agenda.after(delay, self.world.tell, error)
        hours = self.world.scenario.repair.hours
        repair = self._rail_each.exponential((24.0 if hours is None else hours) * 3600e9)
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
