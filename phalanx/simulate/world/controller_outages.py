"""The controller dies and another takes over: gangs train on meanwhile, and nothing is decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.cluster.policy import DAY_NS

if TYPE_CHECKING:
    from phalanx.simulate.world.world import World


class ControllerOutages:
    """One after the other, as often and as long as the scenario says."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._luck = world.draws.stream("controller")

    def start(self) -> None:
        """Plans the first."""
        per_day = self._world.scenario.faults.controller_per_day
        if per_day:
            self._world.agenda.after(int(self._luck.exponential(DAY_NS / per_day)), self._lose)

    def _lose(self) -> None:
        world = self._world
        length = self._luck.exponential(world.scenario.faults.controller_minutes * 60e9)
        world.story.say(world.agenda.now_ns, "the controller is lost")
        world.driver.lose_controller()
        world.agenda.after(int(length), self._take_over)

    def _take_over(self) -> None:
        self._world.driver.take_over()
        self.start()
