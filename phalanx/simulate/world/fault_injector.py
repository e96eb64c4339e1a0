"""What faults do to gangs, and how the core comes to know: exits, silence, peers, replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cluster.causes import Cause
from phalanx.cluster.protocol import commands as order
from phalanx.cluster.protocol import events as fact
from phalanx.cluster.protocol.messages import WorkerExited
from phalanx.simulate.scenario.shape import ns
from phalanx.simulate.world.incidents import Incident
from phalanx.simulate.world.runs import GangRun

if TYPE_CHECKING:
    from phalanx.simulate.world.gangs import Gangs
    from phalanx.simulate.world.world import World


class FaultInjector:
    """Faults as the gangs of a world suffer them."""

    def __init__(self, world: World, gangs: Gangs) -> None:
        self.world = world
        self.gangs = gangs

    def apply(self, job: int, incident: Incident, nodes: list[int]) -> None:
        """A fault takes nodes of a gang: steps end, and what was under way does not happen."""
        run = self.gangs.runs.get(job)
        if incident.symptom == "silent":
            self.gangs.wiped.setdefault(job, {}).update(dict.fromkeys(nodes))
        if incident.symptom == "corruption":
            return
        for node in nodes:
            self.gangs.living.get(job, {}).pop(node, None)
        if run is None:
            return
        if run.phase == "running":
            self.gangs.stop_steps(run)
        elif run.phase in ("joining", "restoring"):
            run.token += 1

    def wipe_kept(self, nodes: list[int]) -> None:
        """Nodes lose what they keep for jobs that wait."""
        for job in self.gangs.memory:
            if job not in self.gangs.runs:
                self.gangs.wiped.setdefault(job, {}).update(dict.fromkeys(nodes))

    def announce(self, job: int, incident: Incident, nodes: list[int], delay_ns: int) -> None:
        """The core will be told of a fault."""
        run = self.gangs.runs.get(job)
        if run is None:
            return
        if incident.symptom == "corruption":
            self.corrupts(run, nodes[0])
            return
        hung = incident.symptom == "hang" and run.phase != "stopped"
        if hung:  # in formation nobody makes steps: the deadline of the phase tells
            phase = "join" if run.phase == "joining" else "restore"
            gang = self.world.view.jobs[job].gang
            assert gang is not None
            self.blocked(run, phase, tuple(nodes), gang.deadline_ns)
            return
        self.world.agenda.after(delay_ns, self._told, run, incident, tuple(nodes))

    def missed(self, job: int) -> None:
        """Nodes are gone without a word: peers see their collective fail, and say so."""
        run, seconds = self.gangs.runs.get(job), self.world.scenario.detection.peer_seconds
        if run is None or run.stopped_ns != self.world.agenda.now_ns or seconds is None:
            return  # it made no steps, so nobody waited for anybody
        self.world.agenda.after(ns(seconds), self._lost_peer, run)

    def _lost_peer(self, run: GangRun) -> None:
        if self.gangs.runs.get(run.job) is not run:
            return
        broken = self.world.broken
        peer = next((node for node in run.nodes if node not in broken), None)
        if peer is not None:
            self.gangs.report(run)
            self.exit(run, peer, Cause.LOST_PEER)

    def back(self, node: int, cause: str) -> None:
        """A node that nobody missed yet is there again, and says that its workers are gone."""
        for job in self.world.jobs_on([node]):
            run = self.gangs.runs.get(job)
            if run is not None and node in run.nodes and node not in self.gangs.living.get(job, ()):
                self.gangs.report(run)
                self.exit(run, node, cause)

    def asked(self, body: order.Abort, nodes: tuple[int, ...]) -> None:
        """Nodes must confirm that they left a collective: the dead ones do not."""
        asked = set(nodes)
        for node, incident in self.world.broken.items():
            if node in asked and incident.symptom in ("silent", "cut"):
                self.world.agenda.at(body.answer_ns, self.world.silent, node, incident)

    def _told(self, run: GangRun, incident: Incident, nodes: tuple[int, ...]) -> None:
        if self.gangs.runs.get(run.job) is not run:
            return  # a later generation has found out by itself
        self.gangs.report(run)
        now = self.world.agenda.now_ns
        involved = [node for node in nodes if run.job in self.world.fleet.held[node]]
        if incident.symptom == "hang":
            located = incident.quantile < self.world.scenario.detection.hang_located_share
            self.world.tell(
                fact.NoProgress(
                    job=run.job,
                    generation=run.generation,
                    step=run.step(now),
                    nodes=tuple(involved) if located else (),
                )
            )
            return
        for node in involved:
            self.exit(run, node, incident.cause)

    def exit(self, run: GangRun, node: int, cause: str) -> None:
        """Workers of a node tell why they end."""
        step = run.step(self.world.agenda.now_ns)
        width = max(1, self.world.view.jobs[run.job].spec.gang.slot_gpus)
        self.world.tell(
            WorkerExited(
                job=run.job,
                generation=run.generation,
                node=node,
                rank=run.nodes.index(node) * width if node in run.nodes else 0,
                cause=cause,
                step=step,
            )
        )

    def corrupts(self, run: GangRun, node: int) -> None:
        """Wrong numbers until replicas are compared."""
        every, now = self.world.scenario.detection.corruption_steps, self.world.agenda.now_ns
        if run.phase != "running":
            return
        step = run.step(now)
        step_seen = (step // every + 1) * every
        run.clean = min(run.clean, step // every * every)
        # Every checkpoint is told in truth: the last clean one must not get lost between reports.
        self.gangs.report(run, run.clean)
        run.corrupted[node] = min(step_seen, run.corrupted.get(node, step_seen))
        self.world.agenda.at(run.done_ns(step_seen), self.compared, run, run.token, node, step_seen)

    def compared(self, run: GangRun, token: int, node: int, step: int) -> None:
        """Replicas differ after a step, and a vote tells whose numbers are wrong."""
        if run.token != token or self.gangs.runs.get(run.job) is not run:
            return
        self.gangs.report(run)
        self.gangs.stop_steps(run)
        self.gangs.clean[run.job] = max(0, run.clean)
        self.world.tell(
            fact.Corruption(
                job=run.job,
                generation=run.generation,
                step=step,
                clean_step=max(0, run.clean),
                nodes=(node,),
            )
        )

    def blockers(self, run: GangRun) -> tuple[int, ...]:
        """Broken nodes that keep a gang from forming."""
        fleet = self.world.fleet
        return tuple(
            node
            for node, incident in self.world.broken.items()
            if incident.symptom != "corruption" and run.job in fleet.held[node]
        )

    def blocked(self, run: GangRun, phase: str, nodes: tuple[int, ...], deadline_ns: int) -> None:
        """Part of a gang will not answer: its error says so, or at the latest the deadline does."""
        for node in nodes:
            incident = self.world.broken.get(node)
            if incident is not None and incident.symptom == "exit":
                delay = self.world.detection_ns(incident)
                self.world.agenda.after(delay, self._exit_of, run, node, incident.cause)
        self.world.agenda.at(deadline_ns, self._stuck, run, run.token, phase, nodes)

    def _exit_of(self, run: GangRun, node: int, cause: str) -> None:
        if self.gangs.runs.get(run.job) is run and run.job in self.world.fleet.held[node]:
            self.exit(run, node, cause)

    def _stuck(self, run: GangRun, token: int, phase: str, nodes: tuple[int, ...]) -> None:
        if run.token == token and self.gangs.runs.get(run.job) is run:
            self.world.tell(
                fact.GangStuck(
                    job=run.job,
                    generation=run.generation,
                    phase="join" if phase == "join" else "restore",
                    nodes=nodes,
                )
            )
