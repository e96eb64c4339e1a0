"""A fleet in virtual time around the unchanged core: faults, repairs, gangs, people, storage.

Events that would arrive without incident (heartbeats, answers of single nodes, steps) are not
played: a gang answers each phase once, when its slowest node would have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from phalanx.cluster.core import Core
from phalanx.cluster.jobs.job import JobSpec
from phalanx.cluster.node import NodeState
from phalanx.cluster.policy import Policy
from phalanx.cluster.protocol import commands as order
from phalanx.cluster.protocol import events as fact
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import Event
from phalanx.cluster.protocol.messages import CheckResult, DeviceError
from phalanx.simulate.draws import SeedDraws
from phalanx.simulate.rules.world_rules import WorldRules
from phalanx.simulate.scenario.scenario import Scenario
from phalanx.simulate.scenario.shape import make_fleet, make_policy, ns
from phalanx.simulate.story import Story
from phalanx.simulate.world.agenda import Agenda
from phalanx.simulate.world.controller_outages import ControllerOutages
from phalanx.simulate.world.driver import Driver, Receiver
from phalanx.simulate.world.exposure import Exposure
from phalanx.simulate.world.gangs import Gangs
from phalanx.simulate.world.incidents import Incident, Incidents
from phalanx.simulate.world.people import Operators
from phalanx.simulate.world.program_faults import ProgramFaults
from phalanx.simulate.world.seed_counts import SeedCounts
from phalanx.simulate.world.slow import MeasuredFabric, SlowNodes

OUT = (NodeState.DEAD, NodeState.QUARANTINED)
LOOK_NS = 600 * 10**9  # whether all jobs of a trace have ended is asked this often
PARTS = 200  # of the time, after each of which it is said how much is over
RULES_LOOK_NS = 6 * 3600 * 10**9  # what takes long to go wrong is asked this often


class World:
    """Everything outside of the core."""

    def __init__(
        self, scenario: Scenario, seed: int, loud: bool = False, policy: Policy | None = None
    ) -> None:
        self.scenario = scenario
        self.draws = SeedDraws(seed)
        self.agenda = Agenda()
        self.fleet = make_fleet(scenario)
        self.core = Core(self.fleet, policy or make_policy(scenario))
        self.view = self.core.view
        self.end_ns = ns(scenario.days * 86400)
        self.broken: dict[int, Incident] = {}
        self.incidents = 0
        self.record = SeedCounts()
        self.checks = WorldRules(self)
        self.story = Story(loud)
        self.listeners: list[Receiver] = []  # hear of every handled event
        self.driver = Driver(self.core, self.agenda, self._ordered, self.checks)
        self.tell = self.driver.tell
        self.gangs = Gangs(self)
        self.slow = SlowNodes(self)
        self.program_faults = ProgramFaults(self)
        self.exposure = Exposure(self)
        self.people = Operators(self)
        self.outages = ControllerOutages(self)
        self._checks_luck = self.draws.stream("check")
        self._idle_luck = self.draws.stream("idle")
        self._repair_luck = self.draws.stream("repair")
        self._faults = iter(Incidents(scenario, self.fleet, self.draws))
        self._orders: dict[type[Any], Callable[[Any, Command], None]] = {
            order.Form: self.gangs.on_form,
            order.Restore: self.gangs.on_restore,
            order.Go: MeasuredFabric(self).on_go,
            order.Abort: self.gangs.on_abort,
            order.Drain: self.gangs.on_drain,
            order.Stop: self.gangs.on_stop,
            order.Rebalance: self.gangs.on_rebalance,
            order.FailureRate: self.gangs.on_failure_rate,
            order.Check: self._on_check,
            order.Ask: self.people.on_ask,
        }

    def run(
        self,
        jobs: list[tuple[int, JobSpec]],
        passed: Callable[[float], None] = lambda share: None,
    ) -> None:
        """Plays the whole time with these submissions; ``passed`` hears how much of it is over."""
        for time_ns, spec in jobs:
            self.agenda.at(time_ns, self.tell, fact.Submit(spec=spec))
        self._next_incident()
        self.slow.start()
        self.people.start()
        self.outages.start()
        self.exposure.start()
        self.agenda.after(RULES_LOOK_NS, self._look_at_rules)
        self._play(len(jobs), passed)
        self.checks.look()
        self.gangs.close()
        self.checks.close()

    def _play(self, jobs: int, passed: Callable[[float], None]) -> None:
        """All of the time; of a recorded trace only until its last job has ended."""
        traced = self.scenario.workload.kind == "csv"
        step_ns = LOOK_NS if traced else max(LOOK_NS, self.end_ns // PARTS)
        while self.agenda.now_ns < self.end_ns and not (traced and self._all_ended(jobs)):
            self.agenda.run(min(self.end_ns, self.agenda.now_ns + step_ns))
            passed(self.agenda.now_ns / self.end_ns)
        self.end_ns = self.agenda.now_ns

    def _all_ended(self, jobs: int) -> bool:
        ended = sum(self.record.refused.values()) + sum(self.record.ended.values())
        return ended >= jobs

    def _look_at_rules(self) -> None:
        self.checks.look()
        self.agenda.after(RULES_LOOK_NS, self._look_at_rules)

    def _ordered(self, event: Event, commands: list[Command]) -> None:
        """Carries out what the core orders, after the event and never inside it."""
        self.story.write(event, commands)
        self.record.ordered(event, commands, self.view)
        for listener in self.listeners:
            listener(event, commands)
        for command in commands:
            handler = self._orders.get(type(command.body))
            if handler is not None:
                self.agenda.at(self.agenda.now_ns, handler, command.body, command)

    # Faults and repairs.

    def _next_incident(self) -> None:
        incident = next(self._faults, None)
        if incident is not None and incident.time_ns <= self.end_ns:
            self.agenda.at(incident.time_ns, self._strike, incident)

    def _strike(self, incident: Incident) -> None:
        self._next_incident()
        nodes = [node for node in incident.nodes if self._works(node)]
        nodes = nodes if self._wears(incident, nodes) else []
        if not nodes:
            return
        self.incidents += 1
        self.record.count_node_faults(nodes)
        self.story.say(self.agenda.now_ns, f"{incident.cause} ({incident.symptom}) on {nodes}")
        gpu = int(incident.quantile * self.fleet.nodes[nodes[0]].gpus)
        jobs = self.jobs_on(nodes, gpu if self._hits_one_gpu(incident) else -1)
        if jobs:
            gpus = sum(self.gangs.gpus(job) for job in jobs)
            self.record.interruptions.append((self.agenda.now_ns, incident.cause, gpus))
        if incident.repair_ns:
            for node in nodes:
                self.broken[node] = incident
                self.agenda.at(self.people.repaired_ns(incident.repair_ns), self._repaired, node)
        delay = self.detection_ns(incident)
        faults = self.gangs.faults
        for job in jobs:
            faults.apply(job, incident, nodes)
        if incident.symptom == "silent":
            faults.wipe_kept(nodes)
        if incident.symptom in ("silent", "cut"):
            for node in nodes:
                self.agenda.after(delay, self.silent, node, incident)
            for job in jobs if self.scenario.detection.seconds is None else ():
                faults.missed(job)
            return
        for job in jobs:
            faults.announce(job, incident, nodes, delay)
        if not jobs and incident.repair_ns:
            for node in nodes:
                self.agenda.after(delay, self._device_error, node, incident)

    def _works(self, node: int) -> bool:
        return node not in self.broken and self.fleet.state(node) not in OUT

    def _wears(self, incident: Incident, nodes: list[int]) -> bool:
        """Whether a fault happens: less often where no job holds any of its nodes."""
        share = self.scenario.faults.idle_share
        if share == 1.0 or any(self.fleet.held[node] for node in nodes):
            return True
        return self._idle_luck.at(incident.time_ns).chance(share)

    def _hits_one_gpu(self, incident: Incident) -> bool:
        return incident.symptom == "exit" and len(incident.nodes) == 1

    def jobs_on(self, nodes: list[int], gpu: int = -1) -> list[int]:
        """Jobs with workers on some nodes, or on one GPU of them."""
        jobs: dict[int, None] = {}
        for node in nodes:
            for job, held in self.fleet.held[node].items():
                if gpu < 0 or held.gpus >> gpu & 1:
                    jobs[job] = None
        return list(jobs)

    def detection_ns(self, incident: Incident) -> int:
        """From a fault until the core is told."""
        detection = self.scenario.detection
        if detection.seconds is not None:
            return ns(detection.seconds)
        if incident.symptom in ("silent", "cut"):
            # The last heartbeat came up to one interval before the fault.
            timeouts = self.core.view.policy.timeouts
            early = int(incident.quantile * timeouts.heartbeat_ns)
            return (
                timeouts.heartbeat_ns * timeouts.missed_heartbeats - early + timeouts.round_trip_ns
            )
        if incident.symptom == "hang":
            if detection.hang_seconds is not None:
                return ns(detection.hang_seconds)
            return self.gangs.hang_ns(self.jobs_on(list(incident.nodes)))
        return ns(detection.exit_seconds)

    def silent(self, node: int, incident: Incident) -> None:
        """The core gives up a node that says nothing, unless it has already."""
        gone = self.broken.get(node) is incident or not incident.repair_ns
        if gone and self.fleet.state(node) is not NodeState.DEAD:
            self.gangs.report_of([node])  # whoever leaves now is heard no more
            self.tell(fact.NodeSilent(node=node))

    def _device_error(self, node: int, incident: Incident) -> None:
        if self.broken.get(node) is incident:
            self.tell(DeviceError(node=node, cause=incident.cause))

    def _repaired(self, node: int) -> None:
        incident, now = self.broken[node], self.agenda.now_ns
        failed = self._repair_luck.at(now ^ node).chance(self.scenario.repair.fails_share)
        if failed:
            self.record.failed_repairs += 1
            self.agenda.at(self.people.repaired_ns(incident.repair_ns), self._repaired, node)
        else:
            del self.broken[node]
        did = "failed to repair" if failed else "repaired"
        self.story.say(now, f"{did} {node} ({incident.cause})")
        if self.fleet.state(node) in OUT:  # whoever repaired it takes it for whole
            self.tell(fact.NodeRepaired(node=node))
        elif not failed and incident.symptom in ("silent", "cut"):
            self.gangs.faults.back(node, incident.cause)

    def _on_check(self, body: order.Check, command: Command) -> None:
        delay = ns(self.scenario.repair.check_seconds)
        self.agenda.after(delay, self._checked, body.node, body.check, command.sequence)

    def _checked(self, node: int, check: str, command: int) -> None:
        incident = self.broken.get(node)
        if incident is not None and incident.symptom in ("silent", "cut"):
            return  # it cannot answer; the core's deadline says so
        cause = incident.cause if incident is not None else self.slow.cause(node)
        passed = not cause or self._checks_luck.chance(self.scenario.repair.missed_share)
        self.tell(
            CheckResult(
                node=node,
                check=check,
                passed=passed,
                command=command,
                cause="" if passed else cause,
            )
        )
