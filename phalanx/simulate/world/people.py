"""People: they answer the core's questions, stop jobs for new code, and bring nodes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from phalanx.cluster.fleet.node import NodeState
from phalanx.cluster.policy import DAY_NS
from phalanx.cluster.protocol import commands as order
from phalanx.cluster.protocol import events as fact
from phalanx.cluster.protocol.commands import Command
from phalanx.simulate.scenario.shape import ns

if TYPE_CHECKING:
    from phalanx.simulate.world.world import World

ROUND_NS = 3600 * 10**9  # a technician looks at nodes that are out of work this often


class Operators:
    """What is done by hand."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.planned = 0
        self.answers = 0
        self._luck = world.draws.stream("planned")

    def start(self) -> None:
        """Plans the first of everything."""
        self._plan_stop()
        self.world.agenda.after(ROUND_NS, self._round)

    def on_ask(self, body: order.Ask, command: Command) -> None:
        """A question of the core is answered with yes."""
        delay = ns(self.world.scenario.policy.answer_minutes * 60)
        self.world.agenda.after(delay, self._answer, body.question)

    def _answer(self, question: int) -> None:
        self.answers += 1
        self.world.tell(fact.Answer(question=question, approve=True, by="operator"))

    def _plan_stop(self) -> None:
        per_day = self.world.scenario.faults.planned_per_day
        if per_day:
            self.world.agenda.after(int(self._luck.exponential(DAY_NS / per_day)), self._stop)

    def _stop(self) -> None:
        self._plan_stop()
        running = [run.job for run in self.world.gangs.runs.values() if run.phase == "running"]
        if running:
            self.planned += 1
            self.world.tell(fact.Requeue(job=self._luck.choice(running)))

    def _round(self) -> None:
        """Nodes that the core put away and that are not broken (any more) are offered again."""
        self.world.agenda.after(ROUND_NS, self._round)
        state = self.world.fleet.columns.state
        out = np.nonzero((state == NodeState.DEAD) | (state == NodeState.QUARANTINED))[0].tolist()
        for node in out:
            if node not in self.world.broken:
                self.world.tell(fact.NodeRepaired(node=node))
