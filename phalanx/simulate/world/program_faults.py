"""Faults of programs, not of nodes: as often as the size of their job says, or at their start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cluster.causes import Cause
from phalanx.cluster.policy import DAY_NS
from phalanx.simulate.draws import DrawStream
from phalanx.simulate.scenario.rates import of_job_per_day
from phalanx.simulate.world.incidents import Incident
from phalanx.simulate.world.runs import GangRun

if TYPE_CHECKING:
    from phalanx.simulate.world.world import World


class ProgramFaults:
    """The next one of each gang that runs; its luck goes by job and generation alone."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._luck = world.draws.stream("job fault")
        self._start_luck = world.draws.stream("start")

    def watch(self, run: GangRun) -> None:
        """A gang makes steps from now on."""
        per_day = self._per_day(run)
        if per_day:
            luck = self._luck.at(run.job << 24 ^ run.generation)
            after_ns = int(luck.exponential(DAY_NS / per_day))
            self._world.agenda.after(after_ns, self._strike, run, luck)

    def fail_start(self, run: GangRun) -> bool:
        """Whether a worker of a gang that forms ends; the core is told so."""
        world, luck = self._world, self._start_luck.at(run.job << 24 ^ run.generation)
        if not luck.chance(world.scenario.restart.fails_share):
            return False
        world.record.failed_starts += 1
        node = luck.choice(run.nodes)
        world.gangs.living.get(run.job, {}).pop(node, None)
        world.gangs.faults.exit(run, node, Cause.SOFTWARE_BUG)
        return True

    def per_day(self) -> float:
        """Of all gangs that run now."""
        runs = self._world.gangs.runs.values()
        return sum(self._per_day(run) for run in runs if run.phase == "running")

    def _per_day(self, run: GangRun) -> float:
        return of_job_per_day(self._world.scenario, self._world.gangs.gpus(run.job))

    def _strike(self, run: GangRun, luck: DrawStream) -> None:
        world = self._world
        if world.gangs.runs.get(run.job) is not run or run.phase != "running":
            return
        node = luck.choice(run.nodes)
        incident = Incident(
            number=run.generation,
            time_ns=world.agenda.now_ns,
            cause=Cause.SOFTWARE_BUG,
            symptom="exit",
            nodes=(node,),
            repair_ns=0,
            quantile=luck.uniform(),
        )
        world.story.say(incident.time_ns, f"{incident.cause} of job {run.job} on node {node}")
        hit = (incident.time_ns, incident.cause, world.gangs.gpus(run.job))
        world.record.interruptions.append(hit)
        world.gangs.faults.apply(run.job, incident, [node])
        world.gangs.faults.announce(run.job, incident, [node], world.detection_ns(incident))
