"""People: they answer questions, stop jobs for new code, undo divergences, bring nodes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from phalanx.cluster.node import NodeState
from phalanx.cluster.policy import DAY_NS
from phalanx.cluster.protocol import commands as order
from phalanx.cluster.protocol import events as fact
from phalanx.cluster.protocol.commands import Command
from phalanx.simulate.scenario.shape import ns, rollback_steps
from phalanx.simulate.world.working_hours import WorkingHours

if TYPE_CHECKING:
    from phalanx.simulate.world.world import World

ROUND_NS = 3600 * 10**9  # a technician looks at nodes that are out of work this often
AGAIN_NS = 600 * 10**9  # a job that makes no steps just now is looked at again after this long


class Operators:
    """What is done by hand."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.planned = 0
        self.answers = self.rollbacks = 0
        self.hours = WorkingHours(world.scenario.people)
        self._luck = world.draws.stream("planned")
        self._diverging = world.draws.stream("divergence")

    def start(self) -> None:
        """Plans the first of everything."""
        self._plan_stop()
        self._expect_divergence()
        self.world.agenda.after(ROUND_NS, self._round)

    def on_ask(self, body: order.Ask, command: Command) -> None:
        """A question of the core is answered with yes."""
        self.world.agenda.at(self._seen_ns(), self._answer, body.question)

    def repaired_ns(self, repair_ns: int) -> int:
        """When a repair that begins now is done."""
        now = self.world.agenda.now_ns
        own = self.world.scenario.people
        return self.hours.done_ns(now, repair_ns) if own.repairs else now + repair_ns

    def _seen_ns(self) -> int:
        """When somebody has seen what happens now."""
        now, own = self.world.agenda.now_ns, self.world.scenario.people
        there_ns = self.hours.next_ns(now)
        answered_ns = there_ns + ns(self.world.scenario.policy.answer_minutes * 60)
        if there_ns == now or own.on_call_minutes is None:
            return answered_ns
        return min(answered_ns, now + ns(own.on_call_minutes * 60))

    def _answer(self, question: int) -> None:
        self.answers += 1
        self.world.tell(fact.Answer(question=question, approve=True, by="operator"))

    def _plan_stop(self) -> None:
        per_day = self.world.scenario.faults.planned_per_day
        if per_day:
            work_ns = int(self._luck.exponential(DAY_NS / per_day) * self.hours.share)
            self.world.agenda.at(self.hours.done_ns(self.world.agenda.now_ns, work_ns), self._stop)

    def _stop(self) -> None:
        self._plan_stop()
        running = [run.job for run in self.world.gangs.runs.values() if run.phase == "running"]
        if running:
            self.planned += 1
            self.world.tell(fact.Requeue(job=self._luck.choice(running)))

    def _expect_divergence(self) -> None:
        per_day = self.world.scenario.people.divergences_per_day
        if per_day:
            after_ns = int(self._diverging.exponential(DAY_NS / per_day))
            self.world.agenda.after(after_ns, self._diverge)

    def _diverge(self) -> None:
        """The loss of a job runs away; it trains on until somebody has seen it."""
        self._expect_divergence()
        now = self.world.agenda.now_ns
        running = [run for run in self.world.gangs.runs.values() if run.phase == "running"]
        if running:
            run = self._diverging.choice(running)
            self.world.story.say(now, f"the loss of job {run.job} diverges")
            self.world.agenda.at(self._seen_ns(), self._roll_back, run.job, run.step(now))

    def _roll_back(self, job: int, step: int) -> None:
        """A job goes back to before the step at which its loss diverged."""
        gangs, now = self.world.gangs, self.world.agenda.now_ns
        run, known = gangs.runs.get(job), self.world.view.jobs.get(job)
        if known is None or known.ended:
            return
        if run is None or run.phase != "running":
            self.world.agenda.after(AGAIN_NS, self._roll_back, job, step)
            return
        if run.step(now) < step:
            return  # a fault has taken it back already
        self.rollbacks += 1
        gangs.report(run)
        gangs.stop_steps(run)
        gangs.clean[job] = max(0, step - rollback_steps(self.world.scenario))
        self.world.tell(fact.LossSpike(job=job, generation=run.generation, step=step))

    def _round(self) -> None:
        """Nodes that the core put away and that are not broken (any more) are offered again."""
        self.world.agenda.after(ROUND_NS, self._round)
        state = self.world.fleet.columns.state
        out = np.nonzero((state == NodeState.DEAD) | (state == NodeState.QUARANTINED))[0].tolist()
        for node in out:
            if node not in self.world.broken:
                self.world.tell(fact.NodeRepaired(node=node))
