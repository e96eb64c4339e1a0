"""The shell of a simulated core: numbers events, hands out commands, keeps deadlines."""

from __future__ import annotations

from collections.abc import Callable

from phalanx.cluster.core import Core
from phalanx.cluster.protocol.commands import Command
from phalanx.cluster.protocol.events import ControllerStarted, Event, EventBody, Tick
from phalanx.simulate.rules.invariants import Invariants
from phalanx.simulate.world.agenda import Agenda

Receiver = Callable[[Event, list[Command]], None]


class Driver:
    """One core in virtual time."""

    def __init__(self, core: Core, agenda: Agenda, receive: Receiver, checks: Invariants) -> None:
        self.core = core
        self.agenda = agenda
        self.checks = checks
        self.events = 0
        self._receive = receive
        self._armed_ns: int | None = None
        self._away = False
        self._unheard: list[EventBody] = []

    def lose_controller(self) -> None:
        """Nothing is decided from now on; whoever has something to tell keeps it."""
        self._away = True

    def take_over(self) -> None:
        """A controller goes on from the log; agents tell it what the one before did not hear."""
        unheard, self._unheard, self._away = self._unheard, [], False
        for body in (ControllerStarted(epoch=self.core.epoch + 1), *unheard):
            self.tell(body)

    def tell(self, body: EventBody) -> None:
        """An event happens now."""
        if self._away:
            self._unheard.append(body)
            return
        event = Event(self.core.sequence + 1, self.agenda.now_ns, body)
        commands = self.core.handle(event)
        self.events += 1
        self.checks.after(event, commands)
        self._receive(event, commands)
        self._arm()

    def _arm(self) -> None:
        deadline = self.core.next_deadline_ns()
        if deadline is not None and (self._armed_ns is None or deadline < self._armed_ns):
            self._armed_ns = deadline
            self.agenda.at(deadline, self._tick, deadline)

    def _tick(self, asked_ns: int) -> None:
        if self._armed_ns == asked_ns:
            self._armed_ns = None
        if self._away:
            return
        deadline = self.core.next_deadline_ns()
        if deadline is None:
            return
        if deadline <= self.agenda.now_ns:
            self.tell(Tick())
        else:
            self._arm()
